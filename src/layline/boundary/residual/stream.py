"""One forward pass's residual and the contribution on its way to it.

A stream is *initial* (neither), *written* (a residual, nothing pending) or *pending* (a
contribution waits for its update). The model passes on exactly the object that the last boundary
call returned; the stream compares identities and refuses any other.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from layline.boundary.layout import FULL_ROWS, Layout
from layline.boundary.ops import Step, Transit
from layline.boundary.residual import StageUpdate
from layline.boundary.rows import RankRows
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


@dataclass(frozen=True, slots=True)
class OwedWork:
    """What must still happen to a contribution before it is complete.

    A ``declared`` sum is one that the next stage's own plan completes; ``steps`` complete it for
    whoever needs the value earlier.
    """

    reason: str
    steps: tuple[Step, ...]
    declared: bool = False

    def complete(self, value: Any, rows: RankRows | None) -> Any:
        """The finished value; the one given is used up."""
        transit = Transit(rows, value)
        for step in self.steps:
            step(transit)
        return transit.value


@dataclass(slots=True)
class Contribution:
    """A producer's value [tokens, hidden], its residual update, and the work it still owes.

    ``rows`` are those of the finished value; ``residual_moves`` bring the residual to them, and at
    the end of a stack ``after_norm`` brings the result back to attention rows.
    """

    value: Any
    update: StageUpdate
    owed: OwedWork | None = None
    rows: Layout = FULL_ROWS
    residual_moves: tuple[Step, ...] = ()
    after_norm: tuple[Step, ...] = ()

    def residual_on_rows(self, residual: Any, rows: RankRows | None) -> Any:
        """``residual``, brought to the rows of the finished value."""
        if not self.residual_moves:
            return residual
        transit = Transit(rows, None, residual)
        for step in self.residual_moves:
            step(transit)
        return transit.residual

    def returned(self, result: Any, rows: RankRows | None) -> Any:
        """What a stack ends with, on attention rows."""
        if not self.after_norm:
            return result
        transit = Transit(rows, None)
        transit.input = result
        for step in self.after_norm:
            step(transit)
        return transit.input


class ResidualStream:
    """Owner of the residual between two boundaries of one forward pass.

    Attributes:
        residual: [tokens, hidden] on ``residual_rows``, or None in an initial stream.
        contribution: What a producer left, while it is pending.
        partial: The value that enters the stack is an unfinished sum over TP.
        sums: How many sums compute had run when the last input was prepared.
    """

    __slots__ = ("_handle", "contribution", "partial", "residual", "residual_rows", "sums")

    def __init__(self, *, partial: bool = False) -> None:
        self.residual: Any = None
        self.residual_rows: Layout | None = None
        self.contribution: Contribution | None = None
        self.partial = partial
        self.sums = 0
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

    def leave(self, contribution: Contribution) -> Any:
        """Record a producer's output and return the model's handle for it.

        A complete value is its own handle; an unfinished one gets an opaque OwedOutput. Raises
        StreamError while another contribution is pending.
        """
        if self.residual is None:
            raise StreamError("a stage must prepare its input before it leaves an output")
        if self.contribution is not None:
            raise StreamError("a pending contribution must not be replaced; prepare the next stage")
        self.contribution = contribution
        owed = contribution.owed
        self._handle = contribution.value if owed is None else OwedOutput(owed.reason)
        return self._handle

    def peek(self, hidden: Any) -> Contribution | None:
        """The pending contribution that ``hidden`` stands for, still pending; None when written."""
        contribution = self.contribution
        if self._handle is not hidden and (contribution is not None or self.residual is not None):
            raise StreamError(WRONG_OUTPUT)
        return contribution

    def release(self) -> None:
        """Let go of the pending contribution: whoever peeked at it consumes it."""
        self.contribution = None
        self._handle = None

    def take(self, hidden: Any) -> Contribution | None:
        """Release the pending contribution to whoever consumes it; None when written."""
        contribution = self.peek(hidden)
        self.release()
        return contribution

    def complete(self, hidden: Any, rows: RankRows | None) -> Any:
        """Finish owed work, leaving the update pending. Returns the tensor handle; idempotent."""
        self.check(hidden)
        contribution = self.contribution
        if contribution is None:
            return hidden
        if contribution.owed is not None:
            contribution.value = contribution.owed.complete(contribution.value, rows)
            contribution.owed = None
            self._handle = contribution.value
        return self._handle

    def write(self, residual: Any, rows: Layout | None = None) -> Any:
        """Become a written stream whose residual, and handle, is ``residual`` on ``rows``."""
        self.contribution = None
        self.residual = self._handle = residual
        if rows is not None:
            self.residual_rows = rows
        return residual
