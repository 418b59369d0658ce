"""Stacks on simulated ranks equal the same stacks by hand on one, and run what was planned."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from layline.boundary.layout import FULL_ROWS, BatchVariant, TokenAxis
from layline.boundary.mesh import CpRows, MeshSpec
from layline.boundary.planning.moves import batch_kinds
from layline.boundary.planning.records import Op, OpKind, Place
from layline.boundary.planning.walk import enters_partial, walk
from layline.boundary.policy import ReductionPolicy
from layline.boundary.rows import DpPadding, StepRows, batch_kind
from layline.comm.groups import CollectiveKind
from layline.topology import GroupName, Topology
from support.simulated_cases import SHAPES, Case, mesh_spec, with_policies
from support.toy_mesh import HIDDEN, ToyRank, each_group, on_ranks, reference

DIVISIONS = [
    (1, 1, 2),
    (1, 1, 4),
    (2, 1, 1),
    (2, 1, 2),
    (4, 1, 1),
    (1, 2, 1),
    (1, 2, 2),
    (2, 2, 1),
    (2, 2, 2),
]
LAYERS = ("attention", "ffn", "attention", "ffn")
MIXED = ("mixer", "mixer", "ffn", "whole-input mixer", "tail ffn", "attention")
ODD = ("weighted attention", "linear transform ffn", "latent attention", "weighted ffn")
EARLY = ("attention", "early reading ffn", "attention", "transform ffn", "odd reading ffn")
WRITING = ("writing attention", "writing ffn", "mixer", "writing plain ffn")
STACKS = {"layers": LAYERS, "mixed": MIXED, "odd": ODD, "early": EARLY, "writing": WRITING}


def topology_of(division: tuple[int, int, int], dense: int | None = None) -> Topology:
    dp, cp, tp = division
    return Topology(tp=dp * cp * tp, attn_dp=dp, attn_cp=cp, dense_tp=dense)


def cases_on(mesh: Topology) -> Iterator[Case]:
    """Every policy, kind of batch and step shape; few policies where none has an effect."""
    few = (ReductionPolicy.AR, ReductionPolicy.RS_RSV)
    for spec in with_policies(mesh_spec(mesh)):
        if mesh.attn_dp > 1 and mesh.attn_cp > 1 and spec.policy not in few:
            continue
        for kind in batch_kinds(spec):
            for shape in SHAPES:
                yield Case(spec, kind, shape)


@dataclasses.dataclass
class Walked:
    """What one rank has after the final norm."""

    rank: ToyRank
    out: torch.Tensor


def run(case: Case, names: Sequence[str], *, partial: bool | None = None, **facts: Any) -> Any:
    """Every rank's result, which has been compared with the reference."""
    if partial is None:
        partial = enters_partial(case.spec, case.kind)

    def on_rank(rank: ToyRank) -> Walked:
        return Walked(rank, rank.finish(rank.run(rank.start(partial=partial))))

    wanted = reference(names, case.step)
    assert wanted.result is not None
    walked = on_ranks(case.spec, names, case.step, on_rank, **facts)
    for each in walked:
        own = wanted.rows(wanted.result, each.rank.seat.own)
        torch.testing.assert_close(
            each.out, own, rtol=2e-5, atol=2e-5, msg=lambda m: f"{case}: {m}"
        )
        assert each.rank.batch.residual_stream is None
    return walked


def check_records(case: Case, walked: Sequence[Walked], *, partial: bool | None = None) -> int:
    """Planned and executed collectives are the same, in order, on every rank of a group."""
    if partial is None:
        partial = enters_partial(case.spec, case.kind)
    for each in walked:
        assert executed(each.rank) == planned(each.rank, partial=partial), str(case)
    for name, ranks in each_group(case.spec.topology):
        sequences = [
            [(r.kind, r.rows, r.columns) for r in records if r.group is name]
            for records in (walked[rank].rank.recorder.records for rank in ranks)
        ]
        assert all(sequence == sequences[0] for sequence in sequences), f"{case}: {name}"
    return sum(len(each.rank.recorder.records) for each in walked)


def executed(rank: ToyRank) -> list[tuple[str, GroupName, int, bool]]:
    """Collectives that ran, without a sequence-parallel or latent compute's own gathers."""
    gathers = CollectiveKind.ALL_GATHER
    return [
        (record.kind.value, record.group, record.rows, record.in_compute)
        for record in rank.recorder.records
        if not (record.in_compute and record.kind is gathers)
    ]


def planned(rank: ToyRank, *, partial: bool) -> list[tuple[str, GroupName, int, bool]]:
    """Collectives of the printed plan that have rows on this rank."""
    plans = [stage.plan for stage in rank.stages]
    tokens = rank.seat.rows.tokens > 0
    found = []
    for crossing in walk(plans, rank.ground, partial_entry=partial, has_tokens=tokens):
        exits = () if crossing.leaving is None else crossing.leaving.compute + crossing.leaving.ops
        for op in (*exits, *crossing.prepare):
            if op.is_collective and (count := rows_of(op, rank)):
                assert op.group is not None
                found.append((op.kind.value, op.group, count, op.place is Place.COMPUTE))
    return found


def rows_of(op: Op, rank: ToyRank) -> int:
    """Rows of the larger side, from the step alone."""
    assert op.group is not None
    rows, size = rank.seat.rows, rank.spec.topology.size(op.group)
    if op.kind is OpKind.ALL_GATHER:
        if TokenAxis.ATTN_TP_SCATTER in op.before.sharded:
            return rows.shard * size
        return rows.slot * size
    scatters = op.kind is OpKind.REDUCE_SCATTER and TokenAxis.ATTN_TP_SCATTER in op.after.sharded
    if scatters and size == rank.spec.topology.attn_tp:
        return rows.shard * size
    return rows.total if op.before == FULL_ROWS else rows.own


@pytest.mark.parametrize("dense", ["dense_tp", "dense 1"])
@pytest.mark.parametrize("division", DIVISIONS, ids=str)
def test_two_layers_equal_one_rank(division: tuple[int, int, int], dense: str) -> None:
    # boundary G20, G21, G22, G23, G25, G26, G27, G28, G29, G30, G38
    """Every policy, padding, variant and step shape; padding is NaN."""
    mesh = topology_of(division, 1 if dense == "dense 1" else None)
    ran = communicated = 0
    seen: set[object] = set()
    for case in cases_on(mesh):
        walked = run(case, LAYERS)
        communicated += check_records(case, walked)
        seen.update(case.kind.variant for _ in walked)
        ran += 1
    assert ran >= 16
    assert (communicated > 0) is (mesh.attn_tp > 1 or mesh.dense_tp != 1)
    plain = mesh.attn_tp == mesh.tp == mesh.dense_tp
    assert (BatchVariant.SEQUENCE_PARALLEL in seen) is plain
    assert (BatchVariant.INPUT_SCATTERED in seen) is plain
    assert (BatchVariant.CONTEXT_PARALLEL in seen) is (mesh.attn_cp > 1)


@pytest.mark.parametrize("stack", [name for name in STACKS if name != "layers"])
@pytest.mark.parametrize("division", DIVISIONS, ids=str)
def test_other_stages_equal_one_rank(division: tuple[int, int, int], stack: str) -> None:
    # boundary G20, G21, G24, G42, G51, G52, G53, G62, G63
    """Mixers, tails, transforms, other updates and reads, updates at the producer."""
    names = STACKS[stack]
    for dense in {1, topology_of(division).tp}:
        mesh = topology_of(division, dense)
        if stack == "writing" and mesh.attn_cp > 1:
            continue
        for policy in (ReductionPolicy.AR, ReductionPolicy.RS_RSV):
            spec = dataclasses.replace(mesh_spec(mesh), policy=policy, cp_rows=CpRows.EQUAL)
            for kind in batch_kinds(spec):
                for shape in ("ragged", "lonely"):
                    case = Case(spec, kind, shape)
                    check_records(case, run(case, names))


def test_a_whole_embedding_enters_an_input_scattered_stack() -> None:  # boundary G28
    case = Case(mesh_spec(Topology(tp=2)), batch_kind(BatchVariant.INPUT_SCATTERED))
    walked = run(case, LAYERS, partial=False)
    check_records(case, walked, partial=False)


@pytest.mark.parametrize(
    ("policy", "kinds"),
    [
        ("ar", {"all-reduce"}),
        ("rs", {"reduce-scatter"}),
        ("rsv", {"reduce-scatter-v"}),
        ("rs+rsv", {"reduce-scatter-v"}),
    ],
)
def test_the_policy_decides_how_ffn_outputs_travel(policy: str, kinds: set[str]) -> None:
    # boundary G34, G35, G36, G37, G38
    """Four ranks with rows of their own, equal slots: the same numbers, other collectives."""
    spec = MeshSpec(topology=Topology(tp=4, attn_dp=4), policy=ReductionPolicy(policy))
    case = Case(spec, batch_kind(BatchVariant.ORDINARY, DpPadding.MAX_LEN))
    walked = run(case, LAYERS)
    for each in walked:
        found = {record.kind.value for record in each.rank.recorder.records}
        assert found - {"all-gather"} == kinds


def test_sums_of_ranks_run_in_the_stated_order() -> None:  # boundary G23, G24
    """One DP sum with the residual in it, or the attention's own sum before the gather."""
    spec = MeshSpec(topology=Topology(tp=4, attn_dp=2), policy=ReductionPolicy.AR)
    case = Case(spec, batch_kind(BatchVariant.ORDINARY, DpPadding.SUM_LEN), "even")
    full, own = 8, 4
    joined = run(case, ("attention", "ffn"))[0].rank
    assert [(kind, group.name, rows) for kind, group, rows, _ in executed(joined)] == [
        ("all-reduce", "TP", full),
        ("all-reduce", "TP", full),
    ]
    apart = run(case, ("attention", "early reading ffn"))[0].rank
    assert [(kind, group.name, rows) for kind, group, rows, _ in executed(apart)] == [
        ("all-reduce", "ATTN_TP", own),
        ("all-reduce", "TP", full),
        ("all-reduce", "TP", full),
    ]


@pytest.mark.parametrize("variant", [BatchVariant.ORDINARY, BatchVariant.INPUT_SCATTERED])
@pytest.mark.parametrize("padding", DpPadding)
def test_a_residual_may_be_wider_than_outputs(variant: BatchVariant, padding: DpPadding) -> None:
    # boundary G21, G23, G28
    """FP32 beside bfloat16: where one joins the other's sum, all ranks bring the same dtype."""
    data_parallel = variant is BatchVariant.ORDINARY
    spec = mesh_spec(Topology(tp=4, attn_dp=2) if data_parallel else Topology(tp=2))
    case = Case(spec, batch_kind(variant, padding if data_parallel else None))
    wanted = reference(LAYERS, case.step)
    assert wanted.result is not None

    def on_rank(rank: ToyRank) -> None:
        rank.dtype = torch.bfloat16
        hidden = rank.run(rank.start())
        assert rank.batch.residual_stream.residual.dtype is torch.float32
        out = rank.finish(hidden).float()
        own = wanted.rows(wanted.result, rank.seat.own)
        torch.testing.assert_close(out, own, rtol=0.03, atol=0.03)

    on_ranks(spec, LAYERS, case.step, on_rank)


def test_quantised_sums_run_in_prefill_only() -> None:  # boundary G32
    spec = MeshSpec(topology=Topology(tp=2), quantised_all_reduce=True)
    case = Case(spec, batch_kind(BatchVariant.ORDINARY))
    wanted = reference(LAYERS, case.step)
    assert wanted.result is not None

    def on_rank(rank: ToyRank) -> Walked:
        return Walked(rank, rank.finish(rank.run(rank.start())))

    decode = run(case, LAYERS, prefill=False)
    kinds = [kind for kind, _, _, _ in executed(decode[0].rank)]
    assert kinds == ["all-reduce"] * 4
    prefill = on_ranks(spec, LAYERS, case.step, on_rank, prefill=True)
    kinds = [kind for kind, _, _, _ in executed(prefill[0].rank)]
    assert kinds == ["all-gather"] * 3 + ["all-reduce"], "the terminal sum is compute's own"
    for each in prefill:
        error = (each.out - wanted.rows(wanted.result, each.rank.seat.own)).abs().max()
        assert 0 < error < 0.1


def test_a_step_of_two_dp_ranks_by_hand() -> None:  # boundary G25
    """Rows, order and padding of one attention to FFN boundary, written out."""
    spec = MeshSpec(topology=Topology(tp=2, attn_dp=2))
    for padding, wanted in (
        (DpPadding.MAX_LEN, [[1.0], [2.0], [3.0], [0.0]]),
        (DpPadding.SUM_LEN, [[1.0], [2.0], [3.0]]),
    ):
        step = StepRows(BatchVariant.ORDINARY, ((2,), (1,)), padding)

        def on_rank(rank: ToyRank, wanted: Any = wanted) -> None:
            first = rank.spec.topology.rank == 0
            values = torch.tensor([[1.0], [2.0]] if first else [[3.0]]).expand(-1, HIDDEN)
            attn, ffn = rank.stages
            ones = Plain()
            attn._norm = ffn._norm = ones
            rank.start()
            attn.prepare(values * 0.25, rank.batch)
            h = attn.finish(values * 0.75, rank.batch)
            x = ffn.prepare(h, rank.batch)
            assert x[:, :1].tolist() == wanted
            with ffn.exit(rank.batch) as output:
                assert output.skips_reduction
                y = x * (0.5 if first else 1.5)
                y[3:] = float("nan")
            out = rank.finish_with(output.finish(y), ones)
            assert torch.equal(out, values * 3), "the residual, and both parts of the output"

        on_ranks(spec, ("attention", "ffn"), step, on_rank)


class Plain:
    """A norm that leaves its input as it is."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def add_norm(self, output: torch.Tensor, residual: torch.Tensor) -> Any:
        return output + residual, output + residual
