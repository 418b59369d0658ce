"""Ways into a stage that are prepared although a plain walk of the stack does not take them.

A model may look at the residual, add to it or hand it to another process between two stages. Each
such way is a :class:`Detour`; the simulation takes it beside the walk, from the same rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from layline.boundary.contracts import StageKind
from layline.boundary.layout import Layout
from layline.boundary.planning.edge import PreparePlan
from layline.boundary.planning.exits import ExitPlan
from layline.boundary.planning.moves import Ground, complete_sum, move
from layline.boundary.planning.records import Op, Operand, OpKind, Place
from layline.boundary.planning.stage import StagePath
from layline.boundary.planning.walk import Crossing
from layline.topology import GroupName


@dataclass(frozen=True)
class Detour:
    """Another way into ``crossing``'s consumer: ``first``, then ``then``, its prepared operations.

    With ``writes`` the value that ``first`` makes becomes the residual.
    """

    name: str
    first: tuple[Op, ...]
    then: tuple[Op, ...]
    writes: bool = False


def detours(ground: Ground, crossing: Crossing) -> Iterator[Detour]:
    """Every other way into the consumer, for what has arrived at this boundary."""
    if crossing.consumer is None:
        return
    path = crossing.consumer.path(ground.kind)
    leaving = crossing.leaving
    if leaving is None:
        yield from _entries(ground, crossing, path)
    elif not leaving.writes:
        yield from _completed(crossing, leaving, path)
        yield from _written(crossing, leaving, path)
        yield from _elsewhere(ground, crossing, leaving, path)


def _entries(ground: Ground, crossing: Crossing, path: StagePath) -> Iterator[Detour]:
    """A partial embedding that is completed first, as a capture of it does."""
    if crossing.prepare != path.prepare.entry:
        rows = ground.attention
        total = complete_sum(ground, GroupName.TP, rows, rows, Place.PREPARE)
        yield Detour("completed at the entry", (total,), path.prepare.entry)


def _completed(crossing: Crossing, leaving: ExitPlan, path: StagePath) -> Iterator[Detour]:
    """A declared sum that someone needed before this stage did."""
    complete = path.prepares[crossing.residual_before].complete
    if leaving.declared is not None and complete is not None:
        yield Detour("completed early", leaving.completion, complete)


def _written(crossing: Crossing, leaving: ExitPlan, path: StagePath) -> Iterator[Detour]:
    """The update is applied between the stages: nothing is pending any more."""
    assert crossing.producer is not None
    prepare = path.prepares.get(leaving.rows)
    if prepare is None or not crossing.producer.declaration.update.plain:
        return
    update = Op(OpKind.UPDATE, Place.PREPARE, before=leaving.rows, after=leaving.rows)
    done = (*leaving.owed, *leaving.completion, *leaving.residual_moves, update)
    yield Detour("written", done, prepare.written, writes=True)


def _elsewhere(
    ground: Ground, crossing: Crossing, leaving: ExitPlan, path: StagePath
) -> Iterator[Detour]:
    """The residual arrives on other rows than it was left on, from another process for example."""
    before = crossing.residual_before
    for rows, prepare in path.prepares.items():
        ops = _arriving(leaving, prepare)
        if rows != before and ops is not None:
            moved = move(ground, before, rows, Operand.RESIDUAL)
            yield Detour(f"residual on [{rows}]", moved, ops)


def _arriving(leaving: ExitPlan, prepare: PreparePlan) -> tuple[Op, ...] | None:
    if leaving.declared is not None:
        return prepare.declared
    return None if prepare.complete is None else (*leaving.owed, *prepare.complete)


def capture_moves(ground: Ground, crossing: Crossing) -> Iterator[tuple[tuple[Op, ...], Layout]]:
    """Where a capture at an attention brings the updated residual: operations, and the rows."""
    consumer = crossing.consumer
    if consumer is None or consumer.declaration.kind is not StageKind.ATTN:
        return
    producer = consumer.path(ground.kind).prepare.edge.producer
    before = crossing.residual_after
    for rows in (ground.attention if producer is None else producer.handoff, crossing.compute_rows):
        yield move(ground, before, rows, Operand.RESIDUAL), rows
