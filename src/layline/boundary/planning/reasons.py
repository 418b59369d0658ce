"""Why a boundary is planned as it is, in words: what was chosen, and why nothing else was."""

from __future__ import annotations

from layline.boundary.contracts import StageDecl, StageKind
from layline.boundary.layout import FULL_ROWS, BatchVariant
from layline.boundary.planning.moves import Ground
from layline.boundary.planning.records import Op, OpKind
from layline.boundary.planning.resolve import equal_shards, ffn_is_local
from layline.boundary.planning.walk import Crossing
from layline.boundary.rows import DpPadding


def reason_of(ground: Ground, crossing: Crossing) -> str:
    """Sentences that explain one boundary, joined by semicolons."""
    parts: list[str] = []
    if crossing.producer is None or crossing.leaving is None:
        parts.append(_entry_reason(crossing))
    else:
        parts.append(crossing.leaving.reason)
        decl = crossing.producer.path(ground.kind).decl
        if crossing.producer.declaration.kind is StageKind.FFN and decl.output.owed is not None:
            scattered = crossing.leaving.mlp_reduce_scatter
            parts += [] if scattered else _no_scatter(ground, decl)
            parts += _not_left(ground, crossing)
    parts += _input_reasons(ground, crossing)
    return "; ".join(part for part in parts if part)


def _entry_reason(crossing: Crossing) -> str:
    if _has(crossing.prepare, OpKind.REDUCE_SCATTER):
        return "the embedding leaves its sum, which lands on slices"
    return "the embedding is the first residual"


def _no_scatter(ground: Ground, decl: StageDecl) -> list[str]:
    """Why the FFN's sum is not finished by a reduce-scatter."""
    topology, policy = ground.topology, ground.spec.policy
    fixed = f"policy {policy.value} permits no reduce-scatter" if not policy.allows_scatter else ""
    if not decl.output.leaves_for_scatter:
        return ["no reduce-scatter: the output's transform needs the whole sum"]
    if ground.variant is BatchVariant.INPUT_SCATTERED:
        return [fixed or "no reduce-scatter: nothing after it takes a slice"]
    if topology.attn_dp == 1:
        if ground.variant is BatchVariant.CONTEXT_PARALLEL:
            return [fixed or _no_context_scatter(ground)]
        return ["no reduce-scatter: every rank needs every row"]
    if topology.attn_cp > 1:
        return [f"no reduce-scatter: attention CP {topology.attn_cp} ranks share a slot"]
    return [_no_variable_scatter(ground), _no_fixed_scatter(ground, fixed)]


def _no_context_scatter(ground: Ground) -> str:
    topology = ground.topology
    if topology.attn_tp > 1:
        return (
            f"no reduce-scatter: the sum is over TP {topology.tp}, the rows are divided over "
            f"attention CP {topology.attn_cp}"
        )
    return "" if equal_shards(ground) else "no reduce-scatter: CP chunks may be unequal"


def _no_variable_scatter(ground: Ground) -> str:
    if ground.topology.attn_tp > 1:
        return f"no reduce-scatter-v: attention TP {ground.topology.attn_tp} ranks share a slot"
    if not ground.spec.policy.allows_variable_scatter:
        return f"policy {ground.spec.policy.value} permits no reduce-scatter-v"
    return ""


def _no_fixed_scatter(ground: Ground, forbidden: str) -> str:
    packed = ground.kind.padding is DpPadding.SUM_LEN
    return forbidden or ("no reduce-scatter: packed slots are unequal" if packed else "")


def _not_left(ground: Ground, crossing: Crossing) -> list[str]:
    """Why the sum is not left to the next input, where the reason does not say it."""
    assert crossing.leaving is not None
    assert crossing.producer is not None
    leaving = crossing.leaving
    if not leaving.compute or crossing.producer.declaration.terminal:
        return []
    if ground.variant is BatchVariant.CONTEXT_PARALLEL or ground.topology.attn_cp > 1:
        return ["the sum is not left: each CP rank takes its own rows back first"]
    if ground.variant is BatchVariant.INPUT_SCATTERED:
        return ["the sum is not left: the next input takes a slice of it"]
    return []


def _input_reasons(ground: Ground, crossing: Crossing) -> list[str]:
    """What decides the order of add, norm and row movement before the consumer."""
    ops = crossing.prepare
    if _has(ops, OpKind.JOIN):
        return [
            "attention TP rank 0 adds the residual to its part, so that one move completes and "
            "gathers the sum and the norm reads every row"
        ]
    if _has(ops, OpKind.JOIN_SLICE):
        return ["each rank adds its residual slice to its part: the sum is the new residual"]
    consumer = crossing.consumer
    if consumer is None or consumer.declaration.kind is not StageKind.FFN:
        return []
    if ffn_is_local(ground):
        return ["dense TP 1: each rank computes whole rows of its own"]
    if crossing.compute_rows == FULL_ROWS and ground.attention != FULL_ROWS:
        return ["add and norm run before the gather, on fewer rows"]
    return []


def _has(ops: tuple[Op, ...], kind: OpKind) -> bool:
    return any(op.kind is kind for op in ops)
