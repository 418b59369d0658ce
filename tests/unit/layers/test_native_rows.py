"""Native row functions and decode attention against float64; what a row may depend on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from layline.kernels import add_norm, rope, silu_mul
from layline.kernels.native.attend import attend_cache
from layline.kernels.native.rows import RowKernels, takes_norm
from support.native import NAMES, native

STEP = 2.0**-23  # Of FP32, relative.
FAR = torch.tensor([0.0, -0.0, 1e-30, -87.0, -88.5, -200.0, -1e30, 88.5, 1e30])


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def rows(tokens: int, size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(tokens, size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=30)
@given(tokens=st.integers(0, 40), pieces=st.integers(1, 40), scale=st.sampled_from([0.1, 1, 30]))
def test_silu_mul_is_that_of_float64(name: str, tokens: int, pieces: int, scale: float) -> None:
    size = 16 * pieces
    x = rows(tokens, 2 * size, pieces) * scale
    found = RowKernels(native(name)).silu_mul(x)
    gate, up = x.double().split(size, dim=1)
    expected = torch.nn.functional.silu(gate) * up
    assert found.shape == (tokens, size)
    assert torch.allclose(found.double(), expected, rtol=4 * STEP, atol=1e-30)


@pytest.mark.parametrize("name", NAMES)
def test_silu_mul_of_values_far_out(name: str) -> None:
    gate = torch.cat([FAR, torch.tensor([torch.inf, torch.nan, -torch.inf]), torch.zeros(4)])
    found = RowKernels(native(name)).silu_mul(torch.cat([gate, torch.ones(16)])[None])
    expected = torch.nn.functional.silu(gate.double())
    assert torch.allclose(found[0].double(), expected, rtol=4 * STEP, atol=1e-30, equal_nan=True)
    assert found[0, 10:12].isnan().all()


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=30)
@given(tokens=st.integers(0, 40), pieces=st.integers(1, 60), scale=st.sampled_from([0, 1e-4, 9]))
def test_add_norm_is_that_of_float64(name: str, tokens: int, pieces: int, scale: float) -> None:
    size = 16 * pieces
    output, residual = rows(tokens, size, 1) * scale, rows(tokens, size, 2) * scale
    weight, floor = add_norm.prepare_norm(rows(1, size, 3)[0], 1e-5)
    before = output.clone(), residual.clone()
    assert takes_norm(output, residual)
    normed, total = RowKernels(native(name)).add_rms_norm(output, residual, weight, float(floor))
    assert torch.equal(total, residual + output)
    exact = residual.double() + output.double()
    divisor = (exact.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    expected = exact / divisor * (weight.double() / size**0.5)
    # The sum's own rounding, and FP32 of everything after it.
    bound = expected.abs() * 12 * STEP + STEP * (output.abs() + residual.abs()) / divisor * 9
    assert ((normed.double() - expected).abs() <= bound).all()
    assert torch.equal(output, before[0])
    assert torch.equal(residual, before[1])


def test_rows_that_the_library_does_not_take_are_torchs() -> None:
    kernels = RowKernels(native(NAMES[-1]))
    odd, half = rows(3, 2 * 24), rows(3, 64).bfloat16()
    for x in (odd, half, rows(64, 3).T):
        assert torch.equal(kernels.silu_mul(x), silu_mul.silu_mul(x))
    assert not takes_norm(rows(3, 24), rows(3, 24))
    assert not takes_norm(rows(3, 64), half)
    assert not takes_norm(half, rows(3, 64))
    heads, cosines, sines = rows(3, 48).view(3, 3, 16), rows(3, 16)[:, None], rows(3, 16)[:, None]
    expected = rope.rotate_heads_(heads.clone(), cosines, sines)
    assert torch.equal(kernels.rotate_heads_(heads, cosines, sines), expected)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [32, 64, 96, 128])
@pytest.mark.parametrize("tokens", [0, 1, 5, 40])
def test_heads_rotate_in_place_and_their_neighbours_stay(name: str, size: int, tokens: int) -> None:
    projected = rows(tokens, 7 * size).view(tokens, 7, size)
    table = rows(tokens, 2 * size, 1)
    cosines, sines = table[:, None, :size], table[:, None, size:]
    expected = projected.clone()
    rope.rotate_heads_(expected[:, :5], cosines, sines)
    heads = projected[:, :5]
    assert RowKernels(native(name)).rotate_heads_(heads, cosines, sines) is heads
    assert torch.allclose(projected, expected, rtol=4 * STEP, atol=4 * STEP)
    assert torch.equal(projected[:, 5:], expected[:, 5:])


class Cached:
    """A cache in random order of slots, NaN where no sequence has a token, and queries."""

    def __init__(self, shape: tuple[int, int, int], counts: list[int], dtype: torch.dtype) -> None:
        heads, kv_heads, size = shape
        generator = torch.Generator().manual_seed(sum(counts))
        random: Callable[..., torch.Tensor] = lambda *of: torch.randn(*of, generator=generator)
        slots = sum(counts) + 9
        order = torch.randperm(slots, generator=generator)
        self.rows = torch.full((slots, 2, kv_heads, size), torch.nan).to(dtype)
        self.counts = torch.tensor(counts)
        self.slots = torch.full((len(counts), max(counts)), int(order[-1]))
        for sequence, (first, last) in enumerate(pairwise([0, *self.counts.cumsum(0).tolist()])):
            self.slots[sequence, : last - first] = order[first:last]
            self.rows[order[first:last]] = random(last - first, 2, kv_heads, size).to(dtype)
        # As a projection leaves them: other heads follow in the same row.
        self.q = random(len(counts), heads + 2 * kv_heads, size)[:, :heads]

    def attend(self, name: str) -> torch.Tensor:
        return attend_cache(native(name), self.q, self.rows, self.slots, self.counts)

    def expected(self) -> torch.Tensor:
        heads, size = self.q.shape[1:]
        kv_heads = self.rows.shape[2]
        found = []
        for q, slots, count in zip(self.q.double(), self.slots, self.counts, strict=True):
            keys, values = self.rows[slots[:count]].double().unbind(1)
            grouped = q.view(kv_heads, heads // kv_heads, size)
            weights = torch.einsum("kgd,tkd->kgt", grouped, keys) / size**0.5
            found.append(torch.einsum("kgt,tkd->kgd", weights.softmax(-1), values).flatten())
        return torch.stack(found)


SHAPES = [(1, 1, 16), (9, 3, 64), (8, 2, 80), (6, 1, 32), (16, 2, 128), (4, 4, 48)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("counts", [[1], [17, 1, 40], [16, 32, 5, 100, 33]], ids=len)
def test_decode_attention_is_that_of_float64(
    name: str, shape: tuple[int, int, int], dtype: torch.dtype, counts: list[int]
) -> None:
    cached = Cached(shape, counts, dtype)
    found = cached.attend(name)
    assert found.dtype is torch.float32
    assert torch.allclose(found.double(), cached.expected(), rtol=1e-5, atol=3e-6)


@pytest.mark.parametrize("name", NAMES)
def test_the_bound_would_see_one_token_less(name: str) -> None:
    cached = Cached((9, 3, 64), [40, 7], torch.bfloat16)
    cached.counts[0] -= 1
    found = cached.attend(name)
    cached.counts[0] += 1
    assert not torch.allclose(found.double(), cached.expected(), rtol=1e-5, atol=3e-6)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_row_depends_on_itself_alone(name: str, threads: int) -> None:
    """To the bit, in each function, whatever its neighbours and the number of threads."""
    torch.set_num_threads(1)
    kernels = RowKernels(native(name))
    gate_up, output, residual = rows(40, 2048), rows(40, 1024, 1), rows(40, 1024, 2)
    weight, floor = rows(1, 1024, 3)[0], 0.1
    cached = Cached((9, 3, 64), [33, 1, 90, 16], torch.bfloat16)
    gated = torch.cat([kernels.silu_mul(row[None]) for row in gate_up])
    pairs = zip(output, residual, strict=True)
    normed = [kernels.add_rms_norm(a[None], b[None], weight, floor)[0] for a, b in pairs]
    alone = []
    for b in range(4):
        parts = cached.q[b : b + 1], cached.slots[b : b + 1], cached.counts[b : b + 1]
        alone.append(attend_cache(native(name), parts[0], cached.rows, *parts[1:]))
    torch.set_num_threads(threads)
    assert torch.equal(kernels.silu_mul(gate_up), gated)
    together = kernels.add_rms_norm(output, residual, weight, floor)[0]
    assert torch.equal(together, torch.cat(normed))
    assert torch.equal(cached.attend(name), torch.cat(alone))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("where", ["query", "key", "value", "infinite"])
def test_what_is_no_number_stays_with_its_sequence(name: str, where: str) -> None:
    cached = Cached((4, 2, 32), [20, 30, 7], torch.float32)
    clean = cached.attend(name)
    row = cached.rows[cached.slots[1, 3]]
    if where == "query":
        cached.q[1, 0, 5] = torch.nan
    elif where == "key":
        row[0, 0, 5] = torch.nan
    elif where == "value":
        row[1, 0, 5] = torch.nan
    else:
        row[0, 0, 5] = torch.inf
    found = cached.attend(name)
    assert torch.equal(found[[0, 2]], clean[[0, 2]])
    assert found[1, :32].isnan().any()
    assert not found[1, 64:].isnan().any()


def test_caches_that_it_cannot_read_are_refused() -> None:
    cached = Cached((4, 2, 32), [5], torch.float16)
    with pytest.raises(ValueError, match=r"torch\.float16"):
        cached.attend(NAMES[-1])
    with pytest.raises(ValueError, match="heads of 24"):
        Cached((4, 2, 24), [5], torch.float32).attend(NAMES[-1])
