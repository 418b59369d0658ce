"""``layline chat`` over a fake engine, its input from a pipe and from a terminal."""

from __future__ import annotations

import io
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.terminal import Terminal

HERE = Path(__file__).parent


@pytest.fixture
def talk(layline: Any, loader: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs ``chat`` with lines on a stdin that is no terminal."""

    def call(*lines: str, arguments: tuple[str, ...] = ()) -> Any:
        data = "".join(f"{line}\n" for line in lines).encode("utf-8", errors="surrogateescape")
        stdin = io.TextIOWrapper(io.BytesIO(data), encoding="utf-8")
        monkeypatch.setattr(sys, "stdin", stdin)
        return layline("chat", *arguments)

    return call


def test_answers_are_part_of_the_next_request(talk: Any, loader: Any) -> None:
    result = talk("first", "second")
    assert result.status == 0
    assert result.out == "Hello there\nHello there\n"
    assert loader.llm.requests[1] == [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "Hello there"},
        {"role": "user", "content": "second"},
    ]


def test_reset_forgets_and_system_stays(talk: Any, loader: Any) -> None:
    talk("/system Be brief.", "one", "/reset", "two", "/system", "three")
    system = {"role": "system", "content": "Be brief."}
    assert loader.llm.requests[0] == [system, {"role": "user", "content": "one"}]
    assert loader.llm.requests[1] == [system, {"role": "user", "content": "two"}]
    assert loader.llm.requests[2][0] == {"role": "user", "content": "two"}


def test_exit_leaves_at_once_and_blank_lines_ask_nothing(talk: Any, loader: Any) -> None:
    result = talk("", "   ", "/exit", "never asked")
    assert result.status == 0
    assert loader.llm.requests == []
    assert result.out == ""


def test_help_and_an_unknown_command(talk: Any, loader: Any) -> None:
    result = talk("/help", "/rest")
    assert "/system TEXT" in result.err
    last = result.err.splitlines()[-1]
    assert "'/rest'" in last
    assert "/help, /reset, /system, /exit" in last
    assert "'/reset'" in last


def test_no_template_refuses_before_reading(talk: Any, loader: Any) -> None:
    loader.llm.template = None
    result = talk("hello", arguments=("base-model",))
    assert result.status == 2
    assert result.err.count("\n") == 1
    assert "'base-model' has no chat template" in result.err
    assert "layline generate" in result.err
    assert loader.llm.requests == []


def test_overflow_is_one_line_and_the_session_goes_on(talk: Any, loader: Any) -> None:
    loader.llm.context = 40
    result = talk("short", "x" * 60, "again", "/reset", "fresh")
    assert result.status == 2
    (line,) = [text for text in result.err.splitlines() if "expected at most 40" in text]
    assert "/reset clears the conversation" in line
    # The message that did not fit is not part of the next request.
    assert [turn["content"] for turn in loader.llm.requests[1]] == ["short", "Hello there", "again"]
    assert [turn["content"] for turn in loader.llm.requests[2]] == ["fresh"]


def test_reset_is_no_advice_for_an_empty_conversation(talk: Any, loader: Any) -> None:
    loader.llm.context = 40
    result = talk("x" * 60)
    assert result.status == 2
    assert "expected at most 40" in result.err
    assert "/reset" not in result.err


def test_bytes_that_are_not_utf8_are_refused_by_position(talk: Any, loader: Any) -> None:
    result = talk("né", "ab\udcff", "/system \udcfe", "last")
    assert result.status == 2
    assert result.err.splitlines() == [
        "layline: the message has byte 0xff at position 2; expected UTF-8 text",
        "layline: the message has byte 0xfe at position 8; expected UTF-8 text",
    ]
    assert [turn["content"] for turn in loader.llm.requests[1]] == ["né", "Hello there", "last"]


def test_cut_off_answer_is_marked(talk: Any, loader: Any) -> None:
    loader.llm.finish_reason = "length"
    assert "[cut off" in talk("hello").err


def test_interrupt_keeps_what_was_printed(talk: Any, loader: Any) -> None:
    def interrupt(index: int) -> None:
        if index == 2 and len(loader.llm.requests) == 1:
            os.kill(os.getpid(), signal.SIGINT)

    loader.llm.on_chunk = interrupt
    result = talk("first", "second")
    assert result.status == 0
    assert result.out == "Hello\nHello there\n"
    assert "[stopped]" in result.err
    assert loader.llm.requests[1][1] == {"role": "assistant", "content": "Hello"}
    assert (loader.llm.closed, loader.llm.finished) == (2, 1)


def test_second_interrupt_breaks_off_the_step_itself(talk: Any, loader: Any) -> None:
    def interrupt(index: int) -> None:
        if index == 1 and len(loader.llm.requests) == 1:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            # Python runs handlers between instructions: give it some.
            time.sleep(5)

    loader.llm.on_chunk = interrupt
    result = talk("first", "second")
    assert result.status == 0
    assert loader.llm.requests[1][1]["content"] == "Hel"


def test_the_old_signal_handler_is_put_back(talk: Any, loader: Any) -> None:
    before = signal.getsignal(signal.SIGINT)
    talk("hello")
    assert signal.getsignal(signal.SIGINT) is before


def test_model_may_be_an_argument_or_an_option(talk: Any, loader: Any) -> None:
    talk(arguments=("a",))
    talk(arguments=("--model", "b"))
    talk(arguments=("c", "--model", "c"))
    talk()
    assert [model for model, _ in loader.opened] == ["a", "b", "c", "smollm2-135m"]


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    made = Terminal([sys.executable, str(HERE / "chat_on_fake.py")], HERE)
    yield made
    made.close()


def test_keys_on_a_terminal(terminal: Terminal) -> None:
    terminal.wait_for("> ")
    terminal.type("slow\n")
    terminal.wait_for("tick")
    terminal.type("\x03")
    terminal.wait_for("[stopped]")
    terminal.wait_for("> ")
    terminal.type("half a line")
    terminal.wait_for("half a line")
    terminal.press_until("\x03", "Ctrl-D leaves")
    terminal.wait_for("> ")
    terminal.type("count\n")
    # The stopped answer and its question, and this one: the dropped line is not among them.
    terminal.wait_for("3 messages")
    terminal.wait_for("> ")
    terminal.type("\x04")
    assert terminal.process.wait(timeout=20) == 0
