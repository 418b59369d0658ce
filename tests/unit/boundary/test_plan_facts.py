"""What holds for every plan: neighbours agree, and the policy moves nothing but FFN outputs."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest

from layline.boundary.contracts import StageKind
from layline.boundary.layout import BatchVariant
from layline.boundary.mesh import CpRows, MeshSpec
from layline.boundary.planning.moves import batch_kinds
from layline.boundary.planning.records import OpKind, Place
from layline.boundary.policy import POLICIES, ReductionPolicy, resolve_draft_policy, resolve_policy
from layline.boundary.rows import DpPadding, batch_kind
from layline.errors import UsageError
from layline.topology import Topology
from support.plan_text import mesh, path, short
from support.simulated_cases import Planner, allowed, mesh_spec, meshes, with_policies

MAX, SUM = DpPadding.MAX_LEN, DpPadding.SUM_LEN
AR, RS, RSV, RS_RSV = ReductionPolicy
ORDINARY = batch_kind(BatchVariant.ORDINARY)
SEQUENCE = batch_kind(BatchVariant.SEQUENCE_PARALLEL)
TP2 = mesh(1, 1, 2)


NAMES = ("attention", "mixer", "whole-input mixer", "writing attention", "ffn", "tail ffn")
NAMES += ("transform ffn", "weighted ffn", "writing ffn")


def every_plan(
    names: Iterable[str] = ("attention", "mixer", "ffn"),
    policies: Iterable[ReductionPolicy] = tuple(ReductionPolicy),
) -> Any:
    """Both sides of each edge on small meshes: spec, kind, producer's path, consumer's path."""
    names = tuple(names)
    for found in meshes((1, 2, 4)):
        for spec in with_policies(found):
            if spec.policy not in policies:
                continue
            planner = Planner(spec)
            here = [name for name in names if name in allowed(spec)]
            for before, after in itertools.product(here, repeat=2):
                for kind in batch_kinds(spec):
                    producer = planner.stage("ffn", before, after).path(kind)
                    consumer = planner.stage(before, after, "ffn").path(kind)
                    yield spec, kind, producer, consumer


def test_both_sides_of_an_edge_agree() -> None:  # boundary G10
    """The consumer plans from its own view of the producer; rows, group and sum are the same."""
    edges = 0
    left: set[str] = set()
    for _, _, producer, consumer in every_plan(NAMES, (AR, RS_RSV)):
        edges += 1
        leaving, seen = producer.exit.with_tokens, consumer.leaving
        assert seen is not None
        assert consumer.prepare.edge.producer == producer.decl.output
        assert (seen.rows, seen.writes, seen.declared) == (
            leaving.rows,
            leaving.writes,
            leaving.declared,
        )
        assert short(seen.owed) == short(leaving.owed)
        assert (consumer.prepare.declared is not None) is (leaving.declared is not None)
        assert (consumer.prepare.complete is not None) is not leaving.writes
        residual = leaving.rows if leaving.writes else producer.prepare.residual_rows
        assert residual in consumer.prepares
        if leaving.declared is not None:
            left.add(leaving.declared.name)
            idle = producer.exit.without_tokens
            assert idle.declared is leaving.declared, "the consumer's path follows declarations"
    assert edges > 1500
    assert left == {"ATTN_TP", "TP"}


def test_all_reduce_policy_never_scatters() -> None:  # boundary G34
    """No optional scatter under ``ar``; deferred all-reduces stay."""
    deferred = 0
    for spec, kind, producer, _ in every_plan():
        if spec.policy is not AR or producer.decl.kind is not StageKind.FFN:
            continue
        for leaving in (producer.exit.with_tokens, producer.exit.without_tokens):
            assert not leaving.mlp_reduce_scatter
            scatters = (OpKind.REDUCE_SCATTER, OpKind.REDUCE_SCATTER_V)
            ops = (*leaving.ops, *leaving.owed, *leaving.completion)
            assert not any(op.kind in scatters for op in ops)
            if kind.variant is not BatchVariant.SEQUENCE_PARALLEL:
                assert not any(op.kind in scatters for op in leaving.compute)
        deferred += producer.exit.with_tokens.fuse_mlp_allreduce
    assert deferred > 10


def test_scatters_are_used_where_they_are_eligible_and_nowhere_else() -> None:
    # boundary G35, G36, G37
    found: dict[OpKind, int] = {OpKind.REDUCE_SCATTER: 0, OpKind.REDUCE_SCATTER_V: 0}
    for spec, kind, producer, _ in every_plan(("ffn",)):
        topology, policy = spec.topology, spec.policy
        local = topology.dense_tp == 1 and topology.tp > 1
        leaving = producer.exit.with_tokens
        kinds = {op.kind for op in (*leaving.ops, *leaving.owed)} & set(found)
        data_parallel = topology.attn_dp > 1 and topology.attn_cp == 1 and not local
        variable = data_parallel and topology.attn_tp == 1 and policy in (RSV, RS_RSV)
        fixed = data_parallel and kind.padding is MAX and policy in (RS, RS_RSV) and not variable
        shards = (
            kind.variant is BatchVariant.CONTEXT_PARALLEL
            and topology.attn_cp == topology.tp
            and spec.cp_rows is CpRows.EQUAL
            and policy in (RS, RS_RSV)
            and not local
        )
        wanted = set()
        if variable:
            wanted.add(OpKind.REDUCE_SCATTER_V)
        if fixed or shards:
            wanted.add(OpKind.REDUCE_SCATTER)
        assert kinds == wanted, f"{spec}, {kind}"
        for each in kinds:
            found[each] += 1
    assert min(found.values()) > 5


def test_the_policy_reaches_ffn_exits_alone() -> None:  # boundary G39
    """Inputs, attention exits and required gathers are the same under every policy."""
    names = ("attention", "mixer", "ffn", "writing ffn")
    compared = 0
    for found in meshes((1, 2, 4)):
        if found.topology.attn_cp > 1:
            continue
        planners = [Planner(spec) for spec in with_policies(found)]
        for before, after in itertools.product(names, names):
            for kind in batch_kinds(found):
                stages = [planner.stage(before, after, "attention") for planner in planners]
                paths = [stage.path(kind) for stage in stages]
                if kind.variant is not BatchVariant.INPUT_SCATTERED:
                    # There a declared sum is itself the policy's scatter.
                    assert len({path.prepare for path in paths}) == 1
                assert len({path.decl for path in paths}) == 1
                assert len({path.prepare.written for path in paths}) == 1
                if paths[0].decl.kind is StageKind.ATTN:
                    assert len({path.exit for path in paths}) == 1
                compared += 1
    assert compared > 100


def test_sequence_parallel_batches_have_no_collective_inside() -> None:  # boundary G19
    """Between the first attention and the final norm the linear layers do all of it."""
    spec = mesh_spec(Topology(tp=4))
    planner = Planner(spec)
    names = ("attention", "ffn", "attention", "ffn", "mixer", "ffn")
    for plan in planner.stack(names):
        stage = plan.path(SEQUENCE)
        prepare, leaving = stage.prepare, stage.exit.with_tokens
        sequences = (prepare.entry, prepare.written, prepare.complete or (), leaving.ops)
        assert not any(op.is_collective for ops in sequences for op in ops)
        assert not leaving.owed
        assert leaving.declared is None
        assert [op.place for op in leaving.compute] == [Place.COMPUTE]


def test_quantised_sums_are_opt_in_and_plain_only() -> None:  # boundary G32
    spec = mesh(1, 1, 2, quantised_all_reduce=True)

    def quantised(spec: MeshSpec, near: str) -> list[bool]:
        stage = path(spec, ORDINARY, near)
        ops = (*(stage.prepare.declared or ()), *stage.exit.with_tokens.owed)
        return [op.quantised for op in ops if op.kind is OpKind.ALL_REDUCE]

    assert quantised(spec, "attention > ffn > attention") == [True, True]
    assert quantised(TP2, "attention > ffn > attention") == [False, False]
    assert quantised(spec, "weighted attention > ffn > attention") == [False, True]
    assert quantised(spec, "attention > weighted ffn > attention") == [True, False]


@pytest.mark.parametrize(
    ("asked", "architecture", "wanted"),
    [
        ("auto", "Qwen3ForCausalLM", "ar"),
        ("auto", "LongcatFlashForCausalLM", "rsv"),
        ("auto", "LlamaForCausalLM", "rs+rsv"),
        ("auto", "SomethingElse", "rs+rsv"),
        ("ar", "LlamaForCausalLM", "ar"),
        ("rs", "Qwen3ForCausalLM", "rs"),
    ],
)
def test_policies_resolve_by_architecture(
    asked: str, architecture: str, wanted: str
) -> None:  # boundary G40
    policy, reason = resolve_policy(asked, architecture)
    assert policy is ReductionPolicy(wanted)
    assert ("auto" in reason) is (asked == "auto")
    assert set(POLICIES) == {"auto", "ar", "rs", "rsv", "rs+rsv"}
    with pytest.raises(UsageError, match=r"'rsvv' is not one of .* did you mean 'rsv'"):
        resolve_policy("rsvv", architecture)


@pytest.mark.parametrize(
    ("speculative", "asked", "wanted"),
    [(None, "auto", "ar"), (None, "rs", "rs"), ("rsv", "rs", "rsv"), ("auto", "rs", "ar")],
)
def test_a_separate_draft_resolves_its_own_policy(
    speculative: str | None, asked: str, wanted: str
) -> None:  # boundary G40
    # The target is a Llama, whose auto is rs+rsv; the draft's own architecture decides for it.
    assert resolve_policy("auto", "LlamaForCausalLM")[0] is ReductionPolicy.RS_RSV
    policy, _ = resolve_draft_policy(speculative, asked, "Qwen3ForCausalLM")
    assert policy is ReductionPolicy(wanted)
    with pytest.raises(UsageError, match="speculative_boundary_reduction 'none' is not one of"):
        resolve_draft_policy("none", asked, "Qwen3ForCausalLM")
