"""``layline generate`` over a fake engine: what goes to stdout, what to stderr, what is passed."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from layline.config import EngineConfig


def test_text_is_streamed_and_ends_with_a_newline(
    layline: Any, loader: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[str] = []

    class Recorder(io.StringIO):
        def flush(self) -> None:
            flushed.append(self.getvalue())

    recorder = Recorder()
    monkeypatch.setattr(sys, "stdout", recorder)
    assert layline("generate", "Say hello").status == 0
    assert recorder.getvalue() == "Hello there\n"
    assert flushed[:3] == ["Hel", "Hello", "Hello there"]
    assert loader.llm.requests == ["Say hello"]


def test_a_text_that_ends_its_line_gets_no_second_newline(layline: Any, loader: Any) -> None:
    loader.llm.pieces = ["line\n", ""]
    assert layline("generate", "x").out == "line\n"


def test_json_is_one_object_and_nothing_else(layline: Any, loader: Any) -> None:
    loader.llm.pieces = ["héllo\n", "世界"]
    result = layline("generate", "x", "--json", "--stats")
    assert result.out.count("\n") == 1
    assert json.loads(result.out) == {
        "text": "héllo\n世界",
        "token_ids": [0, 1],
        "prompt_token_ids": [7, 8],
        "finish_reason": "stop",
        "usage": {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4},
    }
    assert "tokens/s" in result.err


def test_no_stream_prints_the_same_text_at_once(layline: Any, loader: Any) -> None:
    assert layline("generate", "x", "--no-stream").out == "Hello there\n"


def test_stats_count_decoding_without_the_first_token(layline: Any, loader: Any) -> None:
    # Four tokens, of which three came within the 1.5 s of decoding.
    err = layline("generate", "x", "--stats").err
    assert "2 prompt tokens, first token after 0.50 s" in err
    assert "4 tokens, 2.0 tokens/s" in err
    assert "peak memory" in err
    assert "drafts" not in err


def test_stats_tell_what_became_of_drafts(layline: Any, loader: Any) -> None:
    err = layline("generate", "x", "--stats", "--speculative", "ngram").err
    assert "5 of 9 drafts accepted" in err


def test_flags_reach_the_engine_and_the_sampler(layline: Any, loader: Any) -> None:
    flags = {
        "--model": "m",
        "--device": "cpu",
        "--dtype": "float32",
        "--threads": "3",
        "--max-model-len": "99",
        "--kv-memory": "1.5G",
        "--max-running": "4",
        "--max-tokens": "5",
        "--temperature": "0.5",
        "--top-p": "0.9",
        "--top-k": "7",
        "--min-p": "0.1",
        "--seed": "42",
    }
    arguments = [part for pair in flags.items() for part in pair]
    arguments += ["--stop", "A", "--stop", "BB"]
    assert layline("generate", "x", *arguments).status == 0
    ((model, keywords),) = loader.opened
    wanted = {
        "device": "cpu",
        "dtype": "float32",
        "threads": 3,
        "max_model_len": 99,
        "kv_memory": 3 << 29,
        "max_running": 4,
    }
    assert model == "m"
    assert {name: keywords[name] for name in wanted} == wanted
    assert asdict(EngineConfig(**{k: v for k, v in keywords.items() if v is not None})) == {
        **asdict(EngineConfig()),
        **wanted,
    }
    params = loader.llm.params[0]
    assert (params.max_tokens, params.temperature, params.top_p) == (5, 0.5, 0.9)
    assert (params.top_k, params.min_p, params.seed) == (7, 0.1, 42)
    assert params.stop == ("A", "BB")


def test_generate_is_greedy_unless_told_otherwise(layline: Any, loader: Any) -> None:
    layline("generate", "x")
    assert loader.llm.params[0].temperature == 0.0
    assert loader.opened[0][0] == "smollm2-135m"


def test_chat_flag_sends_one_user_message(layline: Any, loader: Any) -> None:
    assert layline("generate", "--chat", "hi").status == 0
    assert loader.llm.requests == [[{"role": "user", "content": "hi"}]]


@pytest.mark.parametrize(
    ("data", "prompt"), [(b"two\nlines\n", "two\nlines"), (b"\n\n", "\n"), ("né".encode(), "né")]
)
def test_dash_reads_stdin(
    layline: Any, loader: Any, monkeypatch: pytest.MonkeyPatch, data: bytes, prompt: str
) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(data)))
    assert layline("generate", "-").status == 0
    assert loader.llm.requests == [prompt]


def test_bytes_that_are_not_utf8_are_refused(
    layline: Any, loader: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"ab\xff")))
    for result in (layline("generate", "-"), layline("generate", "ab\udcff")):
        assert result.status == 2
        assert result.err == ("layline: PROMPT has byte 0xff at position 2; expected UTF-8 text\n")


def test_reader_that_went_away_is_no_error_message(
    layline: Any, loader: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Gone())
    result = layline("generate", "x")
    assert (result.status, result.err) == (141, "")


def test_interrupt_ends_generate_with_130(layline: Any, loader: Any) -> None:
    def interrupt(index: int) -> None:
        if index == 2:
            raise KeyboardInterrupt

    loader.llm.on_chunk = interrupt
    result = layline("generate", "x")
    assert (result.status, result.err) == (130, "")
    assert loader.llm.closed == 1


@pytest.mark.parametrize("arguments", [["generate", "x"], ["generate", "x", "--json"], ["--help"]])
def test_a_full_disk_is_one_line(
    layline: Any, loader: Any, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        monkeypatch.setattr(sys, "stdout", full)
        result = layline(*arguments)
    assert result.status == 3
    assert result.err == "layline: cannot write the output: No space left on device\n"


@pytest.mark.parametrize("arguments", [["generate", "-"], ["chat"]])
def test_a_closed_stdin_is_one_line(
    layline: Any, loader: Any, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    result = layline(*arguments)
    assert result.status == 2
    assert result.err.startswith("layline: standard input is closed; expected ")
    assert result.err.count("\n") == 1
    assert loader.opened == []


def test_a_closed_stdout_is_one_line(
    layline: Any, loader: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    result = layline("generate", "x")
    assert result.status == 3
    assert result.err == "layline: cannot write the output: standard output is closed\n"
