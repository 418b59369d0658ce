"""Plan a consumer's prepare: complete what arrives, update, read, and bring rows to the compute.

A path has one sequence of operations for each state the stream can arrive in, all planned before
the first batch; which one runs follows the stream's state, and that is the same on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from layline.boundary.contracts import (
    EdgeDecl,
    StageDecl,
    StageDeclaration,
    StageKind,
    StageOutput,
)
from layline.boundary.layout import FULL_ROWS, BatchVariant, Layout, SumGroup
from layline.boundary.planning.exits import ExitPlan
from layline.boundary.planning.moves import Ground, complete_sum, move, place_and_sum
from layline.boundary.planning.records import Op, Operand, OpKind, Place
from layline.boundary.planning.resolve import residual_after
from layline.boundary.rows import DpPadding
from layline.topology import GroupName

READ = Op(OpKind.READ, Place.PREPARE, Operand.RESIDUAL)
READ_SUM = Op(OpKind.READ, Place.PREPARE, Operand.VALUE)
ENTER = Op(OpKind.ENTER, Place.PREPARE)


@dataclass(frozen=True)
class Source:
    """What a stage is entered from: its producer's output and exit, None at the stack's entry.

    ``residual_rows`` are the rows that the residual is on when the stage is entered.
    """

    output: StageOutput | None
    leaving: ExitPlan | None
    residual_rows: Layout


@dataclass(frozen=True)
class PreparePlan:
    """One stage's operations for each state of the stream.

    Attributes:
        entry: The stream is initial, its value complete.
        entry_partial: The stream is initial and the embedding left its sum; None where it may not.
        written: The residual is written, nothing is pending.
        complete: A complete output is pending.
        declared: An output is pending whose sum was left by contract; None where none can be.
        edge: The edge that ``complete`` and ``declared`` were planned for.
        residual_rows: Rows of the residual afterwards.
    """

    entry: tuple[Op, ...]
    entry_partial: tuple[Op, ...] | None
    written: tuple[Op, ...]
    complete: tuple[Op, ...] | None
    declared: tuple[Op, ...] | None
    edge: EdgeDecl
    residual_rows: Layout


def plan_prepare(
    ground: Ground,
    declaration: StageDeclaration,
    decl: StageDecl,
    source: Source,
) -> PreparePlan:
    """Plan the input of one stage."""
    leaving, residual_source = source.leaving, source.residual_rows
    planner = _Prepare(ground, declaration, decl, residual_source)
    residual_rows = planner.destination
    producer = source.output
    entry, entry_partial = planner.entry()
    complete = declared = None
    if leaving is not None and not leaving.writes:
        complete = planner.complete(leaving.rows)
        if leaving.declared is not None:
            declared = planner.declared(leaving)
    return PreparePlan(
        entry=entry,
        entry_partial=entry_partial,
        written=planner.written(leaving),
        complete=complete,
        declared=declared,
        edge=EdgeDecl(producer, decl.input, residual_source, residual_rows),
        residual_rows=residual_rows,
    )


class _Prepare:
    """The pieces that the sequences of one prepare share."""

    def __init__(
        self,
        ground: Ground,
        declaration: StageDeclaration,
        decl: StageDecl,
        residual_source: Layout,
    ) -> None:
        self._ground = ground
        self._declaration = declaration
        self._source = residual_source
        self._compute = decl.input.layout
        self.destination = residual_after(ground, declaration)

    def entry(self) -> tuple[tuple[Op, ...], tuple[Op, ...] | None]:
        """At the stack's entry, with a complete value and with the embedding's partial one."""
        whole, rows = self._ground.attention, self.destination
        after = self._bring_input(rows)
        complete = (*move(self._ground, whole, rows, Operand.VALUE), ENTER, READ, *after)
        if self._ground.variant is not BatchVariant.INPUT_SCATTERED:
            return complete, None
        return complete, (*self._sum_onto(SumGroup.TP, whole, rows), ENTER, READ, *after)

    def written(self, leaving: ExitPlan | None) -> tuple[Op, ...]:
        """The residual is there: bring it to its rows and read it."""
        source = self._source if leaving is None or not leaving.writes else leaving.rows
        moved = move(self._ground, source, self.destination, Operand.RESIDUAL)
        return (*moved, READ, *self._bring_input(self.destination))

    def complete(self, rows: Layout) -> tuple[Op, ...]:
        """The output is complete on ``rows``: update and read where the residual belongs."""
        moved = move(self._ground, rows, self.destination, Operand.VALUE)
        return (*moved, *self._update_and_read())

    def declared(self, leaving: ExitPlan) -> tuple[Op, ...]:
        """The output's sum was left to this stage."""
        assert leaving.declared is not None
        joined = self._join(leaving.declared)
        if joined is not None:
            return joined
        completed = self._sum_onto(leaving.declared, leaving.rows, self.destination)
        return (*completed, *self._update_and_read())

    def _update_and_read(self) -> tuple[Op, ...]:
        rows = self.destination
        moved = move(self._ground, self._source, rows, Operand.RESIDUAL)
        update = Op(OpKind.UPDATE_AND_READ, Place.PREPARE, before=rows, after=rows)
        return (*moved, update, *self._bring_input(rows))

    def _bring_input(self, rows: Layout) -> tuple[Op, ...]:
        return (*move(self._ground, rows, self._compute, Operand.INPUT), *self._format())

    def _format(self) -> tuple[Op, ...]:
        """Put the input in the read's own format; last, so that every row moves in the run's."""
        if not self._declaration.read.formats_input:
            return ()
        rows = self._compute
        return (Op(OpKind.FORMAT, Place.PREPARE, Operand.INPUT, before=rows, after=rows),)

    def _sum_onto(self, owed: SumGroup, rows: Layout, landing: Layout) -> tuple[Op, ...]:
        """Complete a sum and land on ``landing``: a reduce-scatter where that divides the rows."""
        total = complete_sum(self._ground, owed.group, rows, landing, Place.PREPARE)
        previous = self._declaration.previous
        plain = previous is not None and previous.update.plain
        if total.kind is OpKind.ALL_REDUCE and plain:
            total = replace(total, quantised=self._ground.spec.quantised_all_reduce)
        return (total,)

    def _join(self, owed: SumGroup) -> tuple[Op, ...] | None:
        """Let the residual join the sum that completes the output, where that saves a collective.

        Only for an FFN on rows of several ranks, and only where update and read are plain.
        """
        declaration, ground = self._declaration, self._ground
        previous = declaration.previous
        plain = (
            previous is not None
            and previous.update.plain
            and declaration.read.plain
            and not declaration.read.before_gather
        )
        if declaration.kind is not StageKind.FFN or owed is not SumGroup.ATTN_TP or not plain:
            return None
        if self._compute != FULL_ROWS or ground.variant is BatchVariant.SEQUENCE_PARALLEL:
            return None
        if ground.variant is BatchVariant.INPUT_SCATTERED:
            onto_every_row = self.destination == ground.attention
            return self._join_slices() if self._source == ground.local and onto_every_row else None
        return self._join_gather() if ground.topology.attn_dp > 1 else None

    def _join_slices(self) -> tuple[Op, ...]:
        """Each rank adds its residual slice to its partial; the sum is the new residual."""
        rows = self._ground.attention
        join = Op(OpKind.JOIN_SLICE, Place.PREPARE, before=rows, after=rows)
        total = complete_sum(self._ground, GroupName.TP, rows, rows, Place.PREPARE)
        take = Op(OpKind.TAKE_RESIDUAL, Place.PREPARE, before=rows, after=rows)
        return (join, total, take, READ_SUM, *self._format())

    def _join_gather(self) -> tuple[Op, ...]:
        """Attention TP rank 0 adds the residual; one DP sum completes and gathers; then norm."""
        ground, rows = self._ground, self._ground.attention
        moved = move(ground, self._source, rows, Operand.RESIDUAL)
        join = Op(OpKind.JOIN, Place.PREPARE, before=rows, after=rows)
        take = Op(OpKind.TAKE_RESIDUAL, Place.PREPARE, before=FULL_ROWS, after=rows)
        if ground.packs_slots:
            total = place_and_sum(ground, Operand.VALUE, Place.PREPARE, partial=True)
        else:
            assert ground.kind.padding is DpPadding.MAX_LEN
            total = (
                complete_sum(ground, GroupName.ATTN_TP, rows, ground.local, Place.PREPARE),
                Op(
                    OpKind.ALL_GATHER,
                    Place.PREPARE,
                    Operand.VALUE,
                    GroupName.TP,
                    ground.local,
                    FULL_ROWS,
                ),
            )
        return (*moved, join, *total, take, READ_SUM, *self._format())
