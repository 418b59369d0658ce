"""Publish what compute may leave undone, and record what it did leave.

An exit is a scope: inside it :func:`get_forward` shows the flags the boundary decided on, outside
it the previous flags stand again, also when compute raises. ``finish`` then carries out exactly the
work that the flags left over. The decision falls once, when the exit is made.
"""

from __future__ import annotations

from contextvars import ContextVar, Token
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

from layline.boundary.layout import Layout
from layline.boundary.mesh import Mesh, ReductionTally
from layline.boundary.ops import Step, Transit, bind
from layline.boundary.planning.exits import ExitPlan
from layline.boundary.residual import StageUpdate
from layline.boundary.residual.stream import Contribution, OwedWork, ResidualStream
from layline.boundary.rows import RankRows
from layline.errors import StreamError


@dataclass(frozen=True, slots=True)
class ForwardFlags:
    """What the stage that is computing now may leave to its boundary."""

    fuse_mlp_allreduce: bool = False
    mlp_reduce_scatter: bool = False
    defer_moe_finalize: bool = False


_NO_FLAGS = ForwardFlags()
_forward: ContextVar[ForwardFlags] = ContextVar("layline_forward", default=_NO_FLAGS)


def get_forward() -> ForwardFlags:
    """The flags of the innermost open exit scope; all false outside any."""
    return _forward.get()


@dataclass(frozen=True, slots=True)
class BoundExit:
    """An exit's plan with its functions. ``sums`` is how many sums compute itself must run."""

    flags: ForwardFlags
    steps: tuple[Step, ...]
    owed: OwedWork | None
    writes: bool
    rows: Layout
    residual_moves: tuple[Step, ...]
    after_norm: tuple[Step, ...]
    sums: int
    tally: ReductionTally | None

    def finish(
        self, stream: ResidualStream, update: StageUpdate, value: Any, rows: RankRows | None
    ) -> Any:
        """Carry out the exit on compute's output; returns the model's handle."""
        if self.tally is not None and value.shape[0]:
            self._check_sums(stream, self.tally)
        if self.steps:
            transit = Transit(rows, value, stream.residual, update)
            for step in self.steps:
                step(transit)
            value = transit.value
            if self.writes:
                return stream.write(value, self.rows)
        return stream.leave(
            Contribution(value, update, self.owed, self.rows, self.residual_moves, self.after_norm)
        )

    def _check_sums(self, stream: ResidualStream, tally: ReductionTally) -> None:
        ran = tally.reductions - stream.sums
        if ran == self.sums:
            return
        if ran > self.sums:
            raise StreamError(
                f"compute ran {ran} sums between prepare and finish, but its boundary expected "
                f"{self.sums} and completes the output itself; build the output projection so "
                "that it never reduces (reduce_results=False), or obey the exit's flags"
            )
        raise StreamError(
            f"compute ran {ran} sums between prepare and finish, but its boundary expected "
            f"{self.sums}: the output is not complete and nothing else would complete it"
        )


def bind_exit(plan: ExitPlan, mesh: Mesh, transform: Any = None) -> BoundExit:
    """Bind one outcome of an exit decision."""
    late = plan.owed or plan.completion
    owed = None
    if late:
        reason = ", then ".join(str(op) for op in late)
        owed = OwedWork(reason, bind(late, mesh), declared=plan.declared is not None)
    return BoundExit(
        flags=ForwardFlags(plan.fuse_mlp_allreduce, plan.mlp_reduce_scatter),
        steps=bind(plan.ops, mesh, transform),
        owed=owed,
        writes=plan.writes,
        rows=plan.rows,
        residual_moves=bind(plan.residual_moves, mesh),
        after_norm=bind(plan.after_norm, mesh),
        sums=len(plan.compute),
        tally=None if mesh.is_single else mesh.tally,
    )


def bind_arriving(plan: ExitPlan, mesh: Mesh) -> BoundExit:
    """What a producer on another pipeline stage leaves: only a sum left by contract crosses."""
    return bind_exit(replace(plan, ops=(), owed=(), compute=()), mesh)


class StageExit:
    """An exit scope: compute inside it, then call :meth:`finish` once.

    What it publishes is for compute; see :class:`FfnExit` and :class:`MixerExit`.
    """

    __slots__ = ("_exit", "_rows", "_state", "_stream", "_token", "_update")

    def __init__(
        self,
        stream: ResidualStream,
        update: StageUpdate,
        bound: BoundExit,
        rows: RankRows | None,
    ) -> None:
        self._stream = stream
        self._update = update
        self._exit = bound
        self._rows = rows
        self._state = "new"
        self._token: Token[ForwardFlags] | None = None

    @property
    def flags(self) -> ForwardFlags:
        """What compute sees inside the scope."""
        return self._exit.flags

    @property
    def skips_reduction(self) -> bool:
        """True when compute must leave its output sum to the boundary."""
        flags = self._exit.flags
        return flags.fuse_mlp_allreduce or flags.mlp_reduce_scatter

    def __enter__(self) -> StageExit:
        self._token = _forward.set(self._exit.flags)
        self._state = "open"
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._token is not None:
            _forward.reset(self._token)
        self._state = "failed" if kind is not None else "computed"

    def finish(self, hidden_states: Any) -> Any:
        """Record the stage's output; call once, after the scope, on a computation that succeeded.

        Returns the value to pass on. Raises StreamError in any other order, and where compute ran
        a sum that its flags told it to leave, or left one that it had to run.
        """
        if self._state != "computed":
            raise StreamError(f"finish() needs a computed stage; this exit is {self._state}")
        self._state = "finished"
        return self._exit.finish(self._stream, self._update, hidden_states, self._rows)


class FfnExit(StageExit):
    """The exit of an FFN. :func:`get_forward` has the same three flags inside the scope."""

    __slots__ = ()

    @property
    def fuse_mlp_allreduce(self) -> bool:
        """Compute leaves its output all-reduce out."""
        return self.flags.fuse_mlp_allreduce

    @property
    def mlp_reduce_scatter(self) -> bool:
        """Compute leaves its sum to the boundary's reduce-scatter."""
        return self.flags.mlp_reduce_scatter

    @property
    def defer_moe_finalize(self) -> bool:
        """Compute may return a handoff; never, without MoE stages."""
        return self.flags.defer_moe_finalize


class MixerExit(StageExit):
    """The exit of a mixer; :func:`get_forward` has ``skips_reduction`` as its all-reduce flag."""

    __slots__ = ()
