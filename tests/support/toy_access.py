"""Meshes, collectors and comparisons for looking into a toy stack's residual stream."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from layline.boundary.layout import Layout
from layline.boundary.planning.moves import batch_kinds
from layline.boundary.policy import ReductionPolicy
from layline.topology import Topology
from support.simulated_cases import Case, mesh_spec, with_policies
from support.toy_mesh import HIDDEN, Reference, Token, ToyRank

LAYERS = ("attention", "ffn", "attention", "ffn")
MESHES = [
    Topology(tp=2),
    Topology(tp=4, attn_dp=2),
    Topology(tp=2, attn_dp=2),
    Topology(tp=2, attn_cp=2),
    Topology(tp=8, attn_dp=2, attn_cp=2),
    Topology(tp=2, dense_tp=1),
    Topology(tp=4, attn_dp=2, dense_tp=1),
]


def name_of(mesh: Topology) -> str:
    dense = "" if mesh.dense_tp == mesh.tp else " dense 1"
    return f"{mesh.attn_dp}x{mesh.attn_cp}x{mesh.attn_tp}{dense}"


def cases_on(mesh: Topology) -> Iterator[Case]:
    for spec in with_policies(mesh_spec(mesh)):
        if spec.policy in (ReductionPolicy.AR, ReductionPolicy.RS_RSV):
            for kind in batch_kinds(spec):
                yield Case(spec, kind)


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-5)


class Collector:
    """An auxiliary-output collector: it copies what it is not given for good."""

    def __init__(self) -> None:
        self.values: list[torch.Tensor] = []
        self.owned: list[bool] = []
        self.storages: list[int] = []

    def capture(self, value: torch.Tensor, *, owned: bool = False) -> None:
        self.owned.append(owned)
        self.storages.append(value.untyped_storage().data_ptr())
        self.values.append(value if owned else value.clone())


def check_rows(
    found: torch.Tensor, wanted: Reference, stage: int, tokens: list[Token | None]
) -> None:
    """``found`` is the residual before ``stage`` on the rows of these tokens."""
    assert found.shape == (len(tokens), HIDDEN)
    real = [row for row, token in enumerate(tokens) if token is not None]
    expected = wanted.rows(wanted.residuals[stage], [t for t in tokens if t is not None])
    close(found[real], expected)


def producer_rows(rank: ToyRank, stage: int) -> Layout:
    """The rows that the stage before hands on; at the stack's entry attention's."""
    if stage == 0:
        return rank.ground.attention
    return rank.stages[stage - 1].plan.path(rank.batch.kind).decl.output.handoff
