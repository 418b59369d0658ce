"""Publish what compute may leave undone, and record what it did leave.

An exit is a scope: inside it :func:`get_forward` shows the flags the boundary decided on, outside
it the previous flags stand again, also when compute raises. ``finish`` then records the output.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar, Token
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from layline.boundary.planning.records import Op, OpKind
from layline.boundary.residual import StageUpdate
from layline.boundary.residual.stream import ResidualStream
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


ExitStep = Callable[[ResidualStream, StageUpdate, Any], Any]


def _leave(stream: ResidualStream, update: StageUpdate, hidden_states: Any) -> Any:
    return stream.leave(hidden_states, update)


def _update(stream: ResidualStream, update: StageUpdate, hidden_states: Any) -> Any:
    return stream.write(update.apply(hidden_states, stream.residual))


_STEPS: dict[OpKind, ExitStep] = {OpKind.LEAVE: _leave, OpKind.UPDATE: _update}


def bind_exit(op: Op) -> ExitStep:
    """The function of the operation at a producer's exit."""
    return _STEPS[op.kind]


class StageExit:
    """The exit scope of an FFN or of a mixer that obeys exit flags."""

    __slots__ = ("_leave", "_state", "_stream", "_token", "_update", "flags")

    def __init__(
        self, stream: ResidualStream, update: StageUpdate, leave: ExitStep, flags: ForwardFlags
    ) -> None:
        self._stream = stream
        self._update = update
        self._leave = leave
        self.flags = flags
        self._state = "new"
        self._token: Token[ForwardFlags] | None = None

    @property
    def skips_reduction(self) -> bool:
        """True when compute must leave its output sum to the boundary."""
        return self.flags.fuse_mlp_allreduce

    def __enter__(self) -> StageExit:
        self._token = _forward.set(self.flags)
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

        Returns the value to pass on. Raises StreamError in any other order.
        """
        if self._state != "computed":
            raise StreamError(f"finish() needs a computed stage; this exit is {self._state}")
        self._state = "finished"
        return self._leave(self._stream, self._update, hidden_states)
