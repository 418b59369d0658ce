"""Run the planned operations that turn a producer's output into a consumer's input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from layline.boundary.planning.records import Op, OpKind
from layline.boundary.residual import StageRead
from layline.boundary.residual.stream import Contribution


class Transit:
    """A value on its way across one boundary."""

    __slots__ = ("contribution", "hidden", "norm", "read", "residual")

    def __init__(
        self,
        hidden: Any,
        contribution: Contribution | None,
        residual: Any,
        read: StageRead,
        norm: Any,
    ) -> None:
        self.hidden = hidden
        self.contribution = contribution
        self.residual = residual
        self.read = read
        self.norm = norm


PrepareStep = Callable[[Transit], None]


def _enter(transit: Transit) -> None:
    # A stream that is already written entered the stack elsewhere; its residual stands.
    if transit.residual is None:
        transit.residual = transit.read.enter(transit.hidden)


def _read(transit: Transit) -> None:
    transit.hidden, transit.residual = transit.read.read(transit.residual, transit.norm)


def _update_and_read(transit: Transit) -> None:
    contribution = transit.contribution
    if contribution is None:
        _read(transit)
        return
    transit.hidden, transit.residual = transit.read.update_and_read(
        contribution.update, contribution.value, transit.residual, transit.norm
    )


_STEPS: dict[OpKind, PrepareStep] = {
    OpKind.ENTER: _enter,
    OpKind.READ: _read,
    OpKind.UPDATE_AND_READ: _update_and_read,
}


def bind_prepare(ops: tuple[Op, ...]) -> tuple[PrepareStep, ...]:
    """One function for each operation of the consumer's side."""
    return tuple(_STEPS[op.kind] for op in ops)
