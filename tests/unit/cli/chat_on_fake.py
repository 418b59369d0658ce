"""Run by test_chat on a pseudo-terminal: ``layline chat`` with an engine slow on request."""

from __future__ import annotations

import sys
import time
from typing import Any

from conftest import FakeLLM
from layline.cli import session
from layline.cli.main import main
from layline.engine.output import StreamChunk


class SlowLLM(FakeLLM):
    """Ticks for a long time when asked "slow"; else says how many messages it was given."""

    def stream_chat(self, messages: list[dict[str, str]], params: Any = None) -> Any:
        count = len(messages)
        if messages[-1]["content"] != "slow":
            yield StreamChunk(f"{count} messages", [0], "stop")
            return
        for _ in range(200):
            time.sleep(0.05)
            yield StreamChunk("tick ", [0])


session.open_llm = lambda model, run: SlowLLM()
sys.exit(main(["chat"]))
