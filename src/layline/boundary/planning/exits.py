"""Plan a producer's exit: what its compute may leave undone, and who finishes it where.

The decision falls once, before compute, and only by facts that all ranks share. Each outcome is an
:class:`ExitPlan`: the flags that compute sees, and exactly the work that those flags leave over.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from layline.boundary.contracts import (
    ProducerReduction,
    StageDecl,
    StageDeclaration,
    StageKind,
)
from layline.boundary.layout import FULL_ROWS, BatchVariant, Layout, SumGroup
from layline.boundary.planning.moves import Ground, complete_sum, move
from layline.boundary.planning.records import Op, Operand, OpKind, Place
from layline.boundary.planning.resolve import (
    equal_shards,
    ffn_is_local,
    residual_after,
)
from layline.boundary.rows import DpPadding
from layline.topology import GroupName


@dataclass(frozen=True)
class ExitPlan:
    """One outcome of the exit decision.

    Attributes:
        fuse_mlp_allreduce: Compute leaves its all-reduce out.
        mlp_reduce_scatter: Compute leaves its sum to a reduce-scatter.
        compute: Sums that compute runs itself.
        ops: Operations of the exit.
        owed: Work left to whoever needs the output next, in order (a dynamic sum).
        declared: The sum left by contract, which the next stage's own plan completes.
        completion: Completes ``declared`` on the rows it is on, for whoever needs it earlier.
        writes: The exit applies the update itself: the stream is written.
        rows: Rows of what is passed on, owed work done.
        residual_moves: Bring the residual to ``rows``, for whoever adds the output to it before
            the next stage does.
        after_norm: Brings a final norm's result back to attention rows.
        reason: In words, why this outcome.
    """

    fuse_mlp_allreduce: bool = False
    mlp_reduce_scatter: bool = False
    compute: tuple[Op, ...] = ()
    ops: tuple[Op, ...] = ()
    owed: tuple[Op, ...] = ()
    declared: SumGroup | None = None
    completion: tuple[Op, ...] = ()
    writes: bool = False
    rows: Layout = FULL_ROWS
    residual_moves: tuple[Op, ...] = ()
    after_norm: tuple[Op, ...] = ()
    reason: str = ""


@dataclass(frozen=True)
class ExitChoice:
    """The outcome for a step with tokens, and for one without any on the whole mesh."""

    with_tokens: ExitPlan
    without_tokens: ExitPlan


def plan_exit(
    ground: Ground,
    declaration: StageDeclaration,
    decl: StageDecl,
    following: StageDeclaration | None,
) -> ExitChoice:
    """Both outcomes of one stage's exit."""
    if ground.variant is BatchVariant.SEQUENCE_PARALLEL:
        choice = _same(_sequence_parallel_exit(ground, declaration))
    elif declaration.kind is StageKind.ATTN:
        choice = _same(_attention_exit(ground, declaration, decl, following))
    else:
        choice = _ffn_exit(ground, declaration, decl)
    return ExitChoice(
        _with_residual_moves(ground, declaration, choice.with_tokens),
        _with_residual_moves(ground, declaration, choice.without_tokens),
    )


def _with_residual_moves(ground: Ground, declaration: StageDeclaration, plan: ExitPlan) -> ExitPlan:
    if plan.writes:
        return plan
    source = residual_after(ground, declaration)
    return replace(plan, residual_moves=move(ground, source, plan.rows, Operand.RESIDUAL))


def _ffn_exit(ground: Ground, declaration: StageDeclaration, decl: StageDecl) -> ExitChoice:
    if ffn_is_local(ground):
        return _same(_local_exit(ground, declaration, decl))
    if decl.output.owed is None:
        return _same(_finish(ground, declaration, decl, ExitPlan(reason="one rank has the sum")))
    if ground.variant is BatchVariant.INPUT_SCATTERED:
        return _same(_input_scattered_exit(ground, declaration, decl))
    scatter = _scatter(ground, declaration, decl)
    if scatter is not None:
        return _same(scatter)
    complete = _complete(ground, declaration, decl)
    return ExitChoice(_deferred(ground, decl) or complete, complete)


def _same(plan: ExitPlan) -> ExitChoice:
    return ExitChoice(plan, plan)


def _sum(ground: Ground, place: Place, group: SumGroup, rows: Layout) -> Op:
    return complete_sum(ground, group.group, rows, rows, place)


def _attention_exit(
    ground: Ground,
    declaration: StageDeclaration,
    decl: StageDecl,
    following: StageDeclaration | None,
) -> ExitPlan:
    output = decl.output
    partial = declaration.reduction is ProducerReduction.PARTIAL
    plan = ExitPlan(rows=output.handoff, reason="attention TP is one rank: the output is whole")
    if output.owed is not None:
        late = _sum(ground, Place.PREPARE, output.owed, output.layout)
        before_mixer = following is not None and following.kind is StageKind.ATTN
        if output.leaves_for_next and before_mixer and not partial:
            plan = ExitPlan(
                fuse_mlp_allreduce=True,
                owed=(late,),
                rows=output.handoff,
                reason="the next mixer's input completes the sum with its add and norm",
            )
        elif output.leaves_for_next:
            plan = ExitPlan(
                fuse_mlp_allreduce=not partial,
                declared=output.owed,
                completion=(late,),
                rows=output.handoff,
                reason="the next stage completes the attention sum",
            )
        else:
            early = _sum(ground, Place.COMPUTE, output.owed, output.layout)
            plan = ExitPlan(
                compute=(early,), rows=output.handoff, reason="no stage that could complete the sum"
            )
    return _with_update(ground, declaration, plan)


def _with_update(ground: Ground, declaration: StageDeclaration, plan: ExitPlan) -> ExitPlan:
    """Apply an update that its producer wants applied; any sum is finished first."""
    if not declaration.update.at_producer:
        return plan
    late = plan.owed or plan.completion
    early = tuple(replace(op, place=Place.EXIT) for op in late)
    source = residual_after(ground, declaration)
    residual = move(ground, source, plan.rows, Operand.RESIDUAL, Place.EXIT)
    update = Op(OpKind.UPDATE, Place.EXIT, before=plan.rows, after=plan.rows)
    return replace(
        plan,
        ops=(*plan.ops, *early, *residual, update),
        owed=(),
        declared=None,
        completion=(),
        writes=True,
    )


def _sequence_parallel_exit(ground: Ground, declaration: StageDeclaration) -> ExitPlan:
    rows = ground.local
    scatter = complete_sum(ground, GroupName.TP, FULL_ROWS, rows, Place.COMPUTE)
    plan = ExitPlan(
        compute=(scatter,),
        ops=_transform(declaration, rows),
        rows=rows,
        reason="the linear layers scatter their own output",
    )
    plan = _with_update(ground, declaration, plan)
    if not declaration.terminal:
        return plan
    if not plan.writes:
        return replace(plan, after_norm=move(ground, rows, ground.attention, Operand.INPUT))
    back = move(ground, rows, ground.attention, Operand.VALUE, Place.EXIT)
    return replace(plan, ops=(*plan.ops, *back), rows=ground.attention)


def _local_exit(ground: Ground, declaration: StageDeclaration, decl: StageDecl) -> ExitPlan:
    """An FFN that a rank computed alone on its own rows: nothing is owed."""
    rows, handoff = decl.output.layout, decl.output.handoff
    transform = _transform(declaration, rows)
    if rows == handoff:
        plan = ExitPlan(ops=transform, rows=rows, reason="each rank computes its rows alone")
        return _with_update(ground, declaration, plan)
    update = Op(OpKind.UPDATE, Place.EXIT, before=rows, after=rows)
    back = move(ground, rows, handoff, Operand.VALUE, Place.EXIT)
    return ExitPlan(
        ops=(*transform, update, *back),
        writes=True,
        rows=handoff,
        reason="the stack ends on attention rows",
    )


def _transform(declaration: StageDeclaration, rows: Layout) -> tuple[Op, ...]:
    if declaration.transform is None:
        return ()
    return (Op(OpKind.TRANSFORM, Place.EXIT, before=rows, after=rows),)


def _deferred(ground: Ground, decl: StageDecl) -> ExitPlan | None:
    """Leave the all-reduce, and the copy of the own slot after it, to the next input."""
    if not decl.output.leaves_for_next or decl.output.owed is None:
        return None
    late = replace(
        _sum(ground, Place.PREPARE, decl.output.owed, FULL_ROWS),
        quantised=ground.spec.quantised_all_reduce and decl.output.update.plain,
    )
    back = move(ground, FULL_ROWS, decl.output.handoff, Operand.VALUE)
    return ExitPlan(
        fuse_mlp_allreduce=True,
        owed=(late, *back),
        rows=decl.output.handoff,
        reason="the next input completes the sum with its add and norm",
    )


def _complete(ground: Ground, declaration: StageDeclaration, decl: StageDecl) -> ExitPlan:
    """Compute reduces; the exit takes the rank's own rows."""
    assert decl.output.owed is not None
    early = _sum(ground, Place.COMPUTE, decl.output.owed, FULL_ROWS)
    reason = "the stack ends here" if declaration.terminal else "nothing may be left"
    return _finish(ground, declaration, decl, ExitPlan(compute=(early,), reason=reason))


def _finish(
    ground: Ground, declaration: StageDeclaration, decl: StageDecl, plan: ExitPlan
) -> ExitPlan:
    back = move(ground, FULL_ROWS, decl.output.handoff, Operand.VALUE, Place.EXIT)
    ops = (*_transform(declaration, FULL_ROWS), *back)
    return _with_update(ground, declaration, replace(plan, ops=ops, rows=decl.output.handoff))


def _scatter(ground: Ground, declaration: StageDeclaration, decl: StageDecl) -> ExitPlan | None:
    """The optional scatter that the policy permits here: RSv first, then RS, else None."""
    if not decl.output.leaves_for_scatter:
        return None
    ops, reason = _dp_scatter(ground, decl) or _cp_scatter(ground, decl) or ((), "")
    if not ops:
        return None
    carried = (
        ground.variant is BatchVariant.ORDINARY
        and not declaration.terminal
        and not declaration.update.at_producer
        and declaration.transform is None
    )
    rows = decl.output.handoff
    if carried:
        return ExitPlan(mlp_reduce_scatter=True, owed=ops, rows=rows, reason=reason)
    early = tuple(replace(op, place=Place.EXIT) for op in ops)
    transform = _transform(declaration, FULL_ROWS)
    plan = ExitPlan(mlp_reduce_scatter=True, ops=(*transform, *early), rows=rows, reason=reason)
    return _with_update(ground, declaration, plan)


def _dp_scatter(ground: Ground, decl: StageDecl) -> tuple[tuple[Op, ...], str] | None:
    topology, policy = ground.topology, ground.spec.policy
    if topology.attn_dp == 1 or topology.attn_cp > 1:
        return None
    handoff = decl.output.handoff
    if policy.allows_variable_scatter and topology.attn_tp == 1:
        op = complete_sum(ground, GroupName.TP, FULL_ROWS, handoff, Place.PREPARE)
        op = replace(op, kind=OpKind.REDUCE_SCATTER_V)
        return (op,), "every rank has rows of its own: a variable reduce-scatter returns them"
    if policy.allows_scatter and ground.kind.padding is DpPadding.MAX_LEN:
        landing = ground.local
        op = complete_sum(ground, GroupName.TP, FULL_ROWS, landing, Place.PREPARE)
        back = move(ground, landing, handoff, Operand.VALUE)
        return (op, *back), "slots are equal: a reduce-scatter returns them"
    return None


def _cp_scatter(ground: Ground, decl: StageDecl) -> tuple[tuple[Op, ...], str] | None:
    if ground.variant is not BatchVariant.CONTEXT_PARALLEL or not ground.spec.policy.allows_scatter:
        return None
    topology = ground.topology
    # The ranks that the FFN sums over must be the CP ranks, and their shards equal.
    if topology.attn_dp > 1 or topology.attn_tp > 1 or not equal_shards(ground):
        return None
    op = complete_sum(ground, GroupName.ATTN_CP, FULL_ROWS, decl.output.handoff, Place.PREPARE)
    return (op,), "CP shards are equal: a reduce-scatter returns them"


def _input_scattered_exit(
    ground: Ground, declaration: StageDeclaration, decl: StageDecl
) -> ExitPlan:
    output = decl.output
    assert output.owed is not None
    scatters = ground.spec.policy.allows_scatter and output.leaves_for_scatter
    residual = residual_after(ground, declaration)
    scatter = complete_sum(ground, GroupName.TP, FULL_ROWS, ground.local, Place.EXIT)
    if declaration.update.at_producer:
        update = Op(OpKind.UPDATE, Place.EXIT, before=residual, after=residual)
        early = () if scatters else (_sum(ground, Place.COMPUTE, output.owed, FULL_ROWS),)
        cut = (
            (scatter,) if scatters else move(ground, FULL_ROWS, residual, Operand.VALUE, Place.EXIT)
        )
        back = move(ground, residual, output.handoff, Operand.VALUE, Place.EXIT)
        return ExitPlan(
            mlp_reduce_scatter=scatters,
            compute=early,
            ops=(*_transform(declaration, FULL_ROWS), *cut, update, *back),
            writes=True,
            rows=output.handoff,
            reason="the producer applies its own update on its slice",
        )
    if scatters and not declaration.terminal and declaration.transform is None:
        return ExitPlan(
            mlp_reduce_scatter=True,
            declared=output.owed,
            completion=(_sum(ground, Place.PREPARE, output.owed, FULL_ROWS),),
            rows=output.handoff,
            reason="the next input takes its slice of the sum",
        )
    return _complete(ground, declaration, decl)
