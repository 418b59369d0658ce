"""Which stacks, meshes and steps the planner's paths are simulated on. No torch here."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from layline.boundary.layout import BatchVariant
from layline.boundary.mesh import CpRows, MeshSpec
from layline.boundary.planning.moves import batch_kinds
from layline.boundary.planning.simulate import Simulation, SimulationResult
from layline.boundary.planning.stage import StagePlan, plan_stage
from layline.boundary.planning.walk import enters_partial
from layline.boundary.policy import ReductionPolicy
from layline.boundary.rows import BatchKind, DpPadding, StepRows
from layline.topology import Topology
from support.stacks import STAGES, every_edge, link

# Rows of a DP rank, or of a (DP, CP) pair, by its index and how many there are.
SHAPES: dict[str, Callable[[int, int], int]] = {
    "ragged": lambda slot, slots: (3, 0, 2, 5)[slot % 4],
    "even": lambda slot, slots: 4,
    "lonely": lambda slot, slots: 1 if slot == slots - 1 else 0,
    "empty": lambda slot, slots: 0,
}


@dataclass(frozen=True)
class Case:
    """A mesh, a kind of batch it allows, and the rows of a step."""

    spec: MeshSpec
    kind: BatchKind
    shape: str = "ragged"

    def __str__(self) -> str:
        mesh = self.spec.topology
        return (
            f"{mesh.attn_dp}x{mesh.attn_cp}x{mesh.attn_tp} dense_tp {mesh.dense_tp}, "
            f"{self.spec.policy.value}, {self.spec.cp_rows.value}, {self.kind}, {self.shape}"
        )

    @property
    def step(self) -> StepRows:
        """The rows of every rank."""
        mesh, rows = self.spec.topology, SHAPES[self.shape]
        dps, cps = range(mesh.attn_dp), range(mesh.attn_cp)
        if self.kind.variant is BatchVariant.CONTEXT_PARALLEL:
            slots = len(dps) * len(cps)
            counts = tuple(tuple(rows(dp * len(cps) + cp, slots) for cp in cps) for dp in dps)
        else:
            counts = tuple((rows(dp, len(dps)),) * len(cps) for dp in dps)
        return StepRows(self.kind.variant, counts, self.kind.padding or DpPadding.MAX_LEN)


def meshes(ranks: Iterable[int]) -> Iterator[MeshSpec]:
    """Every division of that many ranks, with both dense FFNs and all variants they allow."""
    for tp in ranks:
        for dp, cp in itertools.product(range(1, tp + 1), repeat=2):
            if tp % (dp * cp):
                continue
            for dense in sorted({1, tp}):
                mesh = Topology(tp=tp, attn_dp=dp, attn_cp=cp, dense_tp=dense)
                yield mesh_spec(mesh)


def mesh_spec(mesh: Topology) -> MeshSpec:
    """A mesh with all batch variants that it allows."""
    plain = mesh.tp > 1 and mesh.attn_tp == mesh.tp == mesh.dense_tp
    return MeshSpec(topology=mesh, sequence_parallel=plain, input_scattered=plain)


def with_policies(spec: MeshSpec) -> Iterator[MeshSpec]:
    """The mesh with each policy and each way to divide a prompt."""
    rows = CpRows if spec.topology.attn_cp > 1 else (CpRows.CHUNKS,)
    for policy, cp_rows in itertools.product(ReductionPolicy, rows):
        yield MeshSpec(
            topology=spec.topology,
            policy=policy,
            cp_rows=cp_rows,
            sequence_parallel=spec.sequence_parallel,
            input_scattered=spec.input_scattered,
        )


def allowed(spec: MeshSpec) -> tuple[str, ...]:
    """The stages that the mesh has paths for: no update at the producer under attention CP."""
    parallel = spec.topology.attn_cp > 1
    return tuple(name for name in STAGES if not (parallel and name.startswith("writing")))


@functools.cache
def stacks_of(names: tuple[str, ...], length: int = 6) -> tuple[tuple[str, ...], ...]:
    """Short stacks of these stages in which every ordered pair of them meets."""
    return tuple(every_edge(names, length))


class Planner:
    """Plans of one mesh's stages, each made once."""

    def __init__(self, spec: MeshSpec) -> None:
        self.spec = spec
        self._known: dict[tuple[str | None, str, str | None], StagePlan] = {}

    def stack(self, names: Sequence[str]) -> list[StagePlan]:
        """A plan for each of a whole stack's stages."""
        before = (None, *names)
        return [self.stage(*near) for near in zip(before, names, (*names[1:], None), strict=False)]

    def stage(self, before: str | None, name: str, after: str | None) -> StagePlan:
        """The plan of a stage between two others; None are the stack's ends."""
        if (before, name, after) not in self._known:
            linked = link([name] if before is None else [before, name], terminal=after is None)
            following = None if after is None else STAGES[after]
            self._known[before, name, after] = plan_stage(linked[-1], following, self.spec)
        return self._known[before, name, after]


def distinct_cases(ranks: Iterable[int]) -> Iterator[tuple[Case, Planner]]:
    """Every mesh of ``ranks`` with every policy and kind of batch, equal plans only once.

    The policy and the division of prompts reach the plans through FFN exits alone, so those are
    compared; that nothing else depends on them has a test of its own.
    """
    for mesh in meshes(ranks):
        seen: set[object] = set()
        for spec in with_policies(mesh):
            planner = Planner(spec)
            for kind in batch_kinds(spec):
                exits = tuple(exit_facts(planner, kind))
                if (kind, exits) not in seen:
                    seen.add((kind, exits))
                    yield Case(spec, kind), planner


def exit_facts(planner: Planner, kind: BatchKind) -> Iterator[object]:
    """What an FFN's exits are, inside a stack and at its end."""
    for name in allowed(planner.spec):
        if STAGES[name].kind.value == "ffn":
            for after in ("attention", None):
                yield planner.stage("attention", name, after).path(kind).exit


def run(
    case: Case, planner: Planner, names: Sequence[str], *, partial: bool | None = None
) -> SimulationResult:
    """Simulate one stack; ``partial`` is whether the embedding leaves its sum, by default as it
    does."""
    if partial is None:
        partial = enters_partial(case.spec, case.kind)
    return Simulation(case.spec, case.step).run(planner.stack(names), partial_entry=partial)


def check_every_edge(case: Case, planner: Planner) -> int:
    """Simulate every edge of every stage that the mesh allows; how many rows were checked."""
    mesh = case.spec.topology
    checked = collectives = 0
    for names in stacks_of(allowed(case.spec)):
        result = run(case, planner, names)
        assert result.stages == len(names)
        checked += result.checked_rows
        collectives += len(result.collectives)
    assert (checked > 0) is (case.shape != "empty"), f"{case}: nothing was checked"
    communicates = mesh.attn_tp > 1 or mesh.dense_tp != 1
    assert (collectives > 0) is communicates, f"{case}: {collectives} collectives"
    return checked


def sampled_cases(ranks: Iterable[int]) -> list[Case]:
    """Few cases in which every two values of any two facts meet that meet at all (greedy)."""
    pool = [
        Case(spec, kind, shape)
        for mesh in meshes(ranks)
        for spec in with_policies(mesh)
        for kind in batch_kinds(spec)
        for shape in SHAPES
    ]
    pairs = {case: frozenset(itertools.combinations(_facts(case), 2)) for case in pool}
    left = set().union(*pairs.values())
    chosen: list[Case] = []
    # One pass takes what brings much, the next ones what brings less: near greedy, and quick.
    for least in (12, 6, 3, 1):
        for case in pool:
            if len(pairs[case] & left) >= least:
                left -= pairs[case]
                chosen.append(case)
    assert not left
    return chosen


def _facts(case: Case) -> tuple[tuple[str, object], ...]:
    mesh = case.spec.topology
    return (
        ("attn_dp", mesh.attn_dp),
        ("attn_cp", mesh.attn_cp),
        ("attn_tp", mesh.attn_tp),
        ("dense is divided", mesh.dense_tp != 1),
        ("policy", case.spec.policy),
        ("cp_rows", case.spec.cp_rows),
        ("variant", case.kind.variant),
        ("padding", case.kind.padding),
        ("shape", case.shape),
    )
