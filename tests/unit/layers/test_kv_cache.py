"""Caches of keys and values: what 8 bits cost, what must not cross heads, and damage that shows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from layline.kernels.kv_rounding import LARGEST, SCALE_DTYPE, round_heads
from layline.layers.kv_cache import KVCache, PlainCache, QuantisedCache

INT8, FP8 = torch.int8, torch.float8_e4m3fn
QUANTISED = pytest.mark.parametrize("stored", [INT8, FP8], ids=["int8", "fp8"])
SLOTS, HEADS, SIZE = 12, 3, 8


def quantised(
    stored: torch.dtype, dtype: torch.dtype = torch.float32, heads: int = HEADS, size: int = SIZE
) -> QuantisedCache:
    values = torch.zeros(SLOTS, 2, heads, size, dtype=stored)
    return QuantisedCache(values, torch.zeros(SLOTS, 2, heads, dtype=SCALE_DTYPE), dtype)


def normal(rows: int, heads: int = HEADS, size: int = SIZE, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 2, heads, size, generator=generator)


def error_bound(stored: torch.dtype, kv: torch.Tensor) -> torch.Tensor:
    """The most that each value of ``kv`` (float64) may be off by, from the formats alone.

    A bfloat16 scale is within 1/256 of the exact one, or the smallest normal number; int8 rounds
    to half a step of it, e4m3 to 1/16 of the value or 1/1024 of the scale; FP32 division and
    product add a rounding each.
    """
    largest = kv.abs().amax(-1, keepdim=True)
    scale = (largest / LARGEST[stored]).clamp_min(torch.finfo(SCALE_DTYPE).tiny) * (1 + 2**-8)
    fine = kv.abs() * 2**-22
    if stored is INT8:
        return scale / 2 + fine
    return torch.maximum(kv.abs() / 16, scale * 2**-10) + fine


magnitudes = st.sampled_from([0.0, 1e-45, 1e-38, 1e-20, 1e-3, 1.0, 37.5, 448.0, 6e4, 1e20, 1e37])


@QUANTISED
@given(data=st.data())
def test_the_error_of_a_round_trip_is_bounded(stored: torch.dtype, data: st.DataObject) -> None:
    rows, heads, size = (data.draw(st.integers(1, most)) for most in (5, 4, 9))
    kv = normal(rows, heads, size, data.draw(st.integers(0, 1000)))
    for row in kv.view(-1, size):
        row.mul_(data.draw(magnitudes) / max(float(row.abs().max()), 1e-6))
        row[data.draw(st.integers(0, size - 1))] *= data.draw(st.sampled_from([0.0, 1.0, 1e-5]))
    cache = quantised(stored, heads=heads, size=size)
    cache.write(slice(2, 2 + rows), kv)
    found = cache.read(slice(2, 2 + rows))
    assert found.dtype is torch.float32
    wrong = (found.double() - kv.double()).abs()
    assert (wrong <= error_bound(stored, kv.double())).all()
    assert torch.equal(found, cache.rounded(kv))


@QUANTISED
def test_values_in_range_are_not_all_kept_exactly(stored: torch.dtype) -> None:
    kv = normal(4)
    assert not torch.equal(quantised(stored).rounded(kv), kv)
    assert ((quantised(stored).rounded(kv) - kv).abs() > error_bound(stored, kv.double()) / 4).any()


@QUANTISED
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_reads_in_the_type_of_the_run(stored: torch.dtype, dtype: torch.dtype) -> None:
    cache, kv = quantised(stored, dtype), normal(3).to(dtype)
    cache.write(torch.tensor([7, 2, 9]), kv)
    found = cache.read(torch.tensor([9, 7]))
    assert found.dtype is dtype is cache.dtype
    half = torch.finfo(dtype).eps / 2
    wrong = (found.double() - kv[[2, 0]].double()).abs()
    assert (wrong <= error_bound(stored, kv[[2, 0]].double()) + found.double().abs() * half).all()


@QUANTISED
def test_an_outlier_costs_its_own_head_of_its_own_token_only(stored: torch.dtype) -> None:
    kv = normal(4)
    loud = kv.clone()
    loud[1, 0, 2, 5] = 3e4
    before, after = quantised(stored).rounded(kv), quantised(stored).rounded(loud)
    changed = (before != after).flatten(3).any(-1)
    assert changed[1, 0, 2]
    changed[1, 0, 2] = False
    assert not changed.any()


@QUANTISED
def test_zeros_stay_zero_and_overflow_stays_finite(stored: torch.dtype) -> None:
    cache = quantised(stored)
    assert not cache.read(slice(0, SLOTS)).any()
    assert not cache.read(torch.tensor([0, 0, 3])).any()
    kv = torch.zeros(2, 2, HEADS, SIZE)
    # One that its scale, rounded down to bfloat16, leaves above the format's largest number.
    kv[1] = LARGEST[stored] * (1 + 2**-8 - 2**-16)
    values, scales = round_heads(kv, stored)
    assert float(scales[1].max()) < float(kv.max()) / LARGEST[stored]
    cache.write(slice(4, 6), kv)
    found = cache.read(slice(4, 6))
    assert not found[0].any()
    assert values[1].float().eq(LARGEST[stored]).all()
    assert found.isfinite().all()


@QUANTISED
@pytest.mark.parametrize("damage", [float("nan"), float("inf"), float("-inf")])
def test_damage_stays_visible_in_its_head(stored: torch.dtype, damage: float) -> None:
    cache, kv = quantised(stored), normal(3)
    kv[1, 1, 0, 3] = damage
    cache.write(slice(1, 4), kv)
    found = cache.read(slice(1, 4))
    assert found[1, 1, 0].isnan().all()
    found[1, 1, 0] = 0.0
    assert found.isfinite().all()


@QUANTISED
def test_the_storage_has_8_bits(stored: torch.dtype) -> None:
    cache = quantised(stored)
    values, scales = cache.tensors
    assert (values.dtype, scales.dtype) == (stored, torch.bfloat16)
    assert values.element_size() == 1
    assert cache.nbytes == SLOTS * 2 * HEADS * (SIZE + 2)
    cache.write(slice(3, 4), normal(1))
    assert values[3].float().abs().amax(-1).ge(0.99 * LARGEST[stored]).all()
    assert not values[4:].float().any()


@pytest.mark.parametrize("kind", ["plain", "int8", "fp8"])
def test_stored_rows_may_be_written_elsewhere(kind: str) -> None:
    def made() -> KVCache:
        if kind == "plain":
            return PlainCache(torch.zeros(SLOTS, 2, HEADS, SIZE, dtype=torch.bfloat16))
        return quantised(INT8 if kind == "int8" else FP8)

    here, there, kv = made(), made(), normal(5)
    rows = here.stored(kv)
    nothing = here.stored(None)
    assert nothing.shape == (0, rows.shape[1])
    assert nothing.dtype is rows.dtype
    assert rows.nbytes * SLOTS == here.nbytes * 5, "a stored row has a slot's bytes"
    slots = torch.tensor([9, 1, 4, 5, 2])
    here.write(slots, kv)
    there.write_stored(slots, rows)
    for one, other in zip(here.tensors, there.tensors, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    there.write_stored(slice(6, 8), rows[:2])
    assert torch.equal(there.read(slice(6, 8)), here.read(slots[:2]))


def test_a_plain_cache_is_read_in_place_and_rounds_nothing_of_its_own_type() -> None:
    rows, kv = torch.zeros(SLOTS, 2, HEADS, SIZE), normal(2)
    cache = PlainCache(rows)
    cache.write(slice(3, 5), kv)
    assert cache.read(slice(3, 5)).data_ptr() == rows[3].data_ptr()
    assert cache.rounded(kv) is kv
    cache.write(torch.tensor([8]), kv[1:])
    assert torch.equal(rows[8], kv[1])
    assert (cache.num_slots, cache.nbytes, cache.dtype) == (SLOTS, rows.nbytes, torch.float32)
