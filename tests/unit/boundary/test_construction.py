"""What construction binds, and what it refuses, without torch."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from layline.boundary import (
    ProducerReduction,
    StageBoundary,
    declare_attn,
    declare_ffn,
    make_attn_stage,
    make_ffn_stage,
    make_stages,
)
from layline.boundary.mesh import Mesh, MeshSpec
from layline.boundary.planning.stage import StagePlan
from layline.boundary.policy import ReductionPolicy
from layline.boundary.residual import LayerResidual
from layline.boundary.residual.add_norm import PlainRead, PlainUpdate
from layline.boundary.rows import ORDINARY
from layline.errors import DeclarationError, UsageError
from layline.topology import Topology


def norm(x: object) -> object:
    return x


def planned(boundary: StageBoundary) -> list[Any]:
    """Everything a stage runs, by kind of batch."""
    return [
        (kind, path.source, path.prepares, path.exit) for kind, path in boundary.plan.paths.items()
    ]


MESHES = [
    MeshSpec(),
    MeshSpec(topology=Topology(tp=2)),
    MeshSpec(topology=Topology(tp=4, attn_dp=2)),
    MeshSpec(topology=Topology(tp=4, attn_cp=2)),
    MeshSpec(topology=Topology(tp=2), sequence_parallel=True, input_scattered=True),
    MeshSpec(topology=Topology(tp=4, attn_dp=2, dense_tp=1)),
]


@pytest.mark.parametrize("spec", MESHES)
def test_split_stages_bind_the_same_edges_as_one_call(spec: MeshSpec) -> None:  # boundary G9
    mixer = declare_attn(reduction=ProducerReduction.SCOPED)
    mesh = mesh_of(spec)
    together = make_stages((mixer, norm), (declare_ffn(), norm), terminal=True, mesh=mesh)
    ffn = dataclasses.replace(declare_ffn(), previous=mixer, terminal=True)
    split = (
        make_attn_stage(mixer, norm, following=ffn, mesh=mesh_of(spec)),
        make_ffn_stage(ffn, norm, mesh=mesh_of(spec)),
    )
    across = (
        *make_stages((mixer, norm), following=declare_ffn(), mesh=mesh_of(spec)),
        *make_stages((declare_ffn(), norm), previous=mixer, terminal=True, mesh=mesh_of(spec)),
    )
    assert [planned(b) for b in together] == [planned(b) for b in split]
    assert [planned(b) for b in together] == [planned(b) for b in across]
    alone = make_stages((mixer, norm), mesh=mesh_of(spec))
    same = planned(together[0]) == planned(alone[0])
    assert same is (spec.topology.attn_tp == 1), "without its consumer a mixer plans another edge"


def mesh_of(spec: MeshSpec) -> Mesh:
    """A mesh whose groups are never used: construction alone communicates nothing."""
    from layline.boundary.mesh import make_mesh
    from layline.topology import GroupName

    class Silent:
        def __init__(self, name: GroupName) -> None:
            self.name, self.ranks, self.rank = name, spec.topology.group(name), 0
            self.size = len(self.ranks)
            self.all_reduce = self.all_gather = self.reduce_scatter = self.reduce_scatter_v = norm

    groups: Any = {name: Silent(name) for name in GroupName}
    return make_mesh(spec, groups)


def test_an_unresolved_policy_is_refused() -> None:  # boundary G12
    for policy in ("auto", None, "rs"):
        with pytest.raises(UsageError, match="resolve_policy"):
            MeshSpec(policy=policy)  # type: ignore[arg-type]
    assert MeshSpec(policy=ReductionPolicy("rs")).policy is ReductionPolicy.RS


def test_an_update_at_the_producer_is_refused_under_cp() -> None:  # boundary G13
    early = LayerResidual(read=PlainRead(), update=PlainUpdate(plain=False, at_producer=True))
    mesh = mesh_of(MeshSpec(topology=Topology(tp=2, attn_cp=2)))
    text = "attention -> ffn: an update at the producer has no path .* attention CP"
    with pytest.raises(DeclarationError, match=text):
        make_stages((declare_attn(), norm), (declare_ffn(residual=early), norm), mesh=mesh)
    with pytest.raises(DeclarationError, match="ffn -> attention"):
        make_stages((declare_attn(), norm), previous=declare_ffn(residual=early), mesh=mesh)


def test_sparse_stages_are_refused_until_they_exist() -> None:  # boundary G13
    for facts in ({"sparse": True}, {"next_sparse": True}):
        with pytest.raises(DeclarationError, match="sparse ffn stages have no boundary paths"):
            declare_ffn(**facts)  # type: ignore[arg-type]


def test_an_update_that_may_not_outlive_its_producer_is_not_deferred() -> None:  # boundary G64
    late = LayerResidual(PlainRead(), PlainUpdate(outlives_producer=False))
    with pytest.raises(DeclarationError, match="outlive"):
        make_stages((declare_attn(residual=late), norm))
    early = LayerResidual(PlainRead(), PlainUpdate(at_producer=True, outlives_producer=False))
    make_stages((declare_attn(residual=early), norm))


def test_the_plan_holds_no_norm_and_no_tensor() -> None:  # boundary G14
    """Everything reachable from a boundary's plan is a declaration, an op or a plain value."""
    marker = object()
    (boundary,) = make_stages(
        (declare_attn(), marker), previous=declare_ffn(), mesh=mesh_of(MESHES[2])
    )
    assert not hasattr(boundary.declaration, "norm")
    seen: set[int] = set()
    plans = 0

    def walk(value: Any) -> None:
        nonlocal plans
        if id(value) in seen:
            return
        seen.add(id(value))
        assert value is not marker, "a plan holds a norm"
        assert "torch" not in type(value).__module__, "a plan holds a tensor"
        plans += isinstance(value, StagePlan)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            for field in dataclasses.fields(value):
                walk(getattr(value, field.name))
        elif isinstance(value, (list, tuple, set, frozenset)):
            for item in value:
                walk(item)
        elif isinstance(value, dict):
            for item in (*value, *value.values()):
                walk(item)

    walk(boundary.plan)
    assert plans == 1, "a plan holds a neighbour's plan"
    assert len(seen) > 50


def test_a_layer_with_more_layers_downstream_is_not_terminal() -> None:  # boundary G80
    """The last local layer at a pipeline cut leaves its sum; the stack's last one does not."""
    mesh = mesh_of(MeshSpec(topology=Topology(tp=2)))
    items = ((declare_attn(), norm), (declare_ffn(), norm))
    cut = make_stages(*items, following=declare_attn(), mesh=mesh)[-1]
    assert not cut.declaration.terminal
    leaving = cut.plan.path(ORDINARY).exit.with_tokens
    assert leaving.fuse_mlp_allreduce
    assert leaving.owed
    end = make_stages(*items, terminal=True, mesh=mesh)[-1]
    leaving = end.plan.path(ORDINARY).exit.with_tokens
    assert not leaving.fuse_mlp_allreduce
    assert not leaving.owed
