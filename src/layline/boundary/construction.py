"""Resolve declarations for a topology and keep the planned, bound path of each batch variant."""

from __future__ import annotations

from dataclasses import dataclass

from layline.boundary.contracts import (
    EdgeDecl,
    StageDecl,
    StageDeclaration,
    StageInput,
    StageOutput,
)
from layline.boundary.exit import ExitStep, bind_exit
from layline.boundary.layout import BatchVariant, Layout, TokenAxis
from layline.boundary.planning.edge import plan_edge, plan_exit
from layline.boundary.planning.records import Op, OpKind, Place
from layline.boundary.prepare import PrepareStep, bind_prepare
from layline.errors import BoundaryUnsupportedError, DeclarationError
from layline.topology import Topology


@dataclass(frozen=True)
class BoundPath:
    """One variant's contract, its planned operations, and the functions bound to them.

    ``ops`` are those of the edge into the stage, ``leaving`` is the one at the stage's own exit;
    ``consumes`` says whether the path applies a contribution that its producer left.
    """

    decl: StageDecl
    ops: tuple[Op, ...]
    leaving: Op
    steps: tuple[PrepareStep, ...]
    leave: ExitStep
    consumes: bool


@dataclass(frozen=True)
class StagePlan:
    """The prepared paths of one stage. It holds no tensor and no norm."""

    declaration: StageDeclaration
    paths: dict[BatchVariant, BoundPath]

    def path(self, variant: BatchVariant) -> BoundPath:
        """The path for the active variant; never silently another one."""
        path = self.paths.get(variant)
        if path is None:
            raise BoundaryUnsupportedError(
                f"no stage boundary path for the active {variant.name} batch"
            )
        return path


def resolve_stage(declaration: StageDeclaration, topology: Topology) -> StageDecl:
    """The stage's input and output on this topology, for ordinary batches.

    Raises DeclarationError when the topology has more than one rank.
    """
    if not topology.is_single:
        raise DeclarationError(
            f"a mesh of {topology.world_size} ranks has no boundary paths in this version; "
            "expected one rank"
        )
    rows = Layout.over(topology, (TokenAxis.ATTN_DP,))
    return StageDecl(
        kind=declaration.kind,
        variant=BatchVariant.ORDINARY,
        input=StageInput(rows, declaration.read),
        output=StageOutput(rows, None, declaration.update),
    )


def plan_stage(declaration: StageDeclaration, topology: Topology) -> tuple[StageDecl, EdgeDecl]:
    """The resolved stage and the edge that leads into it."""
    decl = resolve_stage(declaration, topology)
    source = declaration.previous
    producer = None if source is None else resolve_stage(source, topology).output
    layout = decl.input.layout
    return decl, EdgeDecl(producer, decl.input, residual_source=layout, residual_destination=layout)


def build_plan(declaration: StageDeclaration, topology: Topology) -> StagePlan:
    """Plan every supported variant of a stage and bind its prepare steps."""
    decl, edge = plan_stage(declaration, topology)
    ops = plan_edge(edge)
    leaving = plan_exit(decl.output)
    steps = bind_prepare(tuple(op for op in ops if op.place is Place.PREPARE))
    consumes = any(op.kind is OpKind.UPDATE_AND_READ for op in ops)
    path = BoundPath(decl, ops, leaving, steps, bind_exit(leaving), consumes)
    return StagePlan(declaration, {decl.variant: path})
