"""``layline chat`` on two ranks, one of which dies while a line is waited for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from support.serving import save_talker, wait_for
from support.terminal import Terminal

LOST = "layline: rank 1 (attention DP 0, TP 1) ended unexpectedly, killed by SIGKILL"
START_S = 90


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    path = tmp_path_factory.mktemp("talker")
    save_talker(path, context=256)
    return [sys.executable, "-m", "layline", "chat", str(path), "--tp", "2", "--threads", "2"]


def ranks_of(pid: int) -> list[psutil.Process]:
    children = psutil.Process(pid).children(recursive=True)
    found = [child for child in children if "layline.engine.worker" in child.cmdline()]
    return sorted(found, key=lambda child: int(child.cmdline()[-3]))


def test_a_rank_that_dies_ends_the_prompt(command: list[str]) -> None:
    terminal = Terminal(command)
    try:
        terminal.wait_for("> ", START_S)
        ranks = ranks_of(terminal.process.pid)
        assert len(ranks) == 2
        terminal.type("half a line")
        terminal.wait_for("half a line")
        os.kill(ranks[1].pid, signal.SIGKILL)
        terminal.wait_for(LOST)
        assert terminal.process.wait(20) == 3
        assert not any(rank.is_running() for rank in ranks)
    finally:
        terminal.close()


def test_a_rank_that_dies_ends_the_wait_for_a_pipe(command: list[str], tmp_path: Path) -> None:
    log = tmp_path / "log"
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("w2 w6\n")
            process.stdin.flush()
            assert process.stdout.readline(), "an answer: everything runs"
            ranks = ranks_of(process.pid)
            os.kill(ranks[1].pid, signal.SIGKILL)
            assert process.wait(20) == 3
            wait_for(lambda: not any(rank.is_running() for rank in ranks))
        finally:
            process.kill()
    text = log.read_text()
    assert text.startswith(LOST) or f"\n{LOST}" in text
    assert "Traceback" not in text
