"""The bar of many prompts: where it is shown, and that nothing of it is left."""

from __future__ import annotations

import contextlib
import io
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from layline import LLM, SamplingParams
from layline.engine.progress import progress_bar
from support.fake_requests import fake_request
from support.tiny import save_tiny

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
SHOW_CURSOR = "\x1b[?25h"


class Terminal(io.StringIO):
    """What stderr is in a terminal."""

    def isatty(self) -> bool:
        return True


def on_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Called by the test itself: pytest gives each of its phases a stderr."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    found = Terminal()
    monkeypatch.setattr(sys, "stderr", found)
    return found


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    path: Path = tmp_path_factory.mktemp("tiny")
    save_tiny(path, "Llama")
    return LLM(str(path), threads=1)


def closed() -> Any:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("stderr", [None, object(), io.StringIO(), closed()], ids=type)
def test_no_terminal_no_bar(llm: LLM, monkeypatch: pytest.MonkeyPatch, stderr: Any) -> None:
    monkeypatch.setattr(sys, "stderr", stderr)
    assert len(llm.generate([[5], [6], [7]], GREEDY)) == 3
    with progress_bar([fake_request(3, 1), fake_request(3, 1)]) as advance:
        assert advance is None


def test_it_goes_when_it_is_interrupted(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    requests = [fake_request(3, 1), fake_request(3, 1)]
    with contextlib.suppress(KeyboardInterrupt), progress_bar(requests) as advance:
        assert advance is not None
        advance()
        raise KeyboardInterrupt
    assert "generating" in terminal.getvalue()
    assert SHOW_CURSOR in terminal.getvalue(), "the cursor is back"
    outputs = llm.generate([[5], [6]], GREEDY)
    assert [len(output.token_ids) for output in outputs] == [4, 4]
    assert "2/2" in terminal.getvalue()


def test_one_within_another(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller's own bar, or a batch that is run while another one waits."""
    terminal = on_terminal(monkeypatch)
    from rich.console import Console
    from rich.progress import Progress

    with (
        Progress(console=Console(stderr=True)),
        progress_bar([fake_request(3, 1), fake_request(3, 1)]) as outer,
    ):
        assert outer is not None
        assert len(llm.generate([[5], [6], [7]], GREEDY)) == 3
        outer()
    assert "3/3" in terminal.getvalue()


def test_threads_with_a_bar_each(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    on_terminal(monkeypatch)
    found: list[int] = []

    def work() -> None:
        found.extend(len(output.token_ids) for output in llm.generate([[5], [6], [7]], GREEDY))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [4] * 9


def test_prompts_that_are_only_read_have_one_too(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    score = SamplingParams(max_tokens=0, prompt_logprobs=0)
    llm.generate([[5] * 30, [6] * 31], score)
    assert "reading" in terminal.getvalue()
    assert "2/2" in terminal.getvalue()
    assert "61 tokens" in terminal.getvalue()
