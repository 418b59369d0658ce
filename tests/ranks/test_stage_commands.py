"""Commands that run pipeline stages in processes: same text, named failures, nothing left."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from support.serving import save_talker, serving, wait_for
from support.tiny import save_tiny

STAGES = ("--pp-stages", "2", "--pp-processes", "2")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny(path, "Llama", num_hidden_layers=4)
    return path


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that goes on for thousands of tokens."""
    path = tmp_path_factory.mktemp("talker")
    save_talker(path, context=1 << 16)
    return path


def generate(
    model: Path, *flags: str, before: tuple[str, ...] = (sys.executable,), tokens: int = 12
) -> subprocess.CompletedProcess[str]:
    arguments = ("generate", "w3 w7 w9", "--model", str(model), "--max-tokens", str(tokens))
    return subprocess.run(
        [*before, "-m", "layline", *arguments, "--temperature", "0", "--json", *flags],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def start(model: Path, *flags: str, before: tuple[str, ...] = (sys.executable,)) -> Any:
    arguments = ("generate", "w1 w2", "--model", str(model), "--max-tokens", "60000")
    return subprocess.Popen(
        [*before, "-m", "layline", *arguments, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("before", [(sys.executable,), (*TORCHRUN, "2")], ids=["spawn", "torchrun"])
def test_generate_over_processes_says_the_same(tiny: Path, before: tuple[str, ...]) -> None:
    wanted = generate(tiny)
    found = generate(tiny, *STAGES, before=before)
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout) == json.loads(wanted.stdout)


def test_torchrun_with_another_number_is_refused(tiny: Path) -> None:
    done = generate(tiny, *STAGES, "--tp", "2", before=(*TORCHRUN, "2"))
    assert done.returncode != 0
    assert done.stdout == ""
    lines = [line for line in done.stderr.splitlines() if line.startswith("layline: ")]
    assert lines == [
        "layline: --pp-processes 2 with --tp 2 needs 4 processes, but torchrun started 2; expected "
        "--nproc-per-node 4"
    ]


def test_torchrun_ends_soon_when_a_stage_does(talker: Path) -> None:
    with start(talker, *STAGES, before=(*TORCHRUN, "2")) as process:
        try:
            assert process.stdout.read(2)
            (victim,) = [
                child
                for child in psutil.Process(process.pid).children()
                if child.environ().get("RANK") == "1"
            ]
            begin = time.monotonic()
            victim.kill()
            _, stderr = process.communicate(timeout=60)
        finally:
            process.terminate()
    assert time.monotonic() - begin < 15
    assert process.returncode == 1
    lines = [line for line in stderr.splitlines() if line.startswith("layline: ")]
    wanted = r"layline: rank 1 \(stage 1, attention DP 0, TP 0\) ended unexpectedly while step \d+ "
    assert len(lines) == 1
    assert re.fullmatch(rf"{wanted}was waited for; the run is over", lines[0]), lines


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_no_stage_outlives_the_command(talker: Path, how: signal.Signals) -> None:
    with start(talker, *STAGES) as process:
        assert process.stdout.read(2)
        stages = psutil.Process(process.pid).children(recursive=True)
        assert len(stages) == 2
        process.send_signal(how)
        process.communicate(timeout=30)
        wait_for(lambda: not any(stage.is_running() for stage in stages))


def test_serve_over_processes(tiny: Path, tmp_path: Path) -> None:
    with serving(tiny, tmp_path, *STAGES) as server:
        asked = {"model": tiny.name, "prompt": "w3 w7 w9", "max_tokens": 8, "temperature": 0}
        reply = httpx2.post(f"{server.url}/v1/completions", json=asked, timeout=30)
        assert reply.json()["usage"]["completion_tokens"] == 8
        steps = server.metrics()
        assert steps['layline_stage_seconds_count{stage="0"}'] >= 8
        assert steps['layline_stage_seconds_count{stage="1"}'] >= 8
        server.ranks()[0].kill()
        assert server.process.wait(20) == 3
        assert "(stage 0, attention DP 0, TP 0) ended unexpectedly" in server.log.read_text()
