"""Which memory a stream's tasks read and write, said beforehand and told to a recorder.

A recorder hears, in the order in which the host issues them, every task with its declared accesses
and every record, wait and host wait. That order alone decides what happens before what, so that a
missing wait is seen in every run, however lucky its timing. In production nothing listens.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from layline.pipeline.device import StageDevice


@dataclass(frozen=True, eq=False)
class Buffer:
    """A piece of memory with an identity: a slot, a cache, scratch, or a task's result.

    ``device`` is where it is. A task on another device that reads it, reads remotely.
    """

    name: str
    device: StageDevice


@dataclass(frozen=True, eq=False)
class Operation:
    """One task on one stream, with what it declares."""

    stream: str
    device: StageDevice
    label: str
    reads: tuple[Buffer, ...] = ()
    writes: tuple[Buffer, ...] = ()

    @property
    def remote_reads(self) -> tuple[Buffer, ...]:
        """What it reads from another device's memory."""
        return tuple(buffer for buffer in self.reads if buffer.device != self.device)


class AccessRecorder(Protocol):
    """Hears what streams do. ``event`` is an object's identity; streams go by their names.

    Called with streams locked, so it must not call back; ``touched`` and ``running`` come from the
    thread that runs a task.
    """

    def allocated(self, buffer: Buffer, tensor: Any) -> None:
        """``buffer`` is the memory behind ``tensor`` from now on."""

    def issued(self, operation: Operation) -> None:
        """The host enqueued a task."""

    def recorded(self, stream: str, event: object) -> None:
        """The host enqueued a record."""

    def waited(self, stream: str, event: object) -> None:
        """The host enqueued a wait for the event's latest record."""

    def host_waited(self, *, stream: str | None = None, event: object | None = None) -> None:
        """The host has seen all of a stream's work end, or an event's latest record."""

    def touched(self, operation: Operation | None, buffer: Buffer) -> None:
        """A running task read a buffer that it may not have declared; None is the host."""

    def running(self, operation: Operation) -> AbstractContextManager[None]:
        """The scope in which the task runs, in its thread."""

    def held_up(self, stream: str, event: str, since: float) -> None:
        """A stream has waited for an event since then, a value of ``perf_counter``."""


class NoRecorder:
    """Hears and says nothing."""

    def allocated(self, buffer: Buffer, tensor: Any) -> None:
        """See AccessRecorder."""

    def issued(self, operation: Operation) -> None:
        """See AccessRecorder."""

    def recorded(self, stream: str, event: object) -> None:
        """See AccessRecorder."""

    def waited(self, stream: str, event: object) -> None:
        """See AccessRecorder."""

    def host_waited(self, *, stream: str | None = None, event: object | None = None) -> None:
        """See AccessRecorder."""

    def touched(self, operation: Operation | None, buffer: Buffer) -> None:
        """See AccessRecorder."""

    def running(self, operation: Operation) -> AbstractContextManager[None]:
        """See AccessRecorder."""
        return contextlib.nullcontext()

    def held_up(self, stream: str, event: str, since: float) -> None:
        """See AccessRecorder."""


class AccessLog:
    """A recorder with what it cannot know: which task the calling thread runs."""

    def __init__(self, recorder: AccessRecorder | None = None) -> None:
        self.recorder: AccessRecorder = NoRecorder() if recorder is None else recorder
        self._thread = threading.local()

    @property
    def current(self) -> Operation | None:
        """The task that this thread runs, or None in a host thread."""
        return getattr(self._thread, "operation", None)

    @contextlib.contextmanager
    def during(self, operation: Operation) -> Iterator[None]:
        """The scope of a running task."""
        outer, self._thread.operation = self.current, operation
        try:
            with self.recorder.running(operation):
                yield
        finally:
            self._thread.operation = outer

    def read(self, buffers: tuple[Buffer, ...]) -> None:
        """Say that the calling thread reads what a cell holds."""
        for buffer in buffers:
            self.recorder.touched(self.current, buffer)
