"""Streams on the CPU: a worker thread each, with the record and wait of CUDA streams.

All ordinals are virtual devices: one memory, and residency as recorded.
"""

from __future__ import annotations

import contextlib
import contextvars
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from layline.errors import UsageError
from layline.pipeline.access import AccessLog, AccessRecorder, Buffer, Operation
from layline.pipeline.cells import Cell
from layline.pipeline.controllers import ThreadController
from layline.pipeline.device import StageDevice
from layline.pipeline.lanes import Controller, Lane, Lanes, Record, Task, Wait
from layline.pipeline.streams import ClosedAfterwards

Value = TypeVar("Value")


class CpuEvent:
    """Implements streams.Event; see there."""

    __slots__ = ("_lanes", "latest", "name")

    def __init__(self, name: str, lanes: Lanes) -> None:
        self.name = name
        self.latest: Record | None = None
        self._lanes = lanes

    def is_done(self) -> bool:
        """See Event.is_done."""
        return self.latest is None or self.latest.done

    def synchronize(self, timeout_s: float) -> None:
        """See Event.synchronize."""
        record = self.latest
        if record is None:
            return
        what = f"event {self.name!r} of stream {record.lane!r}"
        self._lanes.host_wait(lambda: record.done, timeout_s, what)
        if record.error is not None:
            raise record.error
        self._lanes.log.recorder.host_waited(event=self)


class CpuStream:
    """Implements streams.Stream; see there. Made by :class:`CpuStreams`."""

    __slots__ = ("_lane", "_lanes", "_owner")

    def __init__(self, lane: Lane, lanes: Lanes, owner: CpuStreams) -> None:
        self._lane = lane
        self._lanes = lanes
        # Workers end when nobody holds the set any more; who holds a stream holds the set.
        self._owner = owner

    @property
    def device(self) -> StageDevice:
        """See Stream.device."""
        return self._lane.device

    @property
    def name(self) -> str:
        """See Stream.name."""
        return self._lane.name

    @property
    def is_idle(self) -> bool:
        """See Stream.is_idle."""
        return self._lane.finished == self._lane.issued

    @property
    def busy_s(self) -> float:
        """Seconds that its worker has spent in tasks."""
        return self._lane.busy_s

    @property
    def blocked_s(self) -> float:
        """Seconds that its worker has waited for events of other streams, with work behind them."""
        return self._lane.blocked_s

    def run(
        self,
        task: Callable[[], Value],
        *,
        reads: Sequence[Buffer] = (),
        writes: Sequence[Buffer] = (),
        label: str,
    ) -> Cell[Value]:
        """See Stream.run."""
        cell: Cell[Value] = Cell(label, self.device, self._lanes.log)
        cell.refills = self._lanes.capture is not None
        operation = Operation(self.name, self.device, label, tuple(reads), (*writes, *cell.buffers))

        def make() -> Task:
            self._lanes.log.recorder.issued(operation)
            return Task(operation, task, cell, contextvars.copy_context())

        self._lanes.enqueue(self._lane, make)
        return cell

    def record(self, event: CpuEvent) -> None:
        """See Stream.record."""

        def make() -> Record:
            self._lanes.log.recorder.recorded(self.name, event)
            event.latest = Record(event.name, self.name)
            return event.latest

        self._lanes.enqueue(self._lane, make)

    def wait(self, event: CpuEvent) -> None:
        """See Stream.wait."""

        def make() -> Wait | None:
            if event.latest is None:
                return None
            self._lanes.log.recorder.waited(self.name, event)
            return Wait(event.latest)

        self._lanes.enqueue(self._lane, make)

    def synchronize(self, timeout_s: float) -> None:
        """See Stream.synchronize."""
        lane, target = self._lane, self._lane.issued
        self._lanes.host_wait(
            lambda: lane.finished >= target, timeout_s, f"the end of stream {self.name!r}"
        )
        if lane.error is not None:
            raise lane.error
        self._lanes.log.recorder.host_waited(stream=self.name)

    def empty(self, num_bytes: int) -> Tensor:
        """See Stream.empty."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def adopt(self, tensor: Tensor) -> None:
        """See Stream.adopt. Here memory lives as long as anyone refers to it."""


class CpuCapture:
    """Implements streams.Capture; see there."""

    def __init__(self, lanes: Lanes) -> None:
        self.issued: list[tuple[Lane, Callable[[], Task | Record | Wait | None]]] = []
        self._lanes = lanes

    def replay(self) -> None:
        """See Capture.replay."""
        for lane, make in self.issued:
            self._lanes.enqueue(lane, make)


class CpuStreams(ClosedAfterwards):
    """Implements streams.Streams; see there. Free running unless a controller decides."""

    def __init__(
        self, recorder: AccessRecorder | None = None, controller: Controller | None = None
    ) -> None:
        self.log = AccessLog(recorder)
        self._lanes = Lanes(controller or ThreadController(), self.log)
        self._finalizer = weakref.finalize(self, self._lanes.shut)

    def stream(self, name: str, ordinal: int = 0, *, num_threads: int = 1) -> CpuStream:
        """See Streams.stream."""
        if name in self._lanes:
            raise UsageError(f"there is a stream {name!r} already; expected another name")
        if ordinal < 0 or num_threads < 1:
            raise UsageError(
                f"stream {name!r} on device {ordinal} with {num_threads} threads; expected a "
                "device from 0 and at least one thread"
            )
        lane = self._lanes.add(name, StageDevice("cpu", ordinal), num_threads)
        return CpuStream(lane, self._lanes, self)

    def event(self, name: str) -> CpuEvent:
        """See Streams.event."""
        return CpuEvent(name, self._lanes)

    def settle(self) -> None:
        """See Streams.settle. Whatever runs outside of streams has ended when its call returns."""

    @contextlib.contextmanager
    def capture(self) -> Iterator[CpuCapture]:
        """See Streams.capture."""
        found = CpuCapture(self._lanes)
        self._lanes.capture = found.issued
        try:
            yield found
        finally:
            self._lanes.capture = None

    def close(self, timeout_s: float = 10.0) -> None:
        """See Streams.close."""
        self._finalizer.detach()
        self._lanes.close(timeout_s)
