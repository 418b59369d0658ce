"""The object a model calls: prepare the input, then finish or exit with the output."""

from __future__ import annotations

from typing import Any

from layline.boundary.construction import StagePlan
from layline.boundary.contracts import BatchState, ProducerReduction, StageDeclaration
from layline.boundary.exit import ForwardFlags, StageExit
from layline.boundary.prepare import Transit
from layline.boundary.residual.batch import stream_of
from layline.boundary.residual.stream import StreamState
from layline.errors import StreamError

_KEEP_NOTHING_BACK = ForwardFlags()


class StageBoundary:
    """One stage's entry and exit. Holds the plan and the norm, never a forward tensor."""

    __slots__ = ("_norm", "_plan", "_read", "_update")

    def __init__(self, plan: StagePlan, norm: Any) -> None:
        self._plan = plan
        self._norm = norm
        self._read = plan.declaration.read
        self._update = plan.declaration.update

    @property
    def declaration(self) -> StageDeclaration:
        """The declaration this boundary was made from, with its source."""
        return self._plan.declaration

    @property
    def plan(self) -> StagePlan:
        """The planned paths, for printing and checking."""
        return self._plan

    def prepare(self, hidden_states: Any, forward_batch: BatchState) -> Any:
        """Complete, update and read: the stage's compute input, [tokens, hidden].

        Raises StreamError when the stack was not started or ``hidden_states`` is not what the last
        boundary call returned, BoundaryUnsupportedError for a batch variant without a path.
        """
        stream = stream_of(forward_batch)
        path = self._plan.path(forward_batch.variant)
        if stream.state is StreamState.INITIAL and self._plan.declaration.previous is not None:
            raise StreamError(
                "this stage follows another one, but the residual stream is still initial"
            )
        if stream.contribution is not None and stream.contribution.owed is not None:
            hidden_states = stream.complete(hidden_states)
        contribution = stream.take(hidden_states)
        if contribution is not None and not path.consumes:
            raise StreamError(
                "an output is pending, but this stage's declaration names no previous stage that "
                "leaves one; give make_stages the actual producer as previous"
            )
        transit = Transit(hidden_states, contribution, stream.residual, self._read, self._norm)
        for step in path.steps:
            step(transit)
        stream.update_residual(transit.residual)
        return transit.hidden

    def finish(self, hidden_states: Any, forward_batch: BatchState) -> Any:
        """Record the output of a stage whose compute never reduces (PARTIAL)."""
        if self._plan.declaration.reduction is not ProducerReduction.PARTIAL:
            raise StreamError("a SCOPED stage publishes through exit(), not finish()")
        path = self._plan.path(forward_batch.variant)
        return path.leave(stream_of(forward_batch), self._update, hidden_states)

    def exit(self, forward_batch: BatchState) -> StageExit:
        """The scope to compute in; call ``finish`` on it afterwards."""
        if self._plan.declaration.reduction is ProducerReduction.PARTIAL:
            raise StreamError("a PARTIAL stage publishes through finish(), not exit()")
        path = self._plan.path(forward_batch.variant)
        stream = stream_of(forward_batch)
        return StageExit(stream, self._update, path.leave, _KEEP_NOTHING_BACK)
