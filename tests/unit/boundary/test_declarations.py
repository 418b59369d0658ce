"""Declarations and their assembly, without torch."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

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
from layline.boundary.mesh import MeshSpec
from layline.boundary.planning.stage import plan_stage
from layline.boundary.residual import LayerResidual
from layline.boundary.residual.add_norm import PlainRead, PlainUpdate
from layline.boundary.rows import ORDINARY, batch_kind
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
    assert len({id(boundary) for boundary in boundaries}) == len(kinds)
    assert len({id(boundary.plan) for boundary in boundaries}) == len(kinds)
    with pytest.raises(DeclarationError, match="at least one"):
        make_stages()


@pytest.mark.parametrize("item", [declare_attn(), (declare_attn(),), ("attn", norm), "ab"])
def test_items_are_declaration_and_norm(item: object) -> None:  # boundary G4
    with pytest.raises(DeclarationError, match="stage 0"):
        make_stages(item)  # type: ignore[arg-type]


def test_options_belong_to_the_kind_of_stage() -> None:  # boundary G4
    (attn,) = make_stages((declare_attn(), norm, {"qkv_latent_func": norm, "fusions": None}))
    assert attn.declaration.latent_input
    make_stages((declare_ffn(), norm, {"fusions": None}))
    with pytest.raises(DeclarationError, match="'qkv_latent_func' is not one of fusions"):
        make_stages((declare_ffn(), norm, {"qkv_latent_func": norm}))
    with pytest.raises(DeclarationError, match=r"'qkv_latent' is not one of .* did you mean"):
        make_stages((declare_attn(), norm, {"qkv_latent": norm}))
    with pytest.raises(DeclarationError, match="options must be a mapping"):
        make_stages((declare_attn(), norm, [norm]))  # type: ignore[arg-type]


def test_sources_belong_to_the_assembler() -> None:  # boundary G5
    linked = dataclasses.replace(declare_ffn(), previous=declare_attn())
    prepared = dataclasses.replace(declare_ffn(), prepared_from=declare_ffn())
    terminal = dataclasses.replace(declare_ffn(), terminal=True)
    for declaration in (linked, prepared, terminal):
        with pytest.raises(DeclarationError, match="already carries"):
            make_stages((declaration, norm))


def test_sources_are_declarations_not_boundaries() -> None:  # boundary G6
    (boundary,) = make_stages((declare_attn(), norm))
    with pytest.raises(DeclarationError, match="found StageBoundary"):
        make_stages((declare_ffn(), norm), previous=boundary)  # type: ignore[arg-type]
    with pytest.raises(DeclarationError, match="found StageBoundary"):
        make_stages((declare_ffn(), norm), following=boundary)  # type: ignore[arg-type]


def test_previous_and_prepared_from_exclude_each_other() -> None:  # boundary G6
    ffn = declare_ffn()
    with pytest.raises(DeclarationError, match="previous and prepared_from are mutually exclusive"):
        make_stages((declare_attn(), norm), previous=ffn, prepared_from=ffn)
    both = dataclasses.replace(declare_attn(), previous=ffn, prepared_from=ffn)
    with pytest.raises(DeclarationError, match="previous and prepared_from are mutually exclusive"):
        make_attn_stage(both, norm)


def test_branches_are_refused_until_they_exist() -> None:  # boundary G13
    with pytest.raises(DeclarationError, match="prepared_from needs branches"):
        make_stages((declare_attn(), norm), prepared_from=declare_ffn())
    branch = dataclasses.replace(declare_ffn(), prepared_from=declare_ffn())
    with pytest.raises(DeclarationError, match="prepared_from needs branches"):
        make_ffn_stage(branch, norm)


def test_following_names_this_stage() -> None:  # boundary G7
    attn = dataclasses.replace(declare_attn(), previous=declare_ffn())
    make_attn_stage(attn, norm, following=dataclasses.replace(declare_ffn(), previous=attn))
    with pytest.raises(DeclarationError, match="following must name this stage"):
        make_attn_stage(attn, norm, following=declare_ffn())
    other = dataclasses.replace(declare_ffn(), previous=declare_attn())
    with pytest.raises(DeclarationError, match="following must name this stage"):
        make_attn_stage(attn, norm, following=other)
    with pytest.raises(DeclarationError, match="cannot make a stage"):
        make_ffn_stage(attn, norm)


def test_only_the_last_stage_is_terminal_and_inputs_stay_as_they_were() -> None:  # boundary G8
    attn, ffn = declare_attn(), declare_ffn()
    boundaries = make_stages((attn, norm), (ffn, norm), terminal=True)
    assert [boundary.declaration.terminal for boundary in boundaries] == [False, True]
    assert (attn, ffn) == (declare_attn(), declare_ffn())
    with pytest.raises(DeclarationError, match="terminal stage has no following"):
        make_stages((ffn, norm), terminal=True, following=declare_attn())


def test_size_one_axes_are_not_in_a_layout() -> None:  # boundary G11
    assert Layout.over(Topology(), TokenAxis) == Layout()
    mesh = Topology(tp=4, attn_dp=2)
    assert Layout.over(mesh, TokenAxis).sharded == {TokenAxis.ATTN_DP, TokenAxis.ATTN_TP_SCATTER}


@pytest.mark.parametrize("degrees", [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 1, 2)])
def test_no_planned_layout_names_a_size_one_axis(
    degrees: tuple[int, int, int],
) -> None:  # boundary G11
    dp, cp, tp = degrees
    topology = Topology(tp=dp * cp * tp, attn_dp=dp, attn_cp=cp)
    sizes = {TokenAxis.ATTN_DP: dp, TokenAxis.ATTN_CP: cp, TokenAxis.ATTN_TP_SCATTER: tp}
    plan = plan_stage(
        dataclasses.replace(declare_ffn(), previous=declare_attn()),
        declare_attn(),
        MeshSpec(topology=topology),
    )
    layouts = [layout for path in plan.paths.values() for layout in _layouts(path)]
    assert layouts
    for layout in layouts:
        assert all(sizes[axis] > 1 for axis in layout.sharded), str(layout)


def _layouts(path: Any) -> list[Layout]:
    prepare, leaving = path.prepare, path.exit.with_tokens
    ops = (*prepare.written, *(prepare.declared or ()), *(prepare.complete or ()), *leaving.owed)
    ends = [layout for op in (*ops, *leaving.ops) for layout in (op.before, op.after)]
    decl = path.decl
    return [*ends, decl.input.layout, decl.output.layout, decl.output.handoff, *path.prepares]


@pytest.mark.parametrize("variant", [v for v in BatchVariant if v is not BatchVariant.ORDINARY])
def test_an_absent_variant_raises(variant: BatchVariant) -> None:  # boundary G16
    (boundary,) = make_stages((declare_attn(), norm))
    text = f"^no stage boundary path for the active {variant.name} batch$"
    with pytest.raises(NotImplementedError, match=text):
        boundary.plan.path(batch_kind(variant))
    with pytest.raises(BoundaryUnsupportedError):
        boundary.plan.path(batch_kind(variant))


def test_plans_of_one_rank() -> None:
    first = declare_attn()
    path = plan_stage(first, None, MeshSpec()).path(ORDINARY)
    assert [str(op) for op in path.prepare.entry] == ["enter", "norm of the residual"]
    ffn = dataclasses.replace(declare_ffn(), previous=first)
    path = plan_stage(ffn, None, MeshSpec()).path(ORDINARY)
    assert [str(op) for op in path.prepare.complete or ()] == ["add+norm"]
    assert path.exit.with_tokens.ops == ()
    early = LayerResidual(read=PlainRead(), update=PlainUpdate(plain=False, at_producer=True))
    source = declare_attn(residual=early)
    path = plan_stage(source, None, MeshSpec()).path(ORDINARY)
    assert [(str(op), op.place.name) for op in path.exit.with_tokens.ops] == [("add", "EXIT")]
    path = plan_stage(dataclasses.replace(declare_ffn(), previous=source), None, MeshSpec()).path(
        ORDINARY
    )
    assert [str(op) for op in path.prepare.written] == ["norm of the residual"]
    assert path.prepare.complete is None


def test_declaring_and_planning_needs_no_torch() -> None:
    code = (
        "import sys\n"
        "from layline.boundary import declare_attn, declare_ffn, make_stages\n"
        "import layline.boundary.planning.edge\n"
        "import layline.boundary.planning.simulate\n"
        "make_stages((declare_attn(), None), (declare_ffn(), None), terminal=True)\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
