"""Planned lines, what they cost, why they are as they are, and the comparison with a run."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from layline.boundary import quantised
from layline.boundary.factories import declare_attn, declare_ffn, link_stages
from layline.boundary.layout import FULL_ROWS, BatchVariant, TokenAxis
from layline.boundary.mesh import MeshSpec
from layline.boundary.planning import cost, simulate, simulated_rows, simulated_steps
from layline.boundary.planning.compare import Comparison
from layline.boundary.planning.cost import Bytes, ElementSizes, RankStep, per_token, planned
from layline.boundary.planning.moves import Ground, batch_kinds
from layline.boundary.planning.records import Op, OpKind
from layline.boundary.planning.show import ComputeCollectives, Line, counted, lines_of
from layline.boundary.planning.simulate import Simulation
from layline.boundary.planning.simulated_rows import SimulationError
from layline.boundary.planning.trials import shortened, simulate_layers, trial_steps
from layline.boundary.planning.walk import enters_partial, plan_layers
from layline.boundary.policy import ReductionPolicy
from layline.boundary.rows import BatchKind, DpPadding, StepRows, kind_of
from layline.comm.groups import CollectiveKind, CollectiveRecord, wire_bytes
from layline.topology import GroupName, Topology

HIDDEN = 64
SIZES = ElementSizes(summed=4, run=2, scores=2, cached=2)


def layers(count: int) -> list[Any]:
    return [
        link_stages(
            declare_attn(),
            declare_ffn(),
            previous=declare_ffn() if index else None,
            terminal=index == count - 1,
        )
        for index in range(count)
    ]


def lines(spec: MeshSpec, kind: BatchKind | None = None, count: int = 3) -> dict[str, Line]:
    kind = kind or batch_kinds(spec)[0]
    plans = plan_layers(layers(count), spec)
    found = lines_of(plans, Ground(spec, kind), ComputeCollectives(HIDDEN))
    return {line.name + ("" if not line.compute else " compute"): line for line in found}


def texts(line: Line) -> list[str]:
    return [step.text for step in line.steps]


def meshes(most: int) -> Iterator[MeshSpec]:
    for tp in range(1, most + 1):
        for attn_dp, attn_cp in itertools.product(range(1, tp + 1), repeat=2):
            if tp % (attn_dp * attn_cp):
                continue
            for dense_tp, policy in itertools.product({1, tp}, ReductionPolicy):
                plain = attn_dp == attn_cp == 1 < tp == dense_tp
                yield MeshSpec(
                    topology=Topology(tp=tp, attn_dp=attn_dp, attn_cp=attn_cp, dense_tp=dense_tp),
                    policy=policy,
                    sequence_parallel=plain,
                    input_scattered=plain,
                )


def test_a_deep_stack_is_planned_once() -> None:
    plans = plan_layers(layers(100), MeshSpec(topology=Topology(tp=512, attn_dp=8)))
    assert len(plans) == 200
    # Entry, its FFN, and a middle layer's and the last one's own.
    assert len({id(plan) for plan in plans}) <= 5


def test_plain_tensor_parallelism_line_by_line() -> None:
    found = lines(MeshSpec(topology=Topology(tp=4)))
    assert texts(found["embed -> attn"]) == ["enter", "norm"]
    assert texts(found["attn -> ffn"]) == ["all-reduce ATTN_TP", "add+norm"]
    assert found["attn -> ffn"].owed == "ATTN_TP"
    assert texts(found["ffn -> attn"]) == ["all-reduce TP", "add+norm"]
    assert found["ffn -> attn"].exit == ()
    assert texts(found["ffn compute"]) == ["all-reduce TP"]
    assert texts(found["ffn -> norm"]) == ["add+norm"]
    assert {line.rows for line in found.values()} == {("F", "F")}


def test_attention_dp_line_by_line() -> None:
    mesh = MeshSpec(topology=Topology(tp=4, attn_dp=2), policy=ReductionPolicy.RS)
    found = lines(mesh)
    assert found["attn -> ffn"].rows == ("A", "F")
    assert texts(found["attn -> ffn"]) == [
        "residual joins the sum",
        "reduce-scatter ATTN_TP -> L",
        "all-gather TP -> F",
        "own slot is the residual",
        "norm",
    ]
    assert texts(found["ffn -> attn"]) == ["reduce-scatter TP -> L", "all-gather ATTN_TP -> A",
                                           "add+norm"]  # fmt: skip
    # At the end of the stack the exit runs them.
    last = found["ffn -> norm"]
    assert [step.text for step in last.exit] == [
        "reduce-scatter TP -> L",
        "all-gather ATTN_TP -> A",
    ]
    assert [step.text for step in last.prepare] == ["add+norm"]


def test_residual_rows_of_a_local_ffn() -> None:
    spec = MeshSpec(topology=Topology(tp=4, dense_tp=1))
    plans = plan_layers(layers(3), spec)
    ground = Ground(spec, batch_kinds(spec)[0])
    counts = counted(lines_of(plans, ground, ComputeCollectives(HIDDEN)))
    into_ffn = {
        line.residual: times for line, times in counts.items() if line.name == "attn -> ffn"
    }
    # The first FFN slices what the embedding left whole; later ones find it sliced.
    assert into_ffn == {("F", "L"): 1, ("L", "L"): 2}


def test_bytes_follow_the_formula() -> None:
    spec = MeshSpec(topology=Topology(tp=8, attn_dp=4), policy=ReductionPolicy.AR)
    ground = Ground(spec, batch_kinds(spec)[0])
    steps = {
        step.text: per_token(step.collective, ground, SIZES)
        for line in lines(spec).values()
        for step in line.steps
        if step.collective is not None
    }
    row = HIDDEN * 4
    # A quarter of a step's tokens are a DP rank's own; two ranks share them.
    assert steps["reduce-scatter ATTN_TP -> L"] == Bytes(row / 4, row / 4 / 2)
    assert steps["all-gather TP -> F"] == Bytes(row, row * 7 / 8)
    assert steps["all-reduce TP"] == Bytes(row, 2 * row * 7 / 8)


def test_a_gathered_input_travels_in_the_type_it_was_made_in() -> None:
    # A norm alone gives the run's type, a fused add and norm that of the output it was given.
    mesh = MeshSpec(topology=Topology(tp=4), input_scattered=True)
    kind = next(k for k in batch_kinds(mesh) if k.variant is BatchVariant.INPUT_SCATTERED)
    found = lines(mesh, kind)
    for name, size in (("embed -> attn", 2), ("ffn -> attn", 4)):
        scatter, gather = found[name].collectives
        assert SIZES.of(scatter.element) == 4, "the sum"
        assert SIZES.of(gather.element) == size, name


def test_planned_rows_are_those_that_simulated_ranks_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every mesh to 6 ranks, every kind of batch and policy, ragged and idle steps."""
    moved: list[tuple[int, int]] = []
    run = simulated_rows.run_collective

    def watched(op: Op, members: Any, inputs: Any) -> Any:
        results = run(op, members, inputs)
        if op.kind is OpKind.ALL_GATHER:
            rows = sum(map(len, inputs))
        elif TokenAxis.ATTN_TP_SCATTER in op.after.sharded:
            # Padded on the way in, so that it divides.
            rows = sum(map(len, results))
        else:
            rows = len(inputs[0])
        for member in members:
            step = RankStep(member.topology, member.rows, 0, 0)
            one = planned(op, member.topology, HIDDEN, cost.Element.SUMMED)
            moved.append((rows, step.num_rows(one)))
        return results

    monkeypatch.setattr(simulate, "run_collective", watched)
    for spec in meshes(6):
        plans = plan_layers(layers(3), spec)
        for kind in batch_kinds(spec):
            for step in trial_steps(spec, kind):
                Simulation(spec, step).run(plans, partial_entry=enters_partial(spec, kind))
    assert len(moved) > 10_000
    assert all(ran == wanted for ran, wanted in moved)


def test_steps_of_one_kind_are_that_kind() -> None:
    for spec in meshes(8):
        for kind in batch_kinds(spec):
            for step in trial_steps(spec, kind):
                assert kind_of(step, spec.topology) is kind


def test_a_shortened_stack_keeps_every_boundary() -> None:
    whole = layers(20)
    short = shortened(whole)
    assert len(short) == 4
    for spec in meshes(4):
        for kind in batch_kinds(spec):
            ground = Ground(spec, kind)
            seen = [
                set(lines_of(plan_layers(stack, spec), ground, ComputeCollectives(HIDDEN)))
                for stack in (whole, short)
            ]
            assert seen[0] == seen[1]


def lost_residual(state: Any, op: Op, memo: Any) -> None:
    return


def test_a_lost_residual_turns_the_simulation_red(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = MeshSpec(topology=Topology(tp=4, attn_dp=2))
    assert simulate_layers(layers(3), spec).rows > 0
    monkeypatch.setitem(simulated_steps.LOCAL_STEPS, OpKind.JOIN, lost_residual)
    with pytest.raises(SimulationError, match="missing"):
        simulate_layers(layers(3), spec)


def ways_of(spec: MeshSpec) -> dict[str, int]:
    """How often each way into a stage was taken, over all kinds of batch."""
    found: dict[str, int] = {}
    plans = plan_layers(layers(3), spec)
    for kind in batch_kinds(spec):
        for step in trial_steps(spec, kind):
            partial = enters_partial(spec, kind)
            result = Simulation(spec, step).run(plans, partial_entry=partial, all_ways=True)
            for _, name in result.ways:
                found[name.partition(" on ")[0]] = found.get(name.partition(" on ")[0], 0) + 1
    return found


def test_every_way_into_a_stage_is_taken() -> None:
    spec = MeshSpec(topology=Topology(tp=4), sequence_parallel=True, input_scattered=True)
    names = {"as planned", "completed at the entry", "completed early", "written", "residual"}
    assert ways_of(spec).keys() == names | {"captured"}
    for each in meshes(6):
        assert ways_of(each)["as planned"] > 0


@pytest.mark.parametrize("name", ["completed at the entry", "completed early", "written"])
def test_a_fault_in_a_detour_turns_the_simulation_red(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    real = simulate.detours

    def damaged(*given: Any) -> Iterator[Any]:
        for detour in real(*given):
            # The sum that completes, or the update.
            cut = detour.first[:-1] if detour.name == name else detour.first
            yield dataclasses.replace(detour, first=cut)

    spec = MeshSpec(topology=Topology(tp=4), input_scattered=True)
    assert simulate_layers(layers(3), spec).rows > 0
    monkeypatch.setattr(simulate, "detours", damaged)
    with pytest.raises(SimulationError, match=name):
        simulate_layers(layers(3), spec)


@pytest.mark.parametrize("where", ["residual on", "captured on"])
def test_a_move_that_is_left_out_turns_the_simulation_red(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    real, moves = simulate.detours, simulate.capture_moves

    def unmoved(*given: Any) -> Iterator[Any]:
        for detour in real(*given):
            lost = detour.name.startswith(where)
            yield dataclasses.replace(detour, first=()) if lost else detour

    spec = MeshSpec(topology=Topology(tp=4), sequence_parallel=True)
    assert simulate_layers(layers(3), spec).rows > 0
    if where == "captured on":
        monkeypatch.setattr(
            simulate, "capture_moves", lambda *given: (((), rows) for _, rows in moves(*given))
        )
    monkeypatch.setattr(simulate, "detours", unmoved)
    with pytest.raises(SimulationError, match=where):
        simulate_layers(layers(3), spec)


def test_shapes_of_steps_are_those_that_ran() -> None:
    alone = simulate_layers(layers(3), MeshSpec(topology=Topology(tp=2)))
    assert alone.shapes == {"one row": 1, "several rows": 1, "empty": 1}
    divided = simulate_layers(layers(3), MeshSpec(topology=Topology(tp=2, attn_dp=2)))
    assert divided.shapes == {"even": 2, "ragged": 2, "idle but one": 2, "empty": 2}


@pytest.mark.parametrize(
    ("topology", "policy", "line", "words"),
    [
        ({"tp": 4, "attn_dp": 2}, ReductionPolicy.AR, "ffn -> attn", "policy ar permits no"),
        ({"tp": 4, "attn_dp": 2}, ReductionPolicy.RS, "ffn -> attn", "slots are equal"),
        ({"tp": 2, "attn_dp": 2}, ReductionPolicy.RSV, "ffn -> attn", "variable reduce-scatter"),
        ({"tp": 2, "attn_dp": 2}, ReductionPolicy.RSV, "attn -> ffn", "before the gather"),
        ({"tp": 4, "attn_dp": 2}, ReductionPolicy.RSV, "ffn -> attn", "TP 2 ranks share a slot"),
        ({"tp": 4, "attn_dp": 2}, ReductionPolicy.RS, "attn -> ffn", "rank 0 adds the residual"),
        ({"tp": 4, "attn_cp": 2, "attn_dp": 2}, ReductionPolicy.RS, "ffn -> attn", "CP 2 ranks"),
        ({"tp": 4}, ReductionPolicy.RS_RSV, "ffn -> attn", "every rank needs every row"),
        ({"tp": 4, "dense_tp": 1}, ReductionPolicy.RS, "attn -> ffn", "whole rows of its own"),
    ],
)
def test_the_reason_names_what_decided(
    topology: dict[str, int], policy: ReductionPolicy, line: str, words: str
) -> None:
    assert words in lines(MeshSpec(topology=Topology(**topology), policy=policy))[line].reason


def test_packed_slots_are_why_no_fixed_scatter() -> None:
    spec = MeshSpec(topology=Topology(tp=4, attn_dp=2), policy=ReductionPolicy.RS)
    packed = next(kind for kind in batch_kinds(spec) if kind.padding is DpPadding.SUM_LEN)
    assert "packed slots are unequal" in lines(spec, packed)["ffn -> attn"].reason


def test_every_boundary_has_a_reason() -> None:
    for spec in meshes(8):
        for kind in batch_kinds(spec):
            for line in lines(spec, kind).values():
                assert line.compute or line.reason


def test_the_scale_of_a_quantised_row_is_that_of_the_execution() -> None:
    assert cost.SCALE_BYTES == quantised.SCALE_BYTES


def test_a_quantised_sum_is_a_gather_in_prefill_only() -> None:
    topology = Topology(tp=2)
    op = Op(OpKind.ALL_REDUCE, cost.Place.PREPARE, group=GroupName.TP, quantised=True)
    one = planned(op, topology, HIDDEN, cost.Element.SUMMED)
    rows = StepRows(BatchVariant.ORDINARY, ((3,),))
    (decode,) = cost.step_records([one], RankStep.of(rows, topology, 1), SIZES)
    assert (decode.kind, decode.payload_bytes) == (CollectiveKind.ALL_REDUCE, 3 * HIDDEN * 4)
    numbers = RankStep.of(rows, topology, 1, prefill=True)
    (prefill,) = cost.step_records([one], numbers, SIZES)
    assert prefill.kind is CollectiveKind.ALL_GATHER
    assert prefill.payload_bytes == 2 * 3 * (HIDDEN + 4)


def test_bytes_of_a_quantised_sum_are_those_of_its_gather_in_prefill() -> None:
    spec = MeshSpec(topology=Topology(tp=2), quantised_all_reduce=True)
    ground = Ground(spec, batch_kinds(spec)[0])
    (one,) = lines(spec)["ffn -> attn"].collectives
    assert one.quantised
    row = HIDDEN * 4
    assert per_token(one, ground, SIZES) == Bytes(row, row)
    assert per_token(one, ground, SIZES, prefill=True) == Bytes(2 * (HIDDEN + 4), HIDDEN + 4)


def test_a_step_without_rows_has_no_collective() -> None:
    spec = MeshSpec(topology=Topology(tp=4, attn_dp=2))
    found = [one for line in lines(spec).values() for one in line.collectives]
    empty = StepRows(BatchVariant.ORDINARY, ((0,), (0,)))
    assert cost.step_records(found, RankStep.of(empty, spec.topology, 0), SIZES) == []
    idle = StepRows(BatchVariant.ORDINARY, ((0,), (1,)))
    assert cost.step_records(found, RankStep.of(idle, spec.topology, 0), SIZES) != []


def test_full_rows_are_one_name_for_one_rank() -> None:
    found = lines(MeshSpec())
    assert {line.rows for line in found.values()} == {("F", "F")}
    assert not any(line.collectives for line in found.values())
    assert Ground(MeshSpec(), batch_kinds(MeshSpec())[0]).attention == FULL_ROWS


# The comparison with a run.

SUM = CollectiveRecord(CollectiveKind.ALL_REDUCE, GroupName.TP, 3, HIDDEN, 768, False, 0.5)
GATHER = CollectiveRecord(CollectiveKind.ALL_GATHER, GroupName.ATTN_TP, 6, HIDDEN, 1536, True, 0.25)


def untimed(record: CollectiveRecord) -> CollectiveRecord:
    return dataclasses.replace(record, seconds=None)


def compared(wanted: Sequence[CollectiveRecord], found: Sequence[CollectiveRecord]) -> Comparison:
    comparison = Comparison()
    comparison.add("step 0, rank 1", [untimed(one) for one in wanted], found)
    return comparison


def test_equal_records_agree_and_add_up() -> None:
    comparison = compared([SUM, GATHER, SUM], [SUM, GATHER, SUM])
    assert comparison.agrees
    totals = dict(comparison.totals())
    # Boundaries come first.
    assert [key[0] for key in totals] == [False, True]
    pair = totals[False, GroupName.TP, CollectiveKind.ALL_REDUCE]
    assert (pair.planned.count, pair.executed.count) == (2, 2)
    assert (pair.planned.payload_bytes, pair.executed.payload_bytes) == (1536, 1536)
    assert (pair.planned.seconds, pair.executed.seconds) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda ran: ran[:-1], "collective 2 of 3: planned all-reduce TP .* ran nothing"),
        (lambda ran: ran[1:], "collective 0 of 3"),
        (lambda ran: [*ran, SUM], "collective 3 of 3: planned nothing, ran all-reduce TP"),
        (lambda ran: [ran[1], ran[0], ran[2]], "collective 0 of 3"),
        *[
            (lambda ran, new=new: [ran[0], dataclasses.replace(ran[1], **new), ran[2]], words)
            for new, words in (
                ({"rows": 8}, "ran all-gather ATTN_TP of 8 x 64"),
                ({"columns": 32}, "of 6 x 32"),
                ({"payload_bytes": 3072}, "3072 bytes"),
                ({"group": GroupName.TP}, "ran all-gather TP"),
                ({"kind": CollectiveKind.REDUCE_SCATTER}, "ran reduce-scatter ATTN_TP"),
                ({"in_compute": False}, "at a boundary$"),
            )
        ],
    ],
)
def test_every_deviation_turns_the_comparison_red(
    change: Callable[[list[CollectiveRecord]], list[CollectiveRecord]], words: str
) -> None:
    comparison = compared([SUM, GATHER, SUM], change([SUM, GATHER, SUM]))
    assert not comparison.agrees
    (difference,) = comparison.differences
    assert difference.startswith("step 0, rank 1, collective")
    assert re.search(words, difference), difference


def test_wire_bytes_are_the_one_formula() -> None:
    spec = MeshSpec(topology=Topology(tp=6, attn_dp=2, attn_cp=1))
    ground = Ground(spec, batch_kinds(spec)[0])
    checked = 0
    for line in lines(spec).values():
        for one in line.collectives:
            cost_ = per_token(one, ground, SIZES)
            ranks = spec.topology.size(one.group)
            assert cost_.wire == pytest.approx(
                wire_bytes(one.kind, int(cost_.payload * 6), ranks) / 6
            )
            checked += 1
    assert checked > 3
