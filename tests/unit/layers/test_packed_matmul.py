"""Packed matmuls against float64 on the dequantised weights."""

from __future__ import annotations

import pytest
import torch

from layline.kernels.packed_matmul import (
    GROUP,
    LARGEST_SPLIT,
    Int8Weight,
    VnniWeight,
    has_vnni,
    pack_int4,
    pack_int8,
    quantise_rows,
    split_bytes,
)

K, N = 96, 48


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_int4_keeps_every_value_and_rounds_only_scale_and_zero(rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    nibbles = torch.randint(0, 16, (N, K), generator=generator, dtype=torch.uint8)
    scale = normal(N, K // GROUP, seed=1).abs() * 0.1 + 0.01
    minimum = normal(N, K // GROUP, seed=2) * 0.3
    x = normal(rows, K, seed=3).to(torch.bfloat16)
    out = pack_int4(nibbles, scale, minimum).matmul(x)
    scale16 = scale.to(torch.bfloat16).double()
    zero16 = (minimum + 8 * scale).to(torch.bfloat16).double()
    spread = [part.repeat_interleave(GROUP, dim=1) for part in (scale16, zero16)]
    weight = (nibbles.double() - 8) * spread[0] + spread[1]
    wanted = x.double() @ weight.T
    bound = 2**-8 * (x.double().abs() @ weight.abs().T)
    assert ((out.double() - wanted).abs() <= bound).all()
    swapped = pack_int4(nibbles.flip(1), scale, minimum).matmul(x)
    assert ((swapped.double() - wanted).abs() > bound).any()


def test_int8_rows() -> None:
    weight = normal(N, K, seed=4) * torch.logspace(-4, 3, N)[:, None]
    weight[7] = 0.0
    values = torch.empty(N, K, dtype=torch.int8)
    scales = quantise_rows(weight, values)
    restored = values.double() * scales.double()[:, None]
    step = weight.abs().amax(dim=1, keepdim=True).double() / 127
    assert ((restored - weight.double()).abs() <= 0.52 * step).all()
    x = normal(5, K, seed=5).to(torch.bfloat16)
    out = Int8Weight(values, scales).matmul(x)
    bound = 2**-7 * (x.double().abs() @ restored.abs().T)
    assert ((out.double() - x.double() @ restored.T).abs() <= bound).all()


def test_int8_uses_the_whole_range() -> None:
    for seed in range(20):
        weight = normal(4, 64, seed=seed)
        values = torch.empty(4, 64, dtype=torch.int8)
        quantise_rows(weight, values)
        assert int(values.abs().amax(dim=1).min()) >= 125


def test_split_bytes_keep_sixteen_bits_of_every_row() -> None:
    x = normal(6, K, seed=6) * torch.logspace(-6, 6, 6)[:, None]
    x[2] = 0.0
    x[3, 0] = -x[3].abs().max() * 2
    planes, scale = split_bytes(x)
    assert planes.dtype is torch.uint8
    high, low = planes.double().sub(128).chunk(2)
    restored = (256 * high + low) * scale.double()
    assert ((restored - x.double()).abs() <= 0.51 * scale.double() + 1e-30).all()
    assert (scale[:, 0] <= x.abs().amax(dim=1) / LARGEST_SPLIT * 1.001 + 1e-30).all()


@pytest.mark.skipif(not has_vnni(), reason="this CPU has no VNNI")
@pytest.mark.parametrize("rows", [1, 7, 40])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_vnni_product_is_exact_but_for_the_activations_last_bit(
    rows: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(8)
    values = torch.randint(-127, 128, (N, K), generator=generator, dtype=torch.int8)
    values[0] = 127  # The largest sums must not saturate.
    scales = (torch.rand(N, generator=generator) * 0.01 + 0.001).to(torch.bfloat16)
    x = normal(rows, K, seed=9).to(dtype)
    x[0] = 3.0
    weight = pack_int8(values, scales)
    assert isinstance(weight, VnniWeight)
    restored = values.double() * scales.double()[:, None]
    step = x.double().abs().amax(dim=1, keepdim=True) / LARGEST_SPLIT
    bound = 0.51 * step * restored.abs().sum(dim=1) + 1e-5
    out = weight.matmul(x)
    assert out.dtype is torch.float32
    assert ((out.double() - x.double() @ restored.T).abs() <= bound).all()
