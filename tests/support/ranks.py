"""Run a function on real processes, one for each rank of a topology, and leave none behind."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from layline.topology import Topology

# Forked from a server that has imported what tests import, a process starts in milliseconds.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["torch", "layline.comm.world", "hypothesis", "pytest"])


@dataclass(frozen=True)
class Outcome:
    """What became of one rank: a value, or a traceback, or neither when it died on the way."""

    rank: int
    value: Any = None
    error: str | None = None
    exit_code: int | None = None


@dataclass(frozen=True)
class Settings:
    """How the ranks of a test communicate."""

    backend: str = "gloo"
    verified: bool | None = None
    group_timeout_s: float = 10.0


DEFAULT = Settings()


def run_processes(
    topology: Topology,
    function: Callable[..., Any],
    *arguments: Any,
    settings: Settings = DEFAULT,
    timeout_s: float = 60.0,
) -> list[Any]:
    """``function(topology.at(rank), groups, *arguments)`` on every rank; its results by rank.

    ``function`` is a module's own (processes import it by name), and what it takes and returns is
    pickled. Raises AssertionError with the traceback of every rank that failed.
    """
    outcomes = run_outcomes(topology, function, *arguments, settings=settings, timeout_s=timeout_s)
    failed = [
        f"rank {outcome.rank} (exit code {outcome.exit_code}): {outcome.error or 'no answer'}"
        for outcome in outcomes
        if outcome.error is not None or outcome.exit_code != 0
    ]
    assert not failed, "\n".join(failed)
    return [outcome.value for outcome in outcomes]


def run_outcomes(
    topology: Topology,
    function: Callable[..., Any],
    *arguments: Any,
    settings: Settings = DEFAULT,
    timeout_s: float = 60.0,
) -> list[Outcome]:
    """Like :func:`run_processes`, for tests in which ranks fail: what became of each.

    Ranks that have not ended after ``timeout_s`` are killed and have exit code -9.
    """
    job = _packed((function, arguments))
    processes, ends = [], []
    folder = tempfile.TemporaryDirectory(prefix="layline-ranks-")
    meeting = str(Path(folder.name) / "meeting")
    try:
        for rank in range(topology.world_size):
            mine, its = PROCESSES.Pipe()
            process = PROCESSES.Process(
                target=_rank_main,
                args=(topology.at(rank), meeting, job, settings, its),
                daemon=True,
            )
            process.start()
            its.close()
            processes.append(process)
            ends.append(mine)
        answers = _collect(ends, time.monotonic() + timeout_s)
        for process in processes:
            process.join(0.0 if len(answers) < len(processes) else 5.0)
    finally:
        _kill(processes)
        folder.cleanup()
    return [
        Outcome(rank, *answers.get(rank, (None, None)), exit_code=process.exitcode)
        for rank, process in enumerate(processes)
    ]


def _collect(ends: list[Connection], deadline: float) -> dict[int, tuple[Any, str | None]]:
    """The answers of all ranks that give one: a rank that dies closes its end."""
    answers: dict[int, tuple[Any, str | None]] = {}
    pending = {end: rank for rank, end in enumerate(ends)}
    while pending and (ready := wait(list(pending), max(0.0, deadline - time.monotonic()))):
        for end in ready:
            assert isinstance(end, Connection)
            rank = pending.pop(end)
            try:
                answers[rank] = _unpacked(end.recv_bytes())
            except EOFError:
                continue
    for end in ends:
        end.close()
    return answers


def _packed(value: Any) -> bytes:
    """Bytes with every tensor whole; a connection alone sends handles, which end with a process."""
    import torch

    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def _unpacked(data: bytes) -> Any:
    import torch

    return torch.load(io.BytesIO(data), weights_only=False)


def _kill(processes: Iterable[Any]) -> None:
    for process in processes:
        if process.is_alive():
            process.kill()
    for process in processes:
        process.join()


def _rank_main(
    topology: Topology, meeting: str, job: bytes, settings: Settings, answer: Connection
) -> None:
    threading.Thread(target=_die_with_parent, daemon=True).start()
    import torch

    from layline.comm import world

    torch.set_num_threads(1)
    try:
        function, arguments = _unpacked(job)
        device = torch.device("cpu")
        if settings.backend == "nccl":
            device = torch.device("cuda", topology.rank)
        store = world.FileStore(meeting, topology.world_size)
        world.open_world(topology, store, device)
        groups = world.make_groups(
            topology, device, timeout_s=settings.group_timeout_s, verified=settings.verified
        )
        reply = (function(topology, groups, *arguments), None)
    except BaseException:
        reply = (None, traceback.format_exc())
    answer.send_bytes(_packed(reply))
    # The last to answer may still be receiving from this rank; the parent closes when all have.
    with contextlib.suppress(EOFError):
        answer.recv_bytes()
    # Not through torch's own end: it would wait for peers that may be gone.
    os._exit(0)


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
