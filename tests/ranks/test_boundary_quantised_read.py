"""An 8-bit compute input: the same on every mesh, and taken by the parallel linear layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from layline.boundary import declare_attn, declare_ffn, make_stages
from layline.boundary.layout import BatchVariant
from layline.boundary.mesh import Mesh, MeshSpec, make_mesh
from layline.boundary.quantised import QuantisedRows, pack_rows, unpack_rows
from layline.boundary.residual import batch
from layline.boundary.residual.quantised_read import QUANTISED_RESIDUAL
from layline.boundary.rows import ORDINARY, DpPadding, StepRows, kind_of, rank_rows
from layline.comm.simulated import run_ranks
from layline.layers.linear import Linear
from layline.layers.norm import RMSNorm
from layline.layers.parallel import RowParallelLinear
from layline.layers.spans import Phase
from layline.topology import GroupName, Topology

HIDDEN, COUNTS = 16, (3, 5)


def weight(seed: int) -> torch.Tensor:
    return torch.randn(HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(seed)) / 4


def norm(seed: int) -> RMSNorm:
    return RMSNorm(torch.rand(HIDDEN, generator=torch.Generator().manual_seed(seed)) + 0.5, 1e-5)


class Batch:
    def __init__(self, kind: Any = ORDINARY, rows: Any = None) -> None:
        self.residual_stream: Any = None
        self.attn_tp_context: Any = None
        self.kind, self.rows = kind, rows


def layer(x: torch.Tensor, mesh: Mesh, fb: Batch) -> torch.Tensor:
    """Attention and FFN of one matrix each, divided by input columns over their ranks."""
    attn, ffn = make_stages(
        (declare_attn(residual=QUANTISED_RESIDUAL), norm(1)),
        (declare_ffn(residual=QUANTISED_RESIDUAL), norm(2)),
        terminal=True,
        mesh=mesh,
    )
    batch.start(fb)
    prepared = attn.prepare(x, fb)
    assert isinstance(prepared, QuantisedRows)
    output = attn.finish(_product(prepared, 3, mesh, GroupName.ATTN_TP, reduces=False), fb)
    prepared = ffn.prepare(output, fb)
    assert isinstance(prepared, QuantisedRows)
    with ffn.exit(fb) as scope:
        output = _product(prepared, 4, mesh, GroupName.TP, reduces=True)
    output = scope.finish(output)
    result: torch.Tensor = batch.norm(output, fb, norm(5))
    return result


def _product(
    rows: QuantisedRows, seed: int, mesh: Mesh, name: GroupName, *, reduces: bool
) -> torch.Tensor:
    size = mesh.topology.size(name)
    if size == 1:
        return Linear(weight(seed))(rows, Phase.DECODE)
    # A rank's input columns: the row-parallel layer is handed the rows in the read's format.
    share = HIDDEN // size
    first = mesh.topology.index_in(name) * share
    masked = torch.zeros(HIDDEN, HIDDEN)
    masked[:, first : first + share] = weight(seed)[:, first : first + share]
    linear = RowParallelLinear(Linear(masked), mesh.compute_groups[name], reduces)
    return linear(rows, Phase.DECODE)


def tokens(dp: int) -> torch.Tensor:
    return torch.randn(COUNTS[dp], HIDDEN, generator=torch.Generator().manual_seed(20 + dp))


@pytest.mark.parametrize("padding", DpPadding)
@pytest.mark.parametrize("degrees", [(2, 1), (2, 2), (4, 2), (4, 1)])
def test_a_quantised_input_does_not_depend_on_the_mesh(
    degrees: tuple[int, int], padding: DpPadding
) -> None:
    tp, attn_dp = degrees
    topology = Topology(tp=tp, attn_dp=attn_dp)
    step = StepRows(BatchVariant.ORDINARY, tuple((COUNTS[dp],) for dp in range(attn_dp)), padding)

    def on_rank(here: Topology, groups: Any) -> torch.Tensor:
        mesh = make_mesh(MeshSpec(topology=here), groups)
        fb = Batch(kind_of(step, here), rank_rows(step, here))
        return layer(tokens(here.coordinates.attn_dp), mesh, fb)

    alone = [layer(tokens(dp), Mesh(), Batch()) for dp in range(attn_dp)]
    for rank, found in enumerate(run_ranks(topology, on_rank)):
        wanted = alone[topology.at(rank).coordinates.attn_dp]
        # Sums in another order may round one value to the next of 254 steps.
        torch.testing.assert_close(found, wanted, atol=0.05, rtol=0)
        assert (found - wanted).abs().mean() < 2e-3


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e5])
def test_rows_are_rounded_to_a_254th_of_their_largest(scale: float) -> None:
    x = torch.randn(64, 40, generator=torch.Generator().manual_seed(0)) * scale
    error = (unpack_rows(pack_rows(x)) - x).abs()
    bound = x.abs().amax(dim=1, keepdim=True) / 254 * (1 + 1e-5)
    assert (error <= bound).all()
    assert (error > bound / 2).any()


def test_linear_layers_take_quantised_rows() -> None:
    x = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(1))
    rows = QuantisedRows.of(x)
    assert rows.shape == x.shape
    plain = Linear(weight(3))
    torch.testing.assert_close(
        plain(rows, Phase.PREFILL), plain(rows.dequantised(), Phase.PREFILL), atol=0, rtol=0
    )
    assert not torch.equal(rows.dequantised(), x)
