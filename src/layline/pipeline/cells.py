"""What a stream's task leaves for others. No torch here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from layline.errors import CellNotReadyError
from layline.pipeline.access import AccessLog, Buffer
from layline.pipeline.device import StageDevice

Value = TypeVar("Value")


class Cell(Generic[Value]):
    """A task's result, written once by the task.

    Attributes:
        label: The task's.
        buffers: What reading the result reads, for the ``reads`` of a task that does.
        refills: True for a captured task, which writes it in every replay.
    """

    __slots__ = ("_error", "_filled", "_log", "_value", "buffers", "label", "refills")

    def __init__(self, label: str, device: StageDevice, log: AccessLog) -> None:
        self.label = label
        self.buffers: tuple[Buffer, ...] = (Buffer(f"result of {label!r}", device),)
        self.refills = False
        self._log = log
        self._filled = False
        self._error: BaseException | None = None
        self._value: Value | None = None

    @property
    def is_filled(self) -> bool:
        """Whether the task has ended with a result."""
        return self._filled

    def get(self) -> Value:
        """The result: for tasks ordered after its own, and for the host once it has waited.

        Raises CellNotReadyError when it is not there yet, and what the task raised.
        """
        if self._error is not None:
            raise self._error
        if not self._filled:
            raise CellNotReadyError(
                f"the result of {self.label!r} is read before the task has run; wait for its "
                "stream, or for an event recorded after it"
            )
        self._log.read(self.buffers)
        return self._value  # type: ignore[return-value]  # filled with what the task returned

    def fill(self, value: Value) -> None:
        """Write the result; its task alone does."""
        assert self.refills or not self._filled, f"the result of {self.label!r} is written twice"
        self._value, self._filled = value, True

    def fail(self, error: BaseException) -> None:
        """Say that no result will come."""
        self._error = error


class Inlet(Generic[Value]):
    """What one task brings in from outside, in the place of a cell: ``take`` runs in the task."""

    __slots__ = ("_take",)
    buffers: tuple[Buffer, ...] = ()

    def __init__(self, take: Callable[[], Value]) -> None:
        self._take = take

    def get(self) -> Value:
        """Wait for it and take it; the one task that reads it does."""
        return self._take()
