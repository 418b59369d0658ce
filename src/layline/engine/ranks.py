"""One rank as the driver sees it: its connection, its process, and what is known of its end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import IO

from layline import errors
from layline.engine.wire import Failed, FrameReader, FromRank, from_rank_reader
from layline.errors import LaylineError, RunError
from layline.topology import Topology

_TAIL = 4000


class Sign(Enum):
    """How a rank showed that something is wrong."""

    REPORTED = "it said so"
    SILENT = "no heartbeat"
    GARBLED = "it sent what is no message"
    ENDED = "its connection ended"


class UnexpectedError(Exception):
    """An exception of a rank that is none of Layline's."""


@dataclass(frozen=True)
class Limits:
    """Seconds without a word after which a rank counts as gone.

    ``starting`` holds until a rank's imports are done, as loading a library keeps the interpreter
    to itself, and only while the system runs its process. ``stopping`` is how long a rank may take
    to end by itself.
    """

    silence: float = 8.0
    starting: float = 120.0
    stopping: float = 2.0


@dataclass
class RankLink:
    """A rank's control connection. ``process`` and ``log`` are None where others started it.

    ``pid`` is 0 where it is not known, and ``is_sibling`` says that the process is on this machine
    and has the parent that this process has. Times are those of the monotonic clock.
    """

    rank: int
    title: str
    sock: socket.socket
    process: subprocess.Popen[bytes] | None = None
    log: IO[bytes] | None = None
    reader: FrameReader[FromRank] = field(default_factory=from_rank_reader)
    outgoing: bytearray = field(default_factory=bytearray)
    pid: int = 0
    is_sibling: bool = False
    heard_at: float = 0.0
    limit_s: float = 0.0
    signed_at: float = 0.0
    greeted: bool = False
    closed: bool = False
    sign: Sign | None = None
    detail: str = ""
    report: Failed | None = None

    def __post_init__(self) -> None:
        if self.process is not None:
            self.pid = self.process.pid

    def is_silent(self, now: float, limits: Limits) -> bool:
        """True when the rank was not heard for longer than the limit of what it does."""
        seconds = now - self.heard_at
        self.limit_s = limits.silence
        if seconds > self.limit_s and not self.greeted and not is_stopped(self.pid):
            self.limit_s = limits.starting
        return seconds > self.limit_s

    def reported(self) -> Exception:
        """The error that the rank said it has."""
        assert self.report is not None
        error = rebuilt(self.report.error, self.report.message)
        error.add_note(f"{self.title}:\n{self.report.traceback}")
        return error

    def gone(self, awaited_step: int | None = None) -> RunError:
        """The error for a rank that does not answer any more, while a step was waited for."""
        if self.sign is Sign.SILENT:
            what = f"stopped answering: no heartbeat for {self.limit_s:g} s"
        elif self.sign is Sign.GARBLED:
            what = f"sent {self.detail}"
        else:
            what = f"ended unexpectedly{self._exit_text()}"
        awaited = "" if awaited_step is None else f" while step {awaited_step} was waited for"
        error = RunError(f"{self.title} {what}{awaited}; the run is over")
        tail = self._log_tail()
        if tail:
            error.add_note(f"{self.title} printed:\n{tail}")
        return error

    def ended(self) -> bool:
        """True when the rank's process, or where others own that its connection, has ended."""
        return self.closed if self.process is None else self.process.poll() is not None

    def kill(self, *, others: bool = False) -> None:
        """End the process and the connection, whatever state they are in.

        ``others``: also a process that is not ours but a sibling. Whoever started it may wait long
        for one that is stopped.
        """
        if others and self.is_sibling and not self.closed and is_sibling(self.pid):
            with contextlib.suppress(OSError):
                os.kill(self.pid, signal.SIGKILL)
        if self.process is not None:
            with contextlib.suppress(OSError):
                self.process.kill()
            self.process.wait()
        self.closed = True
        self.sock.close()
        if self.log is not None:
            self.log.close()

    def _exit_text(self) -> str:
        if self.process is None:
            return ""
        try:
            status = self.process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return ""
        if status < 0:
            with contextlib.suppress(ValueError):
                return f", killed by {signal.Signals(-status).name}"
        return f" with exit status {status}"

    def _log_tail(self) -> str:
        if self.log is None:
            return ""
        self.log.seek(0, 2)
        self.log.seek(max(0, self.log.tell() - _TAIL))
        return self.log.read().decode("utf-8", errors="replace").strip()


def is_stopped(pid: int) -> bool:
    """True when the system says that a process does not run: stopped by a signal, or ended."""
    return _process_facts(pid)[0] in ("T", "Z")


def is_sibling(pid: int) -> bool:
    """True when another process has the parent that this one has."""
    return pid != os.getpid() and _process_facts(pid)[1] == os.getppid()


def _process_facts(pid: int) -> tuple[str, int]:
    """State and parent of a process; ("", 0) where that cannot be known."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
        # The program's name comes before, in brackets, and may hold anything.
        state, parent = text.rpartition(")")[2].split()[:2]
        return state, int(parent)
    except (OSError, ValueError):
        return "", 0


def rebuilt(name: str, message: str) -> Exception:
    """An error of another process, by its class's name; one of ours keeps its exit status."""
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, LaylineError):
        return kind(message)
    return UnexpectedError(f"internal error: {name}: {message}")


def rank_title(topology: Topology, stages: range | None = None) -> str:
    """How messages name the rank that ``topology`` stands on, and its pipeline ``stages``."""
    here = topology.coordinates
    places = []
    if stages is not None:
        several = len(stages) > 1
        places.append(f"stages {stages[0]} to {stages[-1]}" if several else f"stage {stages[0]}")
    places.append(f"attention DP {here.attn_dp}")
    if topology.attn_cp > 1:
        places.append(f"CP {here.attn_cp}")
    places.append(f"TP {here.attn_tp}")
    return f"rank {topology.rank} ({', '.join(places)})"
