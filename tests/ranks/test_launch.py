"""Commands that start or join ranks, on the real default model: same text, named failures.

Needs every other part: sharded layers, boundaries on a mesh, gloo.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from layline import LLM, SamplingParams
from layline.errors import RunError, SamplingError, UsageError
from support.model import smollm2_path
from support.serving import save_talker
from support.tiny import save_tiny

PROMPT = "The capital of France is"
TOKENS = 6
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
DRAWN = SamplingParams(temperature=1.2, top_p=0.9, seed=11, max_tokens=12, ignore_eos=True)
PROMPTS = [[5, 9, 11], [7] * 20, [3], [44, 2, 8, 100, 17, 61], [9] * 33]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "layline", *arguments]


def start(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(*arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def generate(*flags: str) -> dict[str, Any]:
    arguments = ("generate", PROMPT, "--dtype", "float32", "--max-tokens", str(TOKENS), "--json")
    done = subprocess.run(
        command(*arguments, *flags), capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def ranks_of(pid: int) -> list[psutil.Process]:
    found = [
        child
        for child in psutil.Process(pid).children(recursive=True)
        if "layline.engine.worker" in child.cmdline()
    ]
    return sorted(found, key=lambda child: child.cmdline().index("layline.engine.worker"))


def wait_for(what: Any, seconds: float = 60) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = what()
        if found:
            return found
        time.sleep(0.05)
    raise AssertionError("it did not happen in time")


@pytest.fixture(scope="module")
def one_rank() -> dict[str, Any]:
    smollm2_path()
    return generate()


@pytest.mark.smollm2
@pytest.mark.parametrize("flags", [("--tp", "3"), ("--tp", "2", "--attn-dp", "2")])
def test_a_mesh_answers_like_one_rank(flags: tuple[str, ...], one_rank: dict[str, Any]) -> None:
    assert generate(*flags) == one_rank


@pytest.mark.smollm2
def test_torchrun_joins_the_same_command(one_rank: dict[str, Any]) -> None:
    arguments = ("generate", PROMPT, "--dtype", "float32", "--max-tokens", str(TOKENS), "--json")
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    done = subprocess.run(
        [*run, "-m", "layline", *arguments, "--tp", "3"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == one_rank, "one process prints, once"


@pytest.mark.smollm2
def test_torchrun_with_another_number_is_refused() -> None:
    smollm2_path()
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*run, "-m", "layline", "generate", PROMPT, "--tp", "3"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode != 0
    assert done.stdout == ""
    lines = [line for line in done.stderr.splitlines() if line.startswith("layline: ")]
    assert lines == [
        "layline: --tp 3 needs 3 processes, but torchrun started 2; expected --tp 2, or "
        "--nproc-per-node 3"
    ]


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that goes on for thousands of tokens: its end-of-sequence id never wins."""
    path = tmp_path_factory.mktemp("talker")
    save_talker(path, context=1 << 16)
    return path


@pytest.fixture
def answering(talker: Path) -> Iterator[subprocess.Popen[str]]:
    """A long answer over two ranks, of which some text has come."""
    arguments = ("generate", "w1 w2", "--model", str(talker), "--max-tokens", "60000", "--tp", "2")
    with start(*arguments) as process:
        assert process.stdout is not None
        assert process.stdout.read(2)
        yield process
        process.kill()


def test_a_rank_that_stops_ends_the_run_within_10_seconds(
    answering: subprocess.Popen[str],
) -> None:
    ranks = ranks_of(answering.pid)
    assert len(ranks) == 2
    begin = time.monotonic()
    ranks[1].suspend()
    _, stderr = answering.communicate(timeout=30)
    assert time.monotonic() - begin < 10
    assert answering.returncode == 3
    words = r"stopped answering: no heartbeat for 8 s while step \d+ was waited for"
    wanted = rf"layline: rank \d \(attention DP 0, TP \d\) {words}; the run is over\n"
    assert re.fullmatch(wanted, stderr), stderr
    assert not any(rank.is_running() for rank in ranks)


def test_a_rank_that_stops_while_it_starts_ends_the_run_within_10_seconds(talker: Path) -> None:
    with start("generate", "w1", "--model", str(talker), "--tp", "2") as process:
        ranks = wait_for(lambda: (found := ranks_of(process.pid))[1:] and found)
        ranks[1].suspend()
        begin = time.monotonic()
        _, stderr = process.communicate(timeout=60)
    assert time.monotonic() - begin < 10
    assert process.returncode == 3
    assert "stopped answering: no heartbeat for 8 s; the run is over" in stderr


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_torchrun_ends_soon_when_a_rank_does(talker: Path, how: signal.Signals) -> None:
    arguments = ("generate", "w1 w2", "--model", str(talker), "--max-tokens", "60000", "--tp", "2")
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with subprocess.Popen(
        [*run, "-m", "layline", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.read(2)
            (victim,) = [
                child
                for child in psutil.Process(process.pid).children()
                if child.environ().get("RANK") == "1"
            ]
            begin = time.monotonic()
            victim.send_signal(how)
            _, stderr = process.communicate(timeout=60)
        finally:
            process.terminate()
    assert time.monotonic() - begin < 15
    assert process.returncode == 1
    lines = [line for line in stderr.splitlines() if line.startswith("layline: ")]
    what = "stopped answering: no heartbeat for 8 s"
    if how is signal.SIGKILL:
        what = "ended unexpectedly"
    wanted = rf"layline: rank 1 \(attention DP 0, TP 1\) {what} while step \d+ was waited for; "
    assert len(lines) == 1
    assert re.fullmatch(f"{wanted}the run is over", lines[0]), lines


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_no_rank_outlives_the_command(
    answering: subprocess.Popen[str], how: signal.Signals
) -> None:
    ranks = ranks_of(answering.pid)
    answering.send_signal(how)
    _, stderr = answering.communicate(timeout=30)
    assert answering.returncode == (130 if how is signal.SIGINT else -how)
    assert stderr == ""
    wait_for(lambda: not any(rank.is_running() for rank in ranks), seconds=10)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny(path, "Llama")
    return path


@pytest.fixture(scope="module")
def alone(directory: Path) -> dict[str, list[list[int]]]:
    llm = LLM(str(directory), threads=1)
    return answers(llm)


def answers(llm: LLM) -> dict[str, list[list[int]]]:
    return {
        name: [output.token_ids for output in llm.generate(PROMPTS, params)]
        for name, params in (("greedy", GREEDY), ("drawn", DRAWN))
    }


@pytest.mark.parametrize(
    "mesh",
    [
        {"tp": 2},
        {"tp": 4, "attn_dp": 2, "prefill_tokens": 11},
        {"tp": 4, "attn_dp": 2, "attn_cp": 2, "cp_layout": "zigzag", "dp_padding": "sum-len"},
        {"tp": 2, "sequence_parallel": True, "input_scattered": True},
    ],
    ids=lambda mesh: "-".join(f"{name}={value}" for name, value in mesh.items()),
)
def test_greedy_and_seeded_tokens_do_not_depend_on_the_mesh(
    directory: Path, alone: dict[str, list[list[int]]], mesh: dict[str, Any]
) -> None:
    with LLM(str(directory), threads=1, **mesh) as llm:
        assert answers(llm) == alone
        report = llm.memory_report()
        assert report["kv_cache"] > 0
        assert len(llm.worker_peaks()) == mesh["tp"]
        assert all(queue.stats.blocks_held == 0 for queue in parts(llm))
    with pytest.raises(RunError, match="closed"):
        llm.generate([PROMPTS[0]], GREEDY)


def parts(llm: LLM) -> Any:
    return llm._engine._scheduler.parts


def test_a_run_uses_what_it_started(directory: Path) -> None:
    """Logprobs, streams, an early close, a lost worker: the interface is that of one rank."""
    with LLM(str(directory), threads=1) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=4, logprobs=2, ignore_eos=True)
        (wanted,) = llm.generate([PROMPTS[0]], params)
    before = {child.pid for child in psutil.Process().children()}
    llm = LLM(str(directory), threads=1, tp=2)
    ranks = [child for child in psutil.Process().children() if child.pid not in before]
    assert len(ranks) == 2
    (found,) = llm.generate([PROMPTS[0]], params)
    assert found.logprobs is not None
    assert wanted.logprobs is not None
    for ours, theirs in zip(found.logprobs, wanted.logprobs, strict=True):
        assert ours.token_id == theirs.token_id
        assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
    with pytest.raises(SamplingError, match="logit_bias token id 5000 is not in the vocabulary"):
        llm.generate([PROMPTS[0]], SamplingParams(logit_bias={5000: 1.0}))
    stream = llm.stream(PROMPTS[1], GREEDY)
    next(stream)
    stream.close()
    assert not llm._engine.has_work
    stream = llm.stream(PROMPTS[1], GREEDY)
    next(stream)
    os.kill(ranks[1].pid, signal.SIGKILL)
    with pytest.raises(RunError, match=r"rank \d \(attention DP 0, TP \d\) ended unexpectedly"):
        list(stream)
    with pytest.raises(RunError, match="ended unexpectedly"):
        llm.generate([PROMPTS[0]], params)
    assert not any(rank.is_running() for rank in ranks)
    llm.close()


def test_what_a_rank_refuses_is_the_same_line(directory: Path) -> None:
    caught = []
    for tp in (1, 2):
        with pytest.raises(UsageError) as error:
            LLM(str(directory), threads=1, tp=tp, kv_memory=4096)
        caught.append(str(error.value))
    # A rank holds half of the key heads, so half of the memory is enough for it.
    wanted = (
        "kv_memory 4096 bytes holds 0 tokens; expected room for one sequence of max_model_len 64: "
    )
    assert [line.rpartition(" ")[0] + " " for line in caught] == [wanted, wanted]


def test_nothing_is_ever_in_the_temporary_folder(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So nothing stays when this process is killed, be it while it loads."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    start, seen = subprocess.Popen.__init__, []

    def watched(*arguments: Any, **options: Any) -> None:
        start(*arguments, **options)
        seen.append(list(tmp_path.iterdir()))

    monkeypatch.setattr(subprocess.Popen, "__init__", watched)
    with LLM(str(directory), threads=1, tp=2) as llm:
        assert seen == [[], []]
        assert list(tmp_path.iterdir()) == []
        assert len(llm.generate([PROMPTS[0]], GREEDY)) == 1
    assert list(tmp_path.iterdir()) == []


def test_workers_end_with_the_object(directory: Path) -> None:
    before = {child.pid for child in psutil.Process().children()}
    llm = LLM(str(directory), threads=1, tp=2)
    ranks = [child for child in psutil.Process().children() if child.pid not in before]
    stream = llm.stream(PROMPTS[0], GREEDY)
    del llm
    assert len(list(stream)) == 12, "a stream keeps the workers"
    del stream
    wait_for(lambda: not any(rank.is_running() for rank in ranks), seconds=10)
