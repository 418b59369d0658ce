"""Plans as short text, and the stages of a mesh by name.

``AR`` all-reduce, ``RS`` reduce-scatter, ``RSv`` variable reduce-scatter, ``AG`` all-gather, ``SL``
slice, ``U`` update, ``R`` read; ``res:`` and ``in:`` mark operations on the residual and on the
compute input. ``A`` are a rank's attention rows, ``F`` all rows, ``L`` attention rows over TP.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from layline.boundary.layout import Layout
from layline.boundary.mesh import MeshSpec
from layline.boundary.planning.exits import ExitPlan
from layline.boundary.planning.moves import Ground
from layline.boundary.planning.records import Op, Operand, OpKind
from layline.boundary.planning.stage import StagePath
from layline.boundary.policy import DEFAULT, ReductionPolicy
from layline.boundary.rows import BatchKind
from layline.topology import GroupName, Topology
from support.simulated_cases import Planner

NAMES = {
    OpKind.ENTER: "enter",
    OpKind.READ: "R",
    OpKind.UPDATE: "U",
    OpKind.UPDATE_AND_READ: "U+R",
    OpKind.TRANSFORM: "T",
    OpKind.JOIN: "join",
    OpKind.JOIN_SLICE: "join slice",
    OpKind.TAKE_RESIDUAL: "take residual",
    OpKind.SLICE: "SL",
    OpKind.PLACE: "place",
    OpKind.PAD: "pad",
    OpKind.ALL_REDUCE: "AR",
    OpKind.ALL_GATHER: "AG",
    OpKind.REDUCE_SCATTER: "RS",
    OpKind.REDUCE_SCATTER_V: "RSv",
}
GROUPS = {GroupName.TP: "TP", GroupName.ATTN_TP: "ATTN_TP", GroupName.ATTN_CP: "ATTN_CP"}


def short(ops: Iterable[Op] | None) -> str:
    assert ops is not None, "no path"
    return " ".join(_short(op) for op in ops)


def _short(op: Op) -> str:
    if op.kind is OpKind.READ:
        return "R" if op.operand is Operand.RESIDUAL else "R(sum)"
    mark = {Operand.RESIDUAL: "res:", Operand.INPUT: "in:", Operand.VALUE: ""}[op.operand]
    group = "" if op.group is None else f"({GROUPS[op.group]})"
    return mark + NAMES[op.kind].replace(" ", "-") + group


def mesh(dp: int, cp: int, tp: int, policy: ReductionPolicy = DEFAULT, **changes: Any) -> MeshSpec:
    dense = changes.pop("dense_tp", None)
    topology = Topology(tp=dp * cp * tp, attn_dp=dp, attn_cp=cp, dense_tp=dense)
    return MeshSpec(topology=topology, policy=policy, **changes)


def path(spec: MeshSpec, kind: BatchKind, near: str) -> StagePath:
    """The middle stage of ``"before > stage > after"``; ``.`` are the stack's ends."""
    before, name, after = (None if part == "." else part for part in near.split(" > "))
    assert name is not None
    return Planner(spec).stage(before, name, after).path(kind)


def rows(spec: MeshSpec, kind: BatchKind, layout: Layout) -> str:
    ground = Ground(spec, kind)
    if layout == ground.attention:
        return "A"
    return "L" if layout == ground.local else "F"


def flags_of(leaving: ExitPlan) -> str:
    flags = [("fuse", leaving.fuse_mlp_allreduce), ("scatter", leaving.mlp_reduce_scatter)]
    return " ".join(name for name, flag in flags if flag)
