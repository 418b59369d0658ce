"""Lower transitions of rows to operations: which collective moves them, in which padding.

The table says what happens along each axis. Here neighbouring axes merge into one group's
collective, and a gather over attention DP takes the form that its padding allows.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from layline.boundary.layout import (
    FULL_ROWS,
    BatchVariant,
    Layout,
    TokenAxis,
    attention_rows,
    local_rows,
)
from layline.boundary.mesh import MeshSpec
from layline.boundary.planning.records import Op, Operand, OpKind, Place, Writers
from layline.boundary.planning.table import Transition, transport
from layline.boundary.rows import BatchKind, DpPadding, batch_kind, effective_padding
from layline.errors import DeclarationError
from layline.topology import GroupName, Topology


@dataclass(frozen=True)
class Ground:
    """The mesh and the kind of batch that one path is planned on."""

    spec: MeshSpec
    kind: BatchKind

    @property
    def topology(self) -> Topology:
        """The mesh's degrees."""
        return self.spec.topology

    @property
    def variant(self) -> BatchVariant:
        """The kind of batch."""
        return self.kind.variant

    @functools.cached_property
    def attention(self) -> Layout:
        """Rows an attention computes on (A)."""
        return attention_rows(self.topology, self.variant)

    @functools.cached_property
    def local(self) -> Layout:
        """Attention rows divided over attention TP (L)."""
        return local_rows(self.topology, self.variant)

    @property
    def packs_slots(self) -> bool:
        """True when the global buffer is filled by a sum of buffers that are zero elsewhere."""
        return self.topology.attn_dp > 1 and self.kind.padding is DpPadding.SUM_LEN


def batch_kinds(spec: MeshSpec) -> tuple[BatchKind, ...]:
    """Every kind of batch that this mesh prepares paths for, the ordinary ones first."""
    topology = spec.topology
    paddings = tuple(dict.fromkeys(effective_padding(topology, padding) for padding in DpPadding))
    variants = [BatchVariant.ORDINARY]
    if topology.attn_cp > 1:
        variants.append(BatchVariant.CONTEXT_PARALLEL)
    if spec.input_scattered:
        variants.append(BatchVariant.INPUT_SCATTERED)
    if spec.sequence_parallel:
        variants.append(BatchVariant.SEQUENCE_PARALLEL)
    return tuple(batch_kind(variant, padding) for variant in variants for padding in paddings)


def move(
    ground: Ground, before: Layout, after: Layout, operand: Operand, place: Place = Place.PREPARE
) -> tuple[Op, ...]:
    """Operations that bring complete rows from ``before`` to ``after``."""
    if before == after:
        return ()
    steps = transport(before, after)
    gathered = {axis for step, axis in steps if step is Transition.ALL_GATHER}
    outer = gathered - {TokenAxis.ATTN_TP_SCATTER}
    if outer:
        return _gather_slots(ground, before, operand, place)
    ops: list[Op] = []
    current = before
    if gathered:
        current = Layout(before.sharded - gathered)
        ops.append(
            Op(OpKind.ALL_GATHER, place, operand, GroupName.ATTN_TP, before=before, after=current)
        )
    slots = frozenset(
        axis
        for step, axis in steps
        if step is Transition.SLICE and axis is not TokenAxis.ATTN_TP_SCATTER
    )
    if slots:
        own_slot = Layout(current.sharded | slots)
        ops.append(Op(OpKind.SLICE, place, operand, before=current, after=own_slot))
        current = own_slot
    if current != after:
        ops.append(Op(OpKind.SLICE, place, operand, before=current, after=after))
    return tuple(ops)


def _gather_slots(ground: Ground, before: Layout, operand: Operand, place: Place) -> tuple[Op, ...]:
    """A or L to F, over attention DP and, in a context-parallel batch, over CP with it."""
    topology, rows = ground.topology, ground.attention
    sliced = before != rows
    if topology.attn_dp == 1:
        whole = move(ground, before, rows, operand, place) if sliced else ()
        pad = Op(OpKind.PAD, place, operand, before=rows, after=rows)
        gather = Op(OpKind.ALL_GATHER, place, operand, GroupName.ATTN_CP, rows, FULL_ROWS)
        return (*whole, pad, gather)
    if ground.packs_slots:
        whole = move(ground, before, rows, operand, place) if sliced else ()
        return (*whole, *place_and_sum(ground, operand, place, partial=False))
    if topology.attn_tp == 1:
        pad = Op(OpKind.PAD, place, operand, before=rows, after=rows)
        gather = Op(OpKind.ALL_GATHER, place, operand, GroupName.TP, rows, FULL_ROWS)
        return (pad, gather)
    cut = () if sliced else move(ground, rows, ground.local, operand, place)
    gather = Op(OpKind.ALL_GATHER, place, operand, GroupName.TP, ground.local, FULL_ROWS)
    return (*cut, gather)


# The token axes that a group's ranks stand on.
_AXES_OF = {
    GroupName.ATTN_TP: (TokenAxis.ATTN_TP_SCATTER,),
    GroupName.ATTN_CP: (TokenAxis.ATTN_CP,),
    GroupName.TP: tuple(TokenAxis),
}
_SUMS = {
    Transition.ALL_REDUCE: OpKind.ALL_REDUCE,
    Transition.REDUCE_SCATTER: OpKind.REDUCE_SCATTER,
}


def complete_sum(
    ground: Ground, group: GroupName, before: Layout, landing: Layout, place: Place
) -> Op:
    """The one collective that completes a sum over ``group`` and leaves its rows on ``landing``.

    Raises DeclarationError where the table has no such transition: the ranks of the sum hold
    different rows, or one collective could not land there.
    """
    owed = Layout.over(ground.topology, _AXES_OF[group]).sharded
    transitions = {step for step, _ in transport(before, landing, owed)}
    kinds = {_SUMS.get(step) for step in transitions}
    kind = kinds.pop() if len(kinds) == 1 else None
    if kind is None:
        raise DeclarationError(
            f"no single collective completes a sum over {group.value} on rows [{before}] and "
            f"lands on rows [{landing}]"
        )
    return Op(kind, place, Operand.VALUE, group, before, landing)


def place_and_sum(
    ground: Ground, operand: Operand, place: Place, *, partial: bool
) -> tuple[Op, Op]:
    """Write own slots into zeroed buffers and add them up: a gather of rows of any size.

    With ``partial`` every attention TP rank writes what it holds, so that the one sum completes
    theirs too; otherwise one rank writes each slot.
    """
    shared = ground.topology.attn_cp > 1 and ground.variant is not BatchVariant.CONTEXT_PARALLEL
    if partial:
        writers = Writers.FIRST_CP if shared else Writers.ALL
    else:
        alone = ground.topology.attn_tp == 1
        writers = Writers.FIRST_CP_TP if shared else Writers.ALL if alone else Writers.FIRST_TP
    rows = ground.attention
    return (
        Op(OpKind.PLACE, place, operand, before=rows, after=FULL_ROWS, writers=writers),
        Op(OpKind.ALL_REDUCE, place, operand, GroupName.TP, FULL_ROWS, FULL_ROWS),
    )
