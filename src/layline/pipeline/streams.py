"""Ordered streams and their events, with one meaning on the CPU and on CUDA.

What is issued on a stream runs in that order; streams run beside each other except where one waits
for an event. A wait binds to the event's latest record at the moment the host issues the wait, and
an event that was never recorded holds nobody up.

A task that raises poisons its stream: later tasks there do not run, and the error comes out again
wherever the stream or an event recorded after it is waited for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from layline.errors import RunError, UsageError, one_of
from layline.pipeline.access import AccessLog, AccessRecorder, Buffer
from layline.pipeline.cells import Cell
from layline.pipeline.device import StageDevice
from layline.pipeline.lanes import Controller

Value = TypeVar("Value")
KINDS = ("cpu", "cuda")


class Event(Protocol):
    """A point on a stream that others wait for. The latest record wins."""

    @property
    def name(self) -> str:
        """For messages."""

    def is_done(self) -> bool:
        """Whether the latest record has been reached; True before the first."""

    def synchronize(self, timeout_s: float) -> None:
        """Wait in the host for the latest record at this moment; later work goes on.

        Raises RunError after ``timeout_s``, naming what it waited for, and a poisoned stream's
        first error.
        """


class Stream(Protocol):
    """Work in order, on one device."""

    @property
    def device(self) -> StageDevice:
        """Where it runs."""

    @property
    def name(self) -> str:
        """Unique among the streams made together."""

    @property
    def is_idle(self) -> bool:
        """Whether all that was issued has ended."""

    def run(
        self,
        task: Callable[[], Value],
        *,
        reads: Sequence[Buffer] = (),
        writes: Sequence[Buffer] = (),
        label: str,
    ) -> Cell[Value]:
        """Enqueue one whole task; its result comes into the cell, a write that is implied.

        On the CPU it runs in the stream's own thread, never in the caller's, in a copy of the
        caller's context variables; on CUDA the host calls it at once with the stream current. Both
        in inference mode. A task issues nothing itself.
        """

    def record(self, event: Any) -> None:
        """Let ``event`` stand for this point of the stream."""

    def wait(self, event: Any) -> None:
        """Let what is issued later run only after the event's latest record at this moment."""

    def synchronize(self, timeout_s: float) -> None:
        """Wait in the host until all that was issued before this call has ended.

        Raises as Event.synchronize does.
        """

    def empty(self, num_bytes: int) -> Any:
        """Fresh memory as a uint8 tensor [num_bytes], valid in this stream's order alone."""

    def adopt(self, tensor: Any) -> None:
        """Say that ``tensor``, from another stream's memory, is used on this one too.

        The memory then stays out of use until this stream's present work with it has ended.
        """


class Capture(Protocol):
    """Work that was issued once, to be issued again."""

    def replay(self) -> None:
        """Issue all of it, in its order; waits bind anew, and results are written again."""


class Streams(Protocol):
    """Makes streams and events of one kind, and ends them together."""

    log: AccessLog

    def stream(self, name: str, ordinal: int = 0, *, num_threads: int = 1) -> Stream:
        """A new stream. ``num_threads`` is what torch may use in its tasks, on the CPU.

        Raises UsageError for a name that is taken and for a device that is not there.
        """

    def event(self, name: str) -> Event:
        """A new event, never recorded."""

    def settle(self) -> None:
        """Wait in the host for all that its devices do, on streams of others too."""

    def capture(self) -> AbstractContextManager[Capture]:
        """A scope in which what is issued, on any stream, is kept and does not run.

        Raises UsageError on CUDA.
        """

    def close(self, timeout_s: float = 10.0) -> None:
        """End all streams: what has not begun never runs, what runs may end.

        Safe to call twice. Raises RunError when a task still runs after ``timeout_s``.
        """

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class ClosedAfterwards:
    """A context manager that closes; an error of closing does not hide one that came before."""

    def close(self, timeout_s: float = 10.0) -> None:
        """See Streams.close."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with contextlib.suppress(RunError) if error is not None else contextlib.nullcontext():
            self.close()


def make_streams(
    kind: str,
    *,
    recorder: AccessRecorder | None = None,
    controller: Controller | None = None,
) -> Streams:
    """Streams on "cpu" or "cuda". ``controller`` decides what runs when, on the CPU alone.

    Raises UsageError for another kind, and where CUDA is given a controller.
    """
    if kind not in KINDS:
        raise UsageError(one_of("device", kind, KINDS))
    if kind == "cuda":
        from layline.pipeline.cuda_streams import CudaStreams

        if controller is not None:
            raise UsageError("a controller decides over CPU streams; CUDA runs by itself")
        return CudaStreams(recorder)
    from layline.pipeline.cpu_streams import CpuStreams

    return CpuStreams(recorder, controller)


def thread_share(num_threads: int, num_active: int) -> int:
    """Each stream's threads when ``num_active`` of them share ``num_threads``; at least one."""
    return max(1, num_threads // max(1, num_active))
