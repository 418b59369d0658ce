"""Row functions of batch-invariant runs, bit by bit, and the check that refuses what is none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from layline.errors import UsageError
from layline.kernels.kv_rounding import SCALE_DTYPE
from layline.kernels.silu_mul import silu_mul, undivided_silu_mul
from layline.kernels.tiled_matmul import TILE, tiled_matmul
from layline.layers.cache_slots import slot_numbers
from layline.layers.invariance import RowClaims, rotation_of_rows, same_bits
from layline.layers.invariant_attention import InvariantAttention
from layline.layers.kv_cache import KVCache, PlainCache, QuantisedCache
from layline.layers.spans import MixedPhase, Phase, SequenceSpan, StepPhase

CPU = torch.device("cpu")
SIZES = [(48, 199), (80, 48), (576, 960), (1536, 576), (33, 7)]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@DTYPES
@pytest.mark.parametrize(("columns", "rows"), SIZES)
def test_a_row_of_a_product_is_the_same_at_every_place(
    threads: int, columns: int, rows: int, dtype: torch.dtype
) -> None:
    weight = (normal(rows, columns) * columns**-0.5).to(dtype)
    bias = normal(rows, seed=1).to(dtype)
    x = normal(3 * TILE + 1, columns, seed=2).to(dtype)
    alone = torch.cat([tiled_matmul(row, weight, bias) for row in x.split(1)])
    assert alone.dtype is dtype
    for count in (2, 3, TILE - 1, TILE, TILE + 1, 2 * TILE, len(x)):
        for first in (0, 1, len(x) - count):
            part = slice(first, first + count)
            assert same_bits(tiled_matmul(x[part], weight, bias), alone[part])
    exact = x.double() @ weight.double().T + bias.double()
    assert (alone.double() - exact).abs().max() < 4 * torch.finfo(dtype).eps * exact.abs().max()
    assert tiled_matmul(x[:0], weight, None).shape == (0, rows)


def test_a_plain_product_is_not() -> None:
    weight, x = normal(960, 576), normal(17, 576, seed=1)
    whole = F.linear(x, weight)
    assert not same_bits(F.linear(x[:1], weight), whole[:1])


@DTYPES
@pytest.mark.parametrize("size", [80, 1536, 5001, 40000])
def test_a_row_of_swiglu_is_the_same_in_every_batch(
    threads: int, size: int, dtype: torch.dtype
) -> None:
    x = normal(33, 2 * size).to(dtype)
    alone = torch.cat([undivided_silu_mul(row) for row in x.split(1)])
    for count in (2, 17, 33):
        assert same_bits(undivided_silu_mul(x[:count]), alone[:count])
    torch.testing.assert_close(alone, silu_mul(x))


@pytest.mark.parametrize("kind", ["matmul", "elementwise"])
def test_a_function_that_knows_its_batch_is_refused(kind: str) -> None:
    def scaled_by_rows(x: torch.Tensor) -> torch.Tensor:
        return x * (1 + x.shape[0] * 2**-20)

    def knows_its_place(x: torch.Tensor) -> torch.Tensor:
        return x + torch.arange(x.shape[0])[:, None] * 2**-20

    for planted in (scaled_by_rows, knows_its_place):
        claims = RowClaims()
        getattr(claims, kind)("planted product", planted, 64)
        with pytest.raises(UsageError, match=r"does not hold here: .* planted product in float32"):
            claims.check(torch.float32, CPU)
    claims = RowClaims()
    getattr(claims, kind)("sum", lambda x: x + 1, 64)
    claims.elementwise("rotation", *rotation_of_rows(3, 64))
    claims.check(torch.float32, CPU)
    claims.check(torch.bfloat16, CPU)


BLOCK, HEADS, KV_HEADS, SIZE = 4, 6, 2, 8
BLOCKS = [[5, 2, 9, 1, 12, 3, 14, 11, 6, 17], [4, 7, 8, 10, 13, 15, 16, 18, 19, 20]]
LENGTH = 37


def caches() -> list[KVCache]:
    slots = 21 * BLOCK
    values = torch.zeros(slots, 2, KV_HEADS, SIZE, dtype=torch.int8)
    scales = torch.zeros(slots, 2, KV_HEADS, dtype=SCALE_DTYPE)
    return [
        PlainCache(torch.zeros(slots, 2, KV_HEADS, SIZE)),
        QuantisedCache(values, scales, torch.float32),
    ]


def span(which: int, start: int, count: int) -> SequenceSpan:
    return SequenceSpan(start, count, BLOCKS[which], rope_length=LENGTH)


# Each step is a phase and its spans; together they hold every token of both sequences.
WAYS: dict[str, list[tuple[StepPhase, list[SequenceSpan]]]] = {
    "whole": [(Phase.PREFILL, [span(0, 0, LENGTH), span(1, 0, LENGTH)])],
    "chunks": [
        (Phase.PREFILL, [span(0, 0, 7)]),
        (Phase.PREFILL, [span(1, 0, 18), span(0, 7, 20)]),
        (MixedPhase(2), [span(0, 27, 1), span(0, 28, 1), span(1, 18, 19)]),
        (Phase.PREFILL, [span(0, 29, 8)]),
    ],
    "tokens": [(Phase.DECODE, [span(0, at, 1), span(1, at, 1)]) for at in range(LENGTH)],
}


def walked(
    q: torch.Tensor, kv: torch.Tensor, cache: KVCache, way: str, window: int | None
) -> torch.Tensor:
    """Outputs of every token, [sequences, tokens, N x D], of steps that divide them this way."""
    backend, out = InvariantAttention(BLOCK), torch.full((2, LENGTH, HEADS * SIZE), float("nan"))
    for phase, spans in WAYS[way]:
        parts = [(BLOCKS.index(list(s.blocks)), slice(s.start, s.length)) for s in spans]
        for (which, part), each in zip(parts, spans, strict=True):
            slots = slot_numbers(each, each.start, each.length, BLOCK)
            cache.write(torch.from_numpy(slots), kv[which, part])
        plan = backend.plan(phase, spans, frozenset({window}))
        queries, own = (torch.cat([x[part] for part in parts]) for x in (q, kv))
        rows = backend.attend(queries, own, cache, plan, window)
        for part, found in zip(parts, rows.split([s.count for s in spans]), strict=True):
            out[part] = found
    return out


@pytest.mark.parametrize("window", [None, 1, 5, 16, 30])
@pytest.mark.parametrize("quantised", [False, True])
def test_attention_is_the_same_however_tokens_are_divided(
    threads: int, window: int | None, quantised: bool
) -> None:
    q = normal(2, LENGTH, HEADS, SIZE)
    kv = normal(2, LENGTH, 2, KV_HEADS, SIZE, seed=1)
    found = {}
    for way in WAYS:
        cache = caches()[quantised]
        for stored in cache.tensors:
            stored[BLOCK:].fill_(float("nan") if stored.is_floating_point() else 127)
        found[way] = walked(q, kv, cache, way, window)
        assert found[way].isfinite().all()
    assert same_bits(found["whole"], found["chunks"])
    assert same_bits(found["whole"], found["tokens"])
    if not quantised:
        exact = exact_attention(q, kv, window).float()
        torch.testing.assert_close(found["whole"], exact, atol=1e-5, rtol=1e-4)


def exact_attention(q: torch.Tensor, kv: torch.Tensor, window: int | None) -> torch.Tensor:
    """Softmax attention written out in float64."""
    keys, values = kv.double().repeat_interleave(HEADS // KV_HEADS, dim=3).unbind(2)
    scores = torch.einsum("bqnd,bknd->bnqk", q.double(), keys) * SIZE**-0.5
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)[None, :]
    hidden = (distance < 0) | (distance >= (window or LENGTH))
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("bnqk,bknd->bqnd", weights, values).flatten(2)
