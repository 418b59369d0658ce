"""Bind a stage's planned paths to this rank's groups and to its own norm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from layline.boundary.contracts import StageDeclaration
from layline.boundary.exit import BoundExit, bind_arriving, bind_exit
from layline.boundary.layout import Layout
from layline.boundary.mesh import Mesh
from layline.boundary.planning.moves import Ground
from layline.boundary.planning.stage import StagePath, StagePlan, plan_stage
from layline.boundary.prepare import BoundPrepare, bind_prepare
from layline.boundary.rows import BatchKind


@dataclass(frozen=True, slots=True)
class BoundPath:
    """One kind of batch: what its prepare and its exit run.

    ``arriving`` is the producer's exit, for an output that comes from another pipeline stage.
    """

    prepare: BoundPrepare
    others: Mapping[Layout, BoundPrepare]
    with_tokens: BoundExit
    without_tokens: BoundExit
    arriving: BoundExit | None

    def prepare_from(self, rows: Layout | None) -> BoundPrepare:
        """The prepare for a residual that is on ``rows``; None is where it is declared to be."""
        planned = self.prepare
        if rows is None or rows is planned.source or rows == planned.source:
            return planned
        return self.others[rows]


@dataclass(frozen=True)
class BoundStage:
    """A stage's plan and its functions. It holds no tensor and no norm."""

    plan: StagePlan
    paths: Mapping[BatchKind, BoundPath]


def build_stage(
    declaration: StageDeclaration,
    following: StageDeclaration | None,
    mesh: Mesh,
    *,
    untouched: bool = False,
) -> BoundStage:
    """Plan and bind one stage; stages of equal declarations on one mesh share the result.

    Raises DeclarationError where an edge has no correct transition on this mesh.
    """
    key = (declaration, following, untouched)
    known = mesh.plans.get(key)
    if known is None:
        plan = plan_stage(declaration, following, mesh.spec)
        paths = {
            kind: _bind_path(path, plan, Ground(mesh.spec, kind), mesh, untouched=untouched)
            for kind, path in plan.paths.items()
        }
        known = mesh.plans[key] = BoundStage(plan, paths)
    assert isinstance(known, BoundStage)
    return known


def _bind_path(
    path: StagePath, plan: StagePlan, ground: Ground, mesh: Mesh, *, untouched: bool
) -> BoundPath:
    declaration = plan.declaration
    previous = declaration.previous
    prepares = {
        rows: bind_prepare(
            prepare,
            ground,
            mesh,
            None if previous is None else previous.update,
            follows=previous is not None,
            untouched=untouched,
        )
        for rows, prepare in path.prepares.items()
    }
    transform = None if declaration.transform is None else declaration.transform.apply
    return BoundPath(
        prepare=prepares[path.source],
        others=prepares,
        with_tokens=bind_exit(path.exit.with_tokens, mesh, transform),
        without_tokens=bind_exit(path.exit.without_tokens, mesh, transform),
        arriving=None if path.leaving is None else bind_arriving(path.leaving, mesh),
    )
