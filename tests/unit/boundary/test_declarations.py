"""Declarations, their assembly, and the plan behind each boundary, without torch."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from layline.boundary import (
    BatchVariant,
    Layout,
    ProducerReduction,
    StageKind,
    TokenAxis,
    declare_attn,
    declare_ffn,
    make_attn_stage,
    make_ffn_stage,
    make_stages,
)
from layline.boundary.construction import plan_stage, resolve_stage
from layline.boundary.planning.edge import plan_edge
from layline.boundary.planning.records import OpKind, Place
from layline.boundary.residual import LayerResidual
from layline.boundary.residual.add_norm import PlainRead, PlainUpdate
from layline.errors import BoundaryUnsupportedError, DeclarationError
from layline.topology import Topology


def norm(x: object) -> object:
    return x


def test_defaults() -> None:  # boundary G1
    assert declare_attn().reduction is ProducerReduction.PARTIAL
    assert declare_ffn().reduction is ProducerReduction.SCOPED
    assert declare_attn().kind is StageKind.ATTN
    assert declare_ffn().kind is StageKind.FFN


def test_reductions_of_the_other_kind_are_refused() -> None:  # boundary G2
    with pytest.raises(ValueError, match=r"^PARTIAL is not supported for ffn stages$"):
        declare_ffn(reduction=ProducerReduction.PARTIAL)
    with pytest.raises(ValueError, match=r"^LOCAL_TAIL is not supported for attention stages$"):
        declare_attn(reduction=ProducerReduction.LOCAL_TAIL)


@pytest.mark.parametrize("kinds", ["a", "f", "af", "fa", "aaf", "faff", "afafafaf"])
def test_any_number_of_stages_in_any_order(kinds: str) -> None:  # boundary G3
    items = [(declare_attn() if kind == "a" else declare_ffn(), norm) for kind in kinds]
    boundaries = make_stages(*items, previous=declare_ffn(), terminal=True)
    assert [boundary.declaration.kind for boundary in boundaries] == [
        StageKind.ATTN if kind == "a" else StageKind.FFN for kind in kinds
    ]
    assert len({id(boundary.plan) for boundary in boundaries}) == len(kinds)


@pytest.mark.parametrize("item", [declare_attn(), (declare_attn(),), ("attn", norm), "ab"])
def test_items_are_declaration_and_norm(item: object) -> None:  # boundary G4
    with pytest.raises(DeclarationError, match="stage 0"):
        make_stages(item)  # type: ignore[arg-type]


def test_sources_belong_to_the_assembler() -> None:  # boundary G5
    linked = dataclasses.replace(declare_ffn(), previous=declare_attn())
    terminal = dataclasses.replace(declare_ffn(), terminal=True)
    for declaration in (linked, terminal):
        with pytest.raises(DeclarationError, match="already carries"):
            make_stages((declaration, norm))


def test_sources_are_declarations_not_boundaries() -> None:  # boundary G6
    (boundary,) = make_stages((declare_attn(), norm))
    with pytest.raises(DeclarationError, match="found StageBoundary"):
        make_stages((declare_ffn(), norm), previous=boundary)  # type: ignore[arg-type]
    with pytest.raises(DeclarationError, match="found StageBoundary"):
        make_stages((declare_ffn(), norm), following=boundary)  # type: ignore[arg-type]


def test_following_names_this_stage() -> None:  # boundary G7
    attn = dataclasses.replace(declare_attn(), previous=declare_ffn())
    make_attn_stage(attn, norm, following=dataclasses.replace(declare_ffn(), previous=attn))
    with pytest.raises(DeclarationError, match="following must name this stage"):
        make_attn_stage(attn, norm, following=declare_ffn())
    with pytest.raises(DeclarationError, match="cannot make a stage"):
        make_ffn_stage(attn, norm)


def test_only_the_last_stage_is_terminal_and_inputs_stay_as_they_were() -> None:  # boundary G8
    attn, ffn = declare_attn(), declare_ffn()
    boundaries = make_stages((attn, norm), (ffn, norm), terminal=True)
    assert [boundary.declaration.terminal for boundary in boundaries] == [False, True]
    assert (attn, ffn) == (declare_attn(), declare_ffn())
    with pytest.raises(DeclarationError, match="terminal stage has no following"):
        make_stages((ffn, norm), terminal=True, following=declare_attn())


def test_split_stages_bind_the_same_edges_as_one_call() -> None:  # boundary G9
    together = make_stages((declare_attn(), norm), (declare_ffn(), norm), terminal=True)
    attn = declare_attn()
    ffn = dataclasses.replace(declare_ffn(), previous=attn, terminal=True)
    split = (
        make_attn_stage(attn, norm, following=ffn),
        make_ffn_stage(ffn, norm),
    )
    assert [b.plan.path(BatchVariant.ORDINARY).ops for b in together] == [
        b.plan.path(BatchVariant.ORDINARY).ops for b in split
    ]


def test_size_one_axes_are_not_in_a_layout() -> None:  # boundary G11
    assert Layout.over(Topology(), TokenAxis) == Layout()
    mesh = Topology(tp=4, attn_dp=2)
    assert Layout.over(mesh, TokenAxis).sharded == {TokenAxis.ATTN_DP, TokenAxis.ATTN_TP_SCATTER}


def test_a_mesh_is_refused_at_construction() -> None:  # boundary G13 (a mesh)
    with pytest.raises(DeclarationError, match="a mesh of 2 ranks"):
        make_stages((declare_attn(), norm), topology=Topology(tp=2))


def test_the_plan_holds_no_norm_and_no_neighbour() -> None:  # boundary G14
    (boundary,) = make_stages((declare_attn(), norm), previous=declare_ffn())
    assert not hasattr(boundary.declaration, "norm")
    path = boundary.plan.path(BatchVariant.ORDINARY)
    held = {field.name for field in dataclasses.fields(path)}
    assert held == {"decl", "ops", "leaving", "steps", "leave", "consumes"}


@pytest.mark.parametrize("variant", [v for v in BatchVariant if v is not BatchVariant.ORDINARY])
def test_an_absent_variant_raises(variant: BatchVariant) -> None:  # boundary G16
    (boundary,) = make_stages((declare_attn(), norm))
    text = f"no stage boundary path for the active {variant.name} batch"
    with pytest.raises(NotImplementedError, match=text):
        boundary.plan.path(variant)
    with pytest.raises(BoundaryUnsupportedError):
        boundary.plan.path(variant)


def test_plans_of_one_rank() -> None:
    first = declare_attn()
    _, entry = plan_stage(first, Topology())
    assert [op.kind for op in plan_edge(entry)] == [OpKind.ENTER, OpKind.READ]
    _, edge = plan_stage(dataclasses.replace(declare_ffn(), previous=first), Topology())
    assert [op.kind for op in plan_edge(edge)] == [
        OpKind.LEAVE,
        OpKind.UPDATE_AND_READ,
    ]
    early = LayerResidual(read=PlainRead(), update=PlainUpdate(plain=False, at_producer=True))
    source = declare_attn(residual=early)
    _, edge = plan_stage(dataclasses.replace(declare_ffn(), previous=source), Topology())
    assert [(op.kind, op.place) for op in plan_edge(edge)] == [
        (OpKind.UPDATE, Place.EXIT),
        (OpKind.READ, Place.PREPARE),
    ]


def test_an_edge_that_moves_rows_is_refused() -> None:
    decl = resolve_stage(declare_attn(), Topology())
    _, edge = plan_stage(dataclasses.replace(declare_ffn(), previous=declare_attn()), Topology())
    rows = Layout(frozenset({TokenAxis.ATTN_DP}))
    moved = dataclasses.replace(edge, producer=dataclasses.replace(decl.output, layout=rows))
    with pytest.raises(DeclarationError, match="attention DP"):
        plan_edge(moved)


def test_declaring_and_planning_needs_no_torch() -> None:
    code = (
        "import sys\n"
        "from layline.boundary import declare_attn, declare_ffn, make_stages\n"
        "import layline.boundary.planning.edge\n"
        "make_stages((declare_attn(), None), (declare_ffn(), None), terminal=True)\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
