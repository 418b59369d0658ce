"""CUDA streams under the protocol of streams.py. The host calls a task at once; the GPU orders it.

A task that raises does so in the host, while earlier work is still queued. Its stream is poisoned
as on the CPU: the error comes out where the stream is waited for, and no later task is enqueued.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor

from layline.errors import RunError, UsageError
from layline.pipeline.access import AccessLog, AccessRecorder, Buffer, Operation
from layline.pipeline.cells import Cell
from layline.pipeline.device import StageDevice
from layline.pipeline.streams import Capture, ClosedAfterwards

Value = TypeVar("Value")

# The host looks without a pause for so long, then with one: CUDA's own waits have no timeout.
SPIN_S = 0.002
PAUSE_S = 0.00005


class CudaEvent:
    """Implements streams.Event; see there. ``error`` is what poisoned the stream at the record."""

    __slots__ = ("_log", "error", "name", "native")

    def __init__(self, name: str, log: AccessLog) -> None:
        self.name = name
        self.native: torch.cuda.Event | None = None
        self.error: BaseException | None = None
        self._log = log

    def is_done(self) -> bool:
        """See Event.is_done."""
        return self.native is None or bool(self.native.query())  # type: ignore[no-untyped-call]

    def synchronize(self, timeout_s: float) -> None:
        """See Event.synchronize."""
        if self.native is None:
            return
        _wait(self.native, timeout_s, f"event {self.name!r}")
        if self.error is not None:
            raise self.error
        self._log.recorder.host_waited(event=self)


class CudaStream:
    """Implements streams.Stream; see there. ``native`` is torch's stream."""

    __slots__ = ("_error", "_log", "device", "name", "native")

    def __init__(
        self, name: str, device: StageDevice, native: torch.cuda.Stream, log: AccessLog
    ) -> None:
        self.name = name
        self.device = device
        self.native = native
        self._error: BaseException | None = None
        self._log = log

    @property
    def is_idle(self) -> bool:
        """See Stream.is_idle."""
        return self.native.query()

    def run(
        self,
        task: Callable[[], Value],
        *,
        reads: Sequence[Buffer] = (),
        writes: Sequence[Buffer] = (),
        label: str,
    ) -> Cell[Value]:
        """See Stream.run."""
        if self._log.current is not None:
            raise RunError(
                f"task {self._log.current.label!r} issues work on stream {self.name!r}; only the "
                "host does"
            )
        cell: Cell[Value] = Cell(label, self.device, self._log)
        operation = Operation(self.name, self.device, label, tuple(reads), (*writes, *cell.buffers))
        self._log.recorder.issued(operation)
        if self._error is not None:
            cell.fail(self._error)
            return cell
        try:
            with (
                torch.cuda.stream(self.native),
                torch.inference_mode(),
                self._log.during(operation),
            ):
                cell.fill(task())
        except Exception as error:
            error.add_note(f"in task {label!r} on stream {self.name!r}")
            cell.fail(error)
            self._error = error
        return cell

    def record(self, event: CudaEvent) -> None:
        """See Stream.record."""
        self._log.recorder.recorded(self.name, event)
        if event.native is None:
            event.native = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.native.record(self.native)
        event.error = self._error

    def wait(self, event: CudaEvent) -> None:
        """See Stream.wait."""
        if event.native is None:
            return
        self._log.recorder.waited(self.name, event)
        self.native.wait_event(event.native)
        self._error = self._error or event.error

    def synchronize(self, timeout_s: float) -> None:
        """See Stream.synchronize."""
        _wait(self.native, timeout_s, f"the end of stream {self.name!r}")
        if self._error is not None:
            raise self._error
        self._log.recorder.host_waited(stream=self.name)

    def empty(self, num_bytes: int) -> Tensor:
        """See Stream.empty."""
        with torch.cuda.stream(self.native):
            return torch.empty(num_bytes, dtype=torch.uint8, device=self.device.torch_device)

    def adopt(self, tensor: Tensor) -> None:
        """See Stream.adopt."""
        tensor.record_stream(self.native)


class CudaStreams(ClosedAfterwards):
    """Implements streams.Streams; see there. Raises UsageError where CUDA has no device."""

    def __init__(self, recorder: AccessRecorder | None = None) -> None:
        if not torch.cuda.is_available():
            raise UsageError("device 'cuda' is not here; expected a CUDA device, or device cpu")
        self.log = AccessLog(recorder)
        self._streams: dict[str, CudaStream] = {}

    def stream(self, name: str, ordinal: int = 0, *, num_threads: int = 1) -> CudaStream:
        """See Streams.stream."""
        count = torch.cuda.device_count()
        if not 0 <= ordinal < count:
            raise UsageError(
                f"stream {name!r} on CUDA device {ordinal}; expected one of 0 to {count - 1}"
            )
        native = torch.cuda.Stream(torch.device("cuda", ordinal))  # type: ignore[no-untyped-call]
        return self._add(name, ordinal, native)

    def current(self, name: str, ordinal: int) -> CudaStream:
        """The stream that torch works on now on a device, under this protocol.

        Capture the caller's before a task of another stream begins.
        """
        return self._add(name, ordinal, torch.cuda.current_stream(torch.device("cuda", ordinal)))

    def event(self, name: str) -> CudaEvent:
        """See Streams.event."""
        return CudaEvent(name, self.log)

    def settle(self) -> None:
        """See Streams.settle: the host loads weights and makes caches on torch's own streams."""
        for ordinal in {stream.device.ordinal for stream in self._streams.values()}:
            torch.cuda.synchronize(ordinal)

    def capture(self) -> AbstractContextManager[Capture]:
        """See Streams.capture."""
        raise UsageError(
            "captured steps run on the CPU in this version; expected device cpu, or another loop"
        )

    def close(self, timeout_s: float = 10.0) -> None:
        """See Streams.close. What was issued ends; its memory is then free."""
        deadline = time.monotonic() + timeout_s
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            left = max(0.0, deadline - time.monotonic())
            _wait(stream.native, left, f"the end of stream {stream.name!r}")

    def _add(self, name: str, ordinal: int, native: torch.cuda.Stream) -> CudaStream:
        if name in self._streams:
            raise UsageError(f"there is a stream {name!r} already; expected another name")
        self._streams[name] = CudaStream(name, StageDevice("cuda", ordinal), native, self.log)
        return self._streams[name]


def _wait(native: Any, timeout_s: float, what: str) -> None:
    """Wait in the host for a torch event or stream."""
    begun = time.monotonic()
    while not _query(native.query, what):
        passed = time.monotonic() - begun
        if passed > timeout_s:
            raise RunError(f"waited {timeout_s:g} s for {what}; the GPU has not reached it")
        if passed > SPIN_S:
            time.sleep(PAUSE_S)
    # At an end already: it tells torch's CUDA sanitizer, which does not know queries.
    native.synchronize()


def _query(is_done: Callable[[], bool], what: str) -> bool:
    try:
        return is_done()
    except RuntimeError as error:
        reason = str(error).strip().partition("\n")[0]
        raise RunError(f"{what} will not come: {reason}") from error
