"""What crosses a cut between pipeline stages: the tensors that ``to_pp`` gives, as data.

A written residual is one tensor; a pending contribution crosses beside its residual. A sum that the
next stage's own plan completes crosses unfinished; one that was left for a batch is finished first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from layline.boundary.layout import Layout
from layline.boundary.planning.cost import Element, rows_share
from layline.boundary.planning.exits import ExitPlan
from layline.boundary.planning.moves import Ground
from layline.boundary.planning.records import Op
from layline.boundary.planning.stage import StagePlan
from layline.boundary.planning.walk import enters_partial, walk


@dataclass(frozen=True)
class CutTensor:
    """One tensor [rows, hidden] that crosses, under the name that ``from_pp`` takes.

    ``partial`` names the ranks whose values are still to be added.
    """

    name: str
    rows: Layout
    element: Element
    partial: str | None = None

    def per_token(self, ground: Ground, hidden_size: int, itemsize: int) -> float:
        """Bytes of a rank for each token of a step whose slots are equally full."""
        return float(rows_share(self.rows, ground.topology) * hidden_size * itemsize)


@dataclass(frozen=True)
class CutPlan:
    """What one boundary hands over where a cut falls on it.

    ``before`` runs at the sender: work that would otherwise have been left to the next input.
    """

    written: bool
    tensors: tuple[CutTensor, ...]
    before: tuple[Op, ...] = ()


def plan_cuts(plans: Sequence[StagePlan], ground: Ground, indices: Sequence[int]) -> list[CutPlan]:
    """What crosses where a pipeline stage begins with the compute stage ``index`` of ``plans``."""
    crossings = list(walk(plans, ground, partial_entry=enters_partial(ground.spec, ground.kind)))
    found = []
    for index in indices:
        crossing = crossings[index]
        assert crossing.producer is not None, "a cut has a stage before it"
        assert crossing.leaving is not None
        layout = crossing.producer.path(ground.kind).decl.output.layout
        found.append(cut_of(crossing.leaving, layout, ground))
    return found


def cut_of(leaving: ExitPlan, output_rows: Layout, ground: Ground) -> CutPlan:
    """What crosses after an exit that ``leaving`` describes."""
    if leaving.writes:
        residual = CutTensor("hidden_states", leaving.rows, Element.SUMMED)
        return CutPlan(written=True, tensors=(residual,))
    partial = None if leaving.declared is None else leaving.declared.name
    rows = leaving.rows if leaving.declared is None else output_rows
    # On one rank nothing widens an output for a sum.
    element = Element.SUMMED if ground.topology.tp > 1 else Element.RUN
    tensors = (
        CutTensor("hidden_states", rows, element, partial),
        CutTensor("residual", leaving.rows, Element.SUMMED),
    )
    return CutPlan(written=False, tensors=tensors, before=(*leaving.owed, *leaving.residual_moves))
