"""Resolve a declaration on a mesh for one kind of batch: rows in, rows out, what it may leave."""

from __future__ import annotations

from layline.boundary.contracts import (
    ProducerReduction,
    StageDecl,
    StageDeclaration,
    StageInput,
    StageKind,
    StageOutput,
)
from layline.boundary.layout import FULL_ROWS, BatchVariant, Layout, SumGroup
from layline.boundary.mesh import CpRows
from layline.boundary.planning.moves import Ground


def resolve_stage(
    ground: Ground, declaration: StageDeclaration, following: StageDeclaration | None = None
) -> StageDecl:
    """One stage's input and output."""
    resolve = _resolve_attention if declaration.kind is StageKind.ATTN else _resolve_ffn
    rows, output = resolve(ground, declaration, following)
    stage_input = StageInput(rows, declaration.read)
    return StageDecl(declaration.kind, ground.variant, stage_input, output)


def ffn_is_local(ground: Ground) -> bool:
    """True when each rank computes whole FFNs on its own rows."""
    return ground.topology.dense_tp == 1 and ground.topology.tp > 1


def residual_after(ground: Ground, declaration: StageDeclaration) -> Layout:
    """The rows a stage's residual lives on once its input is prepared."""
    if ground.variant is BatchVariant.SEQUENCE_PARALLEL:
        return ground.local
    if declaration.kind is StageKind.FFN:
        update = declaration.update
        joins_sum = update.plain and not update.at_producer
        scattered = ground.variant is BatchVariant.INPUT_SCATTERED
        sliced = ffn_is_local(ground) or (scattered and not joins_sum)
        return ground.local if sliced else ground.attention
    if ground.variant is BatchVariant.INPUT_SCATTERED:
        return ground.local if declaration.gathers_tp_input else ground.attention
    return handoff_rows(ground, declaration.previous)


def handoff_rows(ground: Ground, producer: StageDeclaration | None) -> Layout:
    """The rows a producer hands its output on, and with it where a following attention updates."""
    if producer is None:
        return ground.attention
    return resolve_stage(ground, producer).output.handoff


def _resolve_attention(
    ground: Ground, declaration: StageDeclaration, following: StageDeclaration | None
) -> tuple[Layout, StageOutput]:
    if ground.variant is BatchVariant.SEQUENCE_PARALLEL:
        # Its linear layers gather and scatter themselves, so it owes nothing.
        return ground.local, StageOutput(ground.local, ground.local, None, declaration.update)
    rows = ground.attention
    owed = SumGroup.ATTN_TP if ground.topology.attn_tp > 1 else None
    partial = declaration.reduction is ProducerReduction.PARTIAL
    leaves = owed is not None and (
        partial or _mixer_may_leave(ground, following, terminal=declaration.terminal)
    )
    output = StageOutput(rows, rows, owed, declaration.update, leaves_for_next=leaves)
    takes_slice = declaration.gathers_tp_input and declaration.latent_input
    if ground.variant is BatchVariant.INPUT_SCATTERED and takes_slice:
        return ground.local, output
    return rows, output


def _mixer_may_leave(ground: Ground, following: StageDeclaration | None, *, terminal: bool) -> bool:
    """Before an FFN always; before another mixer only where the sum's rows are the mixer's own."""
    if following is None or terminal:
        return False
    if following.kind is StageKind.FFN:
        return True
    scattered = ground.variant is BatchVariant.INPUT_SCATTERED
    return ground.topology.attn_dp == 1 and not scattered


def _resolve_ffn(
    ground: Ground, declaration: StageDeclaration, following: StageDeclaration | None
) -> tuple[Layout, StageOutput]:
    update, terminal = declaration.update, declaration.terminal
    if ground.variant is BatchVariant.SEQUENCE_PARALLEL:
        return ground.local, StageOutput(ground.local, ground.local, None, update)
    if ffn_is_local(ground):
        handoff = ground.attention if terminal else ground.local
        return ground.local, StageOutput(ground.local, handoff, None, update)
    owed = SumGroup.TP if ground.topology.tp > 1 else None
    plain = not update.at_producer and declaration.transform is None
    next_permitted = (
        plain
        and not terminal
        and declaration.reduction is not ProducerReduction.LOCAL_TAIL
        and _return_is_a_copy(ground)
    )
    transform = declaration.transform
    scatter_permitted = transform is None or transform.before_reduce_scatter
    handoff = ground.attention
    if ground.variant is BatchVariant.INPUT_SCATTERED and update.at_producer and not terminal:
        handoff = ground.local
    output = StageOutput(
        FULL_ROWS,
        handoff,
        owed,
        update,
        leaves_for_next=owed is not None and next_permitted,
        leaves_for_scatter=owed is not None and scatter_permitted,
    )
    return FULL_ROWS, output


def _return_is_a_copy(ground: Ground) -> bool:
    """True when the way back to attention rows is nothing, or one plain copy of an own slot."""
    if ground.variant is BatchVariant.INPUT_SCATTERED:
        return False
    if ground.variant is BatchVariant.CONTEXT_PARALLEL:
        return False
    return ground.topology.attn_dp == 1 or ground.topology.attn_cp == 1


def equal_shards(ground: Ground) -> bool:
    """True when a context-parallel batch holds as many rows on every CP rank."""
    return ground.spec.cp_rows is CpRows.EQUAL
