"""Results of a step on their way to the host, while later steps go on.

A step ends with its logits, or the ids sampled from them, on the last stage. What is returned waits
on a stream of its own for that step alone, so that the last stage never stops for the host.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from layline.pipeline.cells import Cell
from layline.pipeline.faults import Fault, Faults
from layline.pipeline.streams import Stream, Streams

Value = TypeVar("Value")


class Pending:
    """A tensor that the last stage's task leaves in ``value``, to be read back.

    Made by the host right after it has issued the task; ``readback`` is a stream that only such
    reads use. Dropping one that was never waited for is safe: nothing was issued for it but a
    record. A host thread at a time waits.
    """

    def __init__(
        self,
        value: Cell[Tensor],
        last_stage: Stream,
        readback: Stream,
        streams: Streams,
        *,
        faults: Faults | None = None,
    ) -> None:
        self._value = value
        self._last_stage = last_stage
        self._readback = readback
        self._faults = faults or Faults()
        self._computed = streams.event(f"{value.label} computed")
        self._copied = streams.event(f"{value.label} copied")
        self._result: Tensor | None = None
        last_stage.record(self._computed)

    @property
    def value(self) -> Cell[Tensor]:
        """Where the tensor will be, for tasks that are ordered after its own."""
        return self._value

    def is_done(self) -> bool:
        """Whether the last stage has computed it, so that a wait is only a copy."""
        return self._computed.is_done()

    def wait_tensor(self, timeout_s: float) -> Tensor:
        """The tensor in the host's memory; later steps are not waited for.

        Raises RunError after ``timeout_s`` and what a stage's task raised.
        """
        if self._result is None:
            if Fault.DRAIN_ALL_STEPS in self._faults:
                self._last_stage.synchronize(timeout_s)
            if Fault.DROP_READBACK_WAIT not in self._faults:
                self._readback.wait(self._computed)
            copy = self._readback.run(
                partial(_to_host, self._value, self._readback),
                reads=self._value.buffers,
                label=f"read back {self._value.label}",
            )
            self._readback.record(self._copied)
            self._copied.synchronize(timeout_s)
            self._result = copy.get()
        return self._result


class PendingLogits(Pending):
    """One step's logits [rows, vocabulary], in the run's dtype."""

    def wait(self, timeout_s: float) -> Tensor:
        """The logits, in the host's memory. Raises as ``wait_tensor`` does."""
        return self.wait_tensor(timeout_s)


class PendingIds(Pending):
    """The ids that one step sampled, an integer tensor [rows]."""

    def wait(self, timeout_s: float) -> tuple[int, ...]:
        """The ids, by row. Raises as ``wait_tensor`` does."""
        return tuple(self.wait_tensor(timeout_s).tolist())


class PendingResult:
    """Whatever the last stage's task leaves, as it is; see :class:`Pending`.

    Once it has been waited for, any stream and the host may read what it holds.
    """

    def __init__(self, value: Cell[Any], stream: Stream, streams: Streams) -> None:
        self._value = value
        self._computed = streams.event(f"{value.label} computed")
        stream.record(self._computed)

    @property
    def value(self) -> Cell[Any]:
        """Where it will be, for tasks that are ordered after its own."""
        return self._value

    def is_done(self) -> bool:
        """Whether the last stage has computed it."""
        return self._computed.is_done()

    def on(self, stream: Stream, take: Callable[[Any], Value], label: str) -> Cell[Value]:
        """What ``take`` makes of it, as a task of ``stream`` that waits for no later step."""
        stream.wait(self._computed)
        task = partial(_taken, self._value, take)
        return stream.run(task, reads=self._value.buffers, label=label)

    def wait(self, timeout_s: float) -> Any:
        """The result. Raises RunError after ``timeout_s`` and what a stage's task raised."""
        self._computed.synchronize(timeout_s)
        return self._value.get()


def _taken(value: Cell[Any], take: Callable[[Any], Value]) -> Value:
    return take(value.get())


def _to_host(value: Cell[Tensor], readback: Stream) -> Tensor:
    tensor = value.get()
    if tensor.device.type == "cpu":
        return tensor.clone()
    # Until the copy has ended, the last stage's pool must not give the memory away again.
    readback.adopt(tensor)
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
