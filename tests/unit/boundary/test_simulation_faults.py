"""Planted faults: the simulation of a planned path sees each of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from layline.boundary.contracts import StageKind
from layline.boundary.layout import BatchVariant, TokenAxis
from layline.boundary.mesh import CpRows, MeshSpec
from layline.boundary.planning import simulate
from layline.boundary.planning.records import Op, OpKind
from layline.boundary.planning.simulate import Simulation
from layline.boundary.planning.simulated_rows import POISON, RankState, Row, SimulationError
from layline.boundary.planning.walk import enters_partial
from layline.boundary.policy import ReductionPolicy
from layline.boundary.rows import DpPadding, batch_kind
from layline.topology import Topology
from support.simulated_cases import (
    Case,
    Planner,
    mesh_spec,
)
from support.stacks import STAGES

# Faults. Each is planted at one place and must be seen in every case where it changes anything.

FAULT_CASES = [
    Case(mesh_spec(Topology(tp=4, attn_dp=2)), batch_kind(BatchVariant.ORDINARY, padding))
    for padding in DpPadding
]
FAULT_CASES += [
    Case(MeshSpec(topology=Topology(tp=4, attn_dp=2), policy=ReductionPolicy.AR), kind)
    for kind in [batch_kind(BatchVariant.ORDINARY, DpPadding.SUM_LEN)]
]
FAULT_CASES += [
    Case(
        mesh_spec(Topology(tp=4, attn_dp=2, dense_tp=1)),
        batch_kind(BatchVariant.ORDINARY, DpPadding.MAX_LEN),
    ),
    Case(
        MeshSpec(topology=Topology(tp=4, attn_dp=4)),
        batch_kind(BatchVariant.ORDINARY, DpPadding.SUM_LEN),
    ),
    Case(
        MeshSpec(topology=Topology(tp=8, attn_dp=2, attn_cp=2)),
        batch_kind(BatchVariant.CONTEXT_PARALLEL, DpPadding.SUM_LEN),
    ),
    Case(MeshSpec(topology=Topology(tp=4, attn_cp=2)), batch_kind(BatchVariant.CONTEXT_PARALLEL)),
    Case(
        MeshSpec(topology=Topology(tp=2, attn_cp=2), cp_rows=CpRows.EQUAL),
        batch_kind(BatchVariant.CONTEXT_PARALLEL),
    ),
    Case(mesh_spec(Topology(tp=3)), batch_kind(BatchVariant.ORDINARY)),
    Case(mesh_spec(Topology(tp=3)), batch_kind(BatchVariant.INPUT_SCATTERED)),
    Case(mesh_spec(Topology(tp=3)), batch_kind(BatchVariant.SEQUENCE_PARALLEL)),
]
FAULT_STACK = ("attention", "ffn", "attention", "early reading ffn", "mixer", "transform ffn")
ODD_STACK = ("weighted attention", "linear transform ffn", "attention", "weighted ffn", "mixer")


class Damaged(Simulation):
    """A simulation in which ``change`` may replace an operation, and counts that it did."""

    def __init__(self, case: Case, change: Callable[[Damaged, Op], bool]) -> None:
        super().__init__(case.spec, case.step)
        self.damaged = 0
        self.turn = 0
        self._change = change

    def apply(self, op: Op) -> None:
        if self._change(self, op):
            self.damaged += 1
        else:
            super().apply(op)
        self.turn += 1


def seen(case: Case, names: Sequence[str], change: Callable[[Damaged, Op], bool]) -> bool | None:
    """Whether the simulation fails under ``change``; None where that never applied."""
    simulation = Damaged(case, change)
    plans = Planner(case.spec).stack(names)
    try:
        simulation.run(plans, partial_entry=enters_partial(case.spec, case.kind))
    except (SimulationError, AssertionError):
        return True
    return False if simulation.damaged else None


def must_be_seen(change: Callable[[Damaged, Op], bool], least: int) -> None:
    verdicts = {
        (str(case), names): seen(case, names, change)
        for case in FAULT_CASES
        for names in (FAULT_STACK, ODD_STACK)
    }
    missed = [where for where, verdict in verdicts.items() if verdict is False]
    assert not missed, f"not seen in {missed}"
    assert sum(verdict is True for verdict in verdicts.values()) >= least


def test_a_doubled_sum_is_seen() -> None:  # boundary G22
    def change(simulation: Damaged, op: Op) -> bool:
        if op.kind is not OpKind.ALL_REDUCE:
            return False
        Simulation.apply(simulation, op)
        Simulation.apply(simulation, op)
        return True

    must_be_seen(change, least=14)


def test_a_dropped_residual_is_seen() -> None:
    def change(simulation: Damaged, op: Op) -> bool:
        if op.kind is not OpKind.UPDATE_AND_READ:
            return False
        for state in simulation.states:
            state.residual = [{}] * len(state.value)
        Simulation.apply(simulation, op)
        return True

    must_be_seen(change, least=16)


@pytest.mark.parametrize("times", [0, 2])
def test_a_residual_that_joins_a_sum_twice_or_never_is_seen(times: int) -> None:  # boundary G23
    def change(simulation: Damaged, op: Op) -> bool:
        if op.kind not in (OpKind.JOIN, OpKind.JOIN_SLICE):
            return False
        for _ in range(times):
            Simulation.apply(simulation, op)
        return True

    must_be_seen(change, least=6)


def test_a_slot_that_is_not_zeroed_is_seen() -> None:  # boundary G25
    """A buffer that still holds what another step left there."""

    def change(simulation: Damaged, op: Op) -> bool:
        if op.kind not in (OpKind.PLACE, OpKind.PAD):
            return False
        Simulation.apply(simulation, op)
        for state in simulation.states:
            rows: list[Row] = getattr(state, op.operand.value)
            stale = [row or {POISON: 1} for row in rows]
            setattr(state, op.operand.value, stale)
        return True

    must_be_seen(change, least=6)


@pytest.mark.parametrize("scattered", [True, False])
def test_a_wrong_slice_is_seen(scattered: bool) -> None:
    def change(simulation: Damaged, op: Op) -> bool:
        inner = TokenAxis.ATTN_TP_SCATTER in op.after.sharded
        if op.kind is not OpKind.SLICE or inner is not scattered:
            return False
        name = op.operand.value
        if all(len(getattr(state, name)) < 2 for state in simulation.states):
            return False
        for state in simulation.states:
            rows = getattr(state, name)
            setattr(state, name, rows[1:] + rows[:1])
        Simulation.apply(simulation, op)
        return True

    must_be_seen(change, least=5)


def test_a_dropped_transform_is_seen() -> None:  # boundary G52
    must_be_seen(lambda simulation, op: op.kind is OpKind.TRANSFORM, least=18)


def test_a_swapped_gather_order_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    swapped = 0
    real = simulate.run_collective

    def backwards(op: Op, members: Sequence[RankState], inputs: Sequence[Any]) -> Any:
        nonlocal swapped
        if op.kind is not OpKind.ALL_GATHER:
            return real(op, members, inputs)
        swapped += 1
        return real(op, members, inputs[::-1])

    monkeypatch.setattr(simulate, "run_collective", backwards)
    verdicts = []
    for case in FAULT_CASES:
        swapped = 0
        verdict = seen(case, FAULT_STACK, lambda simulation, op: False)
        assert verdict is (True if swapped else None), str(case)
        verdicts.append(verdict)
    assert verdicts.count(True) >= 5


def test_a_scatter_in_another_order_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    scatters = (OpKind.REDUCE_SCATTER, OpKind.REDUCE_SCATTER_V)
    swapped = 0
    real = simulate.run_collective

    def backwards(op: Op, members: Sequence[RankState], inputs: Sequence[Any]) -> Any:
        nonlocal swapped
        shares = real(op, members, inputs)
        if op.kind not in scatters or len({str(share) for share in shares}) == 1:
            return shares
        swapped += 1
        return shares[::-1]

    monkeypatch.setattr(simulate, "run_collective", backwards)
    verdicts = []
    for case in FAULT_CASES:
        swapped = 0
        verdict = seen(case, FAULT_STACK, lambda simulation, op: False)
        assert verdict is (True if swapped else None), str(case)
        verdicts.append(verdict)
    assert verdicts.count(True) >= 6


@pytest.mark.parametrize("case", FAULT_CASES, ids=str)
def test_no_planned_operation_can_be_left_out(case: Case) -> None:
    """Each operation of a walk in turn: without it the simulation fails."""
    for names in (FAULT_STACK, ODD_STACK):
        operations: list[Op] = []

        def note(simulation: Damaged, op: Op, operations: list[Op] = operations) -> bool:
            operations.append(op)
            return False

        assert seen(case, names, note) is None
        assert len(operations) >= 2 * len(names)
        for skipped, op in enumerate(operations):

            def skip(simulation: Damaged, op: Op, skipped: int = skipped) -> bool:
                return simulation.turn == skipped

            assert seen(case, names, skip), f"{names}: operation {skipped} ({op}) does nothing"


def test_an_update_that_is_not_plain_may_join_no_sum() -> None:  # boundary G24
    """The paths of a plain update under a stage whose update is another."""
    case = FAULT_CASES[0]
    planner = Planner(case.spec)
    plans = planner.stack(("attention", "ffn", "attention", "ffn"))
    Simulation(case.spec, case.step).run(plans)
    odd = STAGES["weighted attention"]
    wrong = [
        dataclasses.replace(
            plan, declaration=dataclasses.replace(plan.declaration, update=odd.update)
        )
        if plan.declaration.kind is StageKind.ATTN
        else plan
        for plan in plans
    ]
    with pytest.raises(SimulationError):
        Simulation(case.spec, case.step).run(wrong)


def test_a_transform_may_not_run_on_a_part_of_its_sum() -> None:  # boundary G52
    """The paths of a transform that is allowed before a reduce-scatter, without that permission."""
    spec = MeshSpec(topology=Topology(tp=4, attn_dp=2), policy=ReductionPolicy.RS)
    case = Case(spec, batch_kind(BatchVariant.ORDINARY, DpPadding.MAX_LEN))
    plans = Planner(spec).stack(("attention", "linear transform ffn", "attention"))
    Simulation(case.spec, case.step).run(plans)
    transform = STAGES["transform ffn"].transform
    wrong = [
        dataclasses.replace(
            plan, declaration=dataclasses.replace(plan.declaration, transform=transform)
        )
        if plan.declaration.kind is StageKind.FFN
        else plan
        for plan in plans
    ]
    with pytest.raises(SimulationError):
        Simulation(case.spec, case.step).run(wrong)
