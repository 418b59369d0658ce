"""Linear layers choose kernels by phase, and every kernel computes the same product."""

from __future__ import annotations

import pytest
import torch

from layline.kernels.dense_matmul import dense_matmul
from layline.layers.linear import Linear
from layline.layers.spans import Phase


class Marked:
    """A packed weight that says so."""

    num_bytes = 7

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        return torch.full((x.shape[0], 3), 42.0, dtype=x.dtype)


def test_the_phase_chooses_never_the_number_of_rows() -> None:
    layer = Linear(torch.zeros(3, 4), None, Marked())
    for rows in (1, 2, 300):
        x = torch.ones(rows, 4)
        assert (layer(x, Phase.DECODE) == 42).all()
        assert (layer(x, Phase.PREFILL) == 0).all()
    assert layer.num_bytes == 3 * 4 * 4 + 7


def test_a_packed_layer_adds_its_bias() -> None:
    layer = Linear(None, torch.tensor([1.0, 2.0, 3.0]), Marked())
    for phase in Phase:
        assert layer(torch.ones(2, 4), phase).tolist() == [[43.0, 44.0, 45.0]] * 2
    with pytest.raises(ValueError, match="needs a weight"):
        Linear(None)


@pytest.mark.parametrize("upcast", [True, False])
@pytest.mark.parametrize("with_bias", [True, False])
def test_dense_matmul(upcast: bool, with_bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(*shape, generator=generator).to(torch.bfloat16)
        for shape in ((33, 64), (48, 64), (48,))
    )
    out = dense_matmul(x, weight, bias if with_bias else None, upcast=upcast)
    wanted = x.double() @ weight.double().T + (bias.double() if with_bias else 0)
    bound = 2**-7 * (x.double().abs() @ weight.double().abs().T + 1)
    assert out.dtype is (torch.float32 if upcast else torch.bfloat16)
    assert ((out.double() - wanted).abs() <= bound).all()
