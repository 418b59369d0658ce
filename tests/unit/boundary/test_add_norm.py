"""The fused add and norm against float64, and against normalising a rounded sum."""

from __future__ import annotations

import pytest
import torch

from layline.layers.norm import RMSNorm

HIDDEN = 256
EPS = 1e-5


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    output, residual = (torch.randn(64, HIDDEN, generator=generator) for _ in range(2))
    weight = torch.rand(HIDDEN, generator=generator) + 0.5
    return output.to(dtype), (residual * 30).to(dtype), weight.to(dtype)


def exact(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x, weight = x.double(), weight.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_against_float64(dtype: torch.dtype) -> None:
    output, residual, weight = inputs(dtype)
    before = residual.clone()
    normed, updated = RMSNorm(weight, EPS).add_norm(output, residual)
    wanted = exact(output.double() + residual.double(), weight)
    step = torch.finfo(dtype).eps
    assert normed.dtype is updated.dtype is dtype
    assert ((normed.double() - wanted).abs() <= step * wanted.abs() + 1e-6).all()
    assert torch.equal(residual, before), "the residual was changed in place"
    alone = RMSNorm(weight, EPS)(residual)
    wanted = exact(residual, weight)
    assert ((alone.double() - wanted).abs() <= step * wanted.abs() + 1e-6).all()


def test_the_sum_is_not_rounded_before_the_norm() -> None:
    """Normalising the bfloat16 sum is further from the truth; the fused read differs from it."""
    output, residual, weight = inputs(torch.bfloat16)
    norm = RMSNorm(weight, EPS)
    fused, updated = norm.add_norm(output, residual)
    rounded = norm(output + residual)
    assert torch.equal(updated, output + residual)
    assert not torch.equal(fused, rounded)
    wanted = exact(output.double() + residual.double(), weight)
    error_fused = (fused.double() - wanted).abs().mean()
    error_rounded = (rounded.double() - wanted).abs().mean()
    assert error_fused < 0.8 * error_rounded
