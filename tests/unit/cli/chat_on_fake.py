"""Run by test_chat on a pseudo-terminal: ``layline chat`` with an engine that is slow on request."""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace
from typing import Any

from conftest import FakeLLM

from layline.cli import session
from layline.cli.main import main


class SlowLLM(FakeLLM):
    """Ticks for a long time when asked "slow"; else says how many messages it was given."""

    def stream_chat(self, messages: list[dict[str, str]], params: Any = None) -> Any:
        count = len(messages)
        if messages[-1]["content"] != "slow":
            yield SimpleNamespace(text=f"{count} messages", finish_reason="stop")
            return
        for _ in range(200):
            time.sleep(0.05)
            yield SimpleNamespace(text="tick ", finish_reason=None)


session.open_llm = lambda model, run: SlowLLM()
sys.exit(main(["chat"]))
