"""One forward pass's residual and the contribution on its way to it.

A stream is *initial* (neither), *written* (a residual, nothing pending) or *pending* (a
contribution waits for its update). The model passes on exactly the object that the last boundary
call returned; the stream compares identities and refuses any other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from layline.boundary.residual import StageUpdate
from layline.errors import StreamError

NOT_STARTED = "start the layer stack before entering a stage"
WRONG_OUTPUT = (
    "output does not belong to this residual stream; change layer outputs through boundary "
    "accessors"
)
STILL_PENDING = "write the residual update before taking the final output"


class StreamState(Enum):
    """The three states of a residual stream."""

    INITIAL = "initial"
    WRITTEN = "written"
    PENDING = "pending"


class OwedOutput:
    """The handle a model holds for an output whose sum is not finished. It is no tensor."""

    __slots__ = ("reason",)

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def __repr__(self) -> str:
        return f"OwedOutput({self.reason})"


@dataclass(slots=True)
class OwedWork:
    """What must still happen to a contribution: ``complete(value)`` gives the finished value."""

    reason: str
    complete: Callable[[Any], Any]


@dataclass(slots=True)
class Contribution:
    """A producer's value [tokens, hidden], its residual update, and the work it still owes."""

    value: Any
    update: StageUpdate
    owed: OwedWork | None = None


class ResidualStream:
    """Owner of the residual between two boundaries of one forward pass."""

    __slots__ = ("_handle", "contribution", "residual")

    def __init__(self) -> None:
        self.residual: Any = None
        self.contribution: Contribution | None = None
        self._handle: Any = None

    @property
    def state(self) -> StreamState:
        """Which of the three states the stream is in."""
        if self.contribution is not None:
            return StreamState.PENDING
        return StreamState.INITIAL if self.residual is None else StreamState.WRITTEN

    def check(self, hidden: Any) -> None:
        """Raise StreamError unless ``hidden`` is what the last boundary call returned."""
        if self._handle is not hidden and self.state is not StreamState.INITIAL:
            raise StreamError(WRONG_OUTPUT)

    def leave(self, value: Any, update: StageUpdate, owed: OwedWork | None = None) -> Any:
        """Record a producer's output and return the model's handle for it.

        A complete value is its own handle; an unfinished one gets an opaque OwedOutput. Raises
        StreamError while another contribution is pending.
        """
        if self.residual is None:
            raise StreamError("a stage must prepare its input before it leaves an output")
        if self.contribution is not None:
            raise StreamError("a pending contribution must not be replaced; prepare the next stage")
        self.contribution = Contribution(value, update, owed)
        self._handle = value if owed is None else OwedOutput(owed.reason)
        return self._handle

    def take(self, hidden: Any) -> Contribution | None:
        """Release the pending contribution to the stage that consumes it; None when written."""
        self.check(hidden)
        contribution, self.contribution = self.contribution, None
        self._handle = None
        return contribution

    def complete(self, hidden: Any) -> Any:
        """Finish owed work, leaving the update pending. Returns the tensor handle; idempotent."""
        self.check(hidden)
        contribution = self.contribution
        if contribution is not None and contribution.owed is not None:
            contribution.value = contribution.owed.complete(contribution.value)
            contribution.owed = None
            self._handle = contribution.value
        return self._handle if contribution is not None else hidden

    def write(self, residual: Any) -> Any:
        """Become a written stream whose residual, and handle, is ``residual``."""
        self.contribution = None
        self.residual = self._handle = residual
        return residual

    def update_residual(self, residual: Any) -> None:
        """Store the residual a read has produced; the compute output is the next handle."""
        self.residual = residual
