"""Steps to simulate a planned stack with: even, ragged and idle ranks, one token, and none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from layline.boundary.contracts import StageDeclaration
from layline.boundary.layout import BatchVariant
from layline.boundary.mesh import CpRows, MeshSpec
from layline.boundary.planning.moves import batch_kinds
from layline.boundary.planning.simulate import Simulation
from layline.boundary.planning.walk import enters_partial, plan_layers
from layline.boundary.rows import BatchKind, DpPadding, StepRows

RAGGED = (3, 0, 1, 2)
BUSY = 16
"""Attention DP ranks that have rows in a ragged step; on a larger mesh the others idle."""


@dataclass(frozen=True)
class Trial:
    """What a simulation of every kind of batch has checked.

    ``shapes`` says how often a step of each shape ran. ``ways`` counts the ways into stages that
    were taken: for each distinct stage and kind of batch the planned one, those that complete or
    write earlier or find the residual on other rows, and captures. ``rows`` counts every rank's
    compute inputs in every step.
    """

    kinds: int
    shapes: dict[str, int]
    ways: int
    rows: int

    @property
    def steps(self) -> int:
        """Steps that ran."""
        return sum(self.shapes.values())


def trial_steps(spec: MeshSpec, kind: BatchKind) -> dict[StepRows, str]:
    """Row counts that this kind of batch can have, different ones on every axis, and their shape.

    Attention DP ranks hold equally many rows in an even step, other numbers in a ragged one; idle
    ones have none. With one such rank a ragged step is one of several rows.
    """
    dp = spec.topology.attn_dp
    # Rows of an input-scattered step divide by TP.
    unit = spec.topology.tp if kind.variant is BatchVariant.INPUT_SCATTERED else 1
    every = -(-dp // BUSY)
    ragged = [RAGGED[rank // every % len(RAGGED)] if rank % every == 0 else 0 for rank in range(dp)]
    by_dp = {
        (1,) * dp: "one row" if dp == 1 else "even",
        tuple(ragged): "several rows" if dp == 1 else "ragged",
        (*(0,) * (dp - 1), 1): "one row" if dp == 1 else "idle but one",
        (0,) * dp: "empty",
    }
    padding = kind.padding or DpPadding.MAX_LEN
    return {
        StepRows(
            kind.variant,
            tuple(_over_cp(spec, kind, count * unit, rank) for rank, count in enumerate(counts)),
            padding,
        ): shape
        for counts, shape in by_dp.items()
    }


def _over_cp(spec: MeshSpec, kind: BatchKind, count: int, attn_dp: int) -> tuple[int, ...]:
    cp = spec.topology.attn_cp
    if kind.variant is not BatchVariant.CONTEXT_PARALLEL or spec.cp_rows is CpRows.EQUAL:
        return (count,) * cp
    if count == 0:
        return (0,) * cp
    return tuple(count + RAGGED[(attn_dp + rank) % len(RAGGED)] for rank in range(cp))


def shortened(layers: Sequence[Sequence[StageDeclaration]]) -> list[Sequence[StageDeclaration]]:
    """The stack with at most two of equal layers in a row: every boundary of it is still there."""
    kept: list[Sequence[StageDeclaration]] = []
    for layer in layers:
        if len(kept) < 2 or layer != kept[-1] or layer != kept[-2]:
            kept.append(layer)
    return kept


def simulate_layers(layers: Sequence[Sequence[StageDeclaration]], spec: MeshSpec) -> Trial:
    """Simulate every kind of batch that the mesh has paths for, on all ranks.

    Raises SimulationError for the first row that is not what its declaration says.
    """
    plans = plan_layers(shortened(layers), spec)
    kinds = batch_kinds(spec)
    shapes: dict[str, int] = {}
    ways: set[tuple[BatchKind, tuple[int, str]]] = set()
    rows = 0
    for kind in kinds:
        partial = enters_partial(spec, kind)
        for step, shape in trial_steps(spec, kind).items():
            result = Simulation(spec, step).run(plans, partial_entry=partial, all_ways=True)
            shapes[shape] = shapes.get(shape, 0) + 1
            ways |= {(kind, way) for way in result.ways}
            rows += result.checked_rows
    return Trial(len(kinds), shapes, len(ways), rows)
