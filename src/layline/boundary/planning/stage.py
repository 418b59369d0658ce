"""Every prepared path of one stage: all kinds of batch, all rows its residual can arrive on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from layline.boundary.contracts import StageDecl, StageDeclaration
from layline.boundary.layout import BatchVariant, Layout
from layline.boundary.mesh import MeshSpec
from layline.boundary.planning.edge import PreparePlan, Source, plan_prepare
from layline.boundary.planning.exits import ExitChoice, ExitPlan, plan_exit
from layline.boundary.planning.moves import Ground, batch_kinds
from layline.boundary.planning.resolve import residual_after, resolve_stage
from layline.boundary.rows import BatchKind
from layline.errors import BoundaryUnsupportedError, DeclarationError


@dataclass(frozen=True)
class StagePath:
    """One stage planned for one kind of batch.

    ``prepares`` has a plan for each layout the residual can arrive on; ``source`` is the one that
    the declared neighbours lead to, ``leaving`` what the declared producer's exit does.
    """

    decl: StageDecl
    source: Layout
    leaving: ExitPlan | None
    prepares: Mapping[Layout, PreparePlan]
    exit: ExitChoice

    @property
    def prepare(self) -> PreparePlan:
        """The input's plan for the residual's declared rows."""
        return self.prepares[self.source]


@dataclass(frozen=True)
class StagePlan:
    """The prepared paths of one stage. It holds no tensor and no norm."""

    declaration: StageDeclaration
    following: StageDeclaration | None
    paths: Mapping[BatchKind, StagePath]

    def path(self, kind: BatchKind) -> StagePath:
        """The path for the active kind of batch; never silently another one."""
        path = self.paths.get(kind)
        if path is None:
            raise no_path(kind)
        return path


def no_path(kind: BatchKind) -> BoundaryUnsupportedError:
    """The error for a batch that this stage has no path for."""
    return BoundaryUnsupportedError(
        f"no stage boundary path for the active {kind.variant.name} batch"
    )


def plan_stage(
    declaration: StageDeclaration, following: StageDeclaration | None, spec: MeshSpec
) -> StagePlan:
    """Plan a stage between its neighbours.

    Raises DeclarationError where an edge has no correct transition on this mesh.
    """
    paths: dict[BatchKind, StagePath] = {}
    for kind in batch_kinds(spec):
        ground = Ground(spec, kind)
        _refuse_unsupported(ground, declaration)
        paths[kind] = _plan_path(ground, declaration, following)
    return StagePlan(declaration, following, paths)


def _plan_path(
    ground: Ground, declaration: StageDeclaration, following: StageDeclaration | None
) -> StagePath:
    decl = resolve_stage(ground, declaration, following)
    choice = plan_exit(ground, declaration, decl, following)
    previous = declaration.previous
    output, leaving = None, None
    declared_source = ground.attention
    if previous is not None:
        producer = resolve_stage(ground, previous, declaration)
        output = producer.output
        leaving = plan_exit(ground, previous, producer, declaration).with_tokens
        declared_source = residual_after(ground, previous)
    sources = dict.fromkeys((declared_source, ground.attention, ground.local))
    prepares = {
        rows: plan_prepare(ground, declaration, decl, Source(output, leaving, rows))
        for rows in sources
    }
    return StagePath(decl, declared_source, leaving, prepares, choice)


def _refuse_unsupported(ground: Ground, declaration: StageDeclaration) -> None:
    """Refuse what has no correct implementation, naming the edge and the reason."""
    edge = edge_name(declaration)
    if declaration.prepared_from is not None:
        raise DeclarationError(
            f"{edge}: prepared_from needs branches, which have no paths in this version; expected "
            "previous"
        )
    update = declaration.update
    if not (update.at_producer or update.outlives_producer):
        raise DeclarationError(
            f"{edge}: {type(update).__name__} may not outlive its producer, so it cannot be left "
            "to the next stage; expected at_producer or outlives_producer"
        )
    parallel = ground.variant is BatchVariant.CONTEXT_PARALLEL
    for stage in (declaration.previous, declaration):
        if stage is None or not parallel:
            continue
        if stage.update.at_producer:
            raise DeclarationError(
                f"{edge}: an update at the producer has no path where rows are gathered over "
                "attention CP; expected attn_cp 1 or a plain update"
            )


def edge_name(declaration: StageDeclaration) -> str:
    """The edge into a stage, such as ``attention -> ffn``."""
    source = declaration.previous
    start = "entry" if source is None else source.kind.value
    return f"{start} -> {declaration.kind.value}"
