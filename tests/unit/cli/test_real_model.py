"""The commands in processes of their own, with the real default model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.model import smollm2_path

pytestmark = pytest.mark.smollm2

QUESTION = "What is the capital of Japan? Answer in one sentence."
GOLDEN = Path(__file__).parents[2] / "golden" / "smollm2.json"


@pytest.fixture(autouse=True)
def pulled() -> None:
    smollm2_path()


def layline(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    # One thread: other tests run beside this one, and the flag is tried on the way.
    if "--threads" not in arguments:
        arguments = (*arguments, "--threads", "1")
    return subprocess.run(
        [sys.executable, "-m", "layline.cli.main", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
    )


def test_generate_json_holds_the_golden_tokens() -> None:
    cases = json.loads(GOLDEN.read_text(encoding="utf-8"))["cases"]
    case = next(case for case in cases if case["name"] == "plain_short")
    done = layline(
        "generate", case["prompt"], "--dtype", "float32", "--max-tokens", "8", "--json", "--stats"
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["prompt_token_ids"] == case["prompt_ids"]
    assert found["token_ids"] == case["greedy_ids"][:8]
    assert found["finish_reason"] == "length"
    assert found["usage"] == {
        "prompt_tokens": len(case["prompt_ids"]),
        "completion_tokens": 8,
        "total_tokens": len(case["prompt_ids"]) + 8,
    }
    assert case["greedy_text"].startswith(found["text"])
    assert done.stderr.count("\n") == 1
    assert "tokens/s" in done.stderr


def test_generate_streams_the_text_it_returns() -> None:
    arguments = ("generate", "The capital of France is", "--max-tokens", "6")
    streamed = layline(*arguments)
    whole = json.loads(layline(*arguments, "--json").stdout)
    assert streamed.stderr == ""
    assert streamed.stdout.removesuffix("\n") == whole["text"].removesuffix("\n")


def test_chat_answers_from_a_pipe_and_refuses_what_does_not_fit() -> None:
    long_line = "word " * 200
    done = layline(
        *("chat", "--temperature", "0", "--max-tokens", "12", "--max-model-len", "128"),
        stdin=f"{QUESTION}\n{long_line}\n/reset\nSay hi.\n",
    )
    assert done.returncode == 2, done.stderr
    assert "Tokyo" in done.stdout.splitlines()[0]
    (refused,) = [line for line in done.stderr.splitlines() if line.startswith("layline:")]
    assert "/reset clears the conversation" in refused


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["generate", ""], ["empty"]),
        (["generate", "word " * 300, "--max-model-len", "64"], ["64"]),
        (["generate", "x", "--model", "no/such/file.gguf"], ["no/such/file.gguf"]),
    ],
)
def test_input_that_cannot_be_used_is_one_line(arguments: list[str], parts: list[str]) -> None:
    done = layline(*arguments)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    for part in parts:
        assert part in done.stderr


def test_bench_latency_measures_through_its_worker() -> None:
    done = layline(
        *("bench", "latency", "--prompt-tokens", "16", "--new-tokens", "4", "--batch", "1,2"),
        *("--repeats", "1", "--threads", "1", "--json"),
    )
    assert done.returncode == 0, done.stderr
    engine = json.loads(done.stdout)["engines"]["layline"]
    assert engine["status"] == "measured"
    # On a busy machine a rate can drown in noise; then it is named, with the reason.
    unsure = engine.pop("not_measured", {})
    assert all(metric.startswith("decode") and why for metric, why in unsure.items())
    assert set(engine) | set(unsure) == {
        "status",
        "version",
        "first_token_s",
        "peak_memory_bytes",
        "prefill_tokens_per_s",
        "decode_tokens_per_s_batch_1",
        "decode_tokens_per_s_batch_2",
        "loaded_peak_memory_bytes",
    }
    assert all(value["min"] > 0 for name, value in engine.items() if name.endswith(("_s", "bytes")))
