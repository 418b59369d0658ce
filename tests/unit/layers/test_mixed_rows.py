"""Rows of both phases in one call: each as its own phase computes it."""

from __future__ import annotations

import pytest
import torch

from layline.layers.attention import TorchAttention
from layline.layers.decode_attention import PaddedDecode
from layline.layers.kv_cache import PlainCache
from layline.layers.linear import Linear
from layline.layers.spans import MixedPhase, Phase, SequenceSpan, step_phase

CPU = torch.device("cpu")
BLOCK, SLOTS = 4, 80
WINDOWS = frozenset({None, 5})


class Marked:
    """A packed weight that keeps how many rows it was given, in ``dtype``."""

    num_bytes = 7

    def __init__(self, serves_prefill: bool, dtype: torch.dtype = torch.float32) -> None:
        self.serves_prefill = serves_prefill
        self.rows: list[int] = []
        self._dtype = dtype

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        self.rows.append(x.shape[0])
        return torch.full((x.shape[0], 3), 42.0, dtype=self._dtype)


def test_a_step_has_one_phase_or_both() -> None:
    assert step_phase(0, 0) is Phase.DECODE
    assert step_phase(3, 3) is Phase.DECODE
    assert step_phase(0, 3) is Phase.PREFILL
    assert step_phase(2, 3) == MixedPhase(2)


def test_each_row_goes_through_the_kernel_of_its_phase() -> None:
    packed = Marked(serves_prefill=False)
    layer = Linear(torch.zeros(3, 4), None, packed)
    out = layer(torch.ones(7, 4), MixedPhase(2))
    assert (out[:2] == 42).all()
    assert (out[2:] == 0).all()
    assert packed.rows == [2]


def test_one_kernel_runs_once_over_all_rows() -> None:
    packed = Marked(serves_prefill=True)
    out = Linear(None, torch.ones(3), packed)(torch.ones(7, 4), MixedPhase(2))
    assert (out == 43).all()
    assert packed.rows == [7]
    layer = Linear(torch.randn(3, 4))
    x = torch.randn(7, 4)
    assert torch.equal(layer(x, MixedPhase(2)), layer(x, Phase.PREFILL))


@pytest.mark.parametrize("slow", [True, False])
def test_the_wider_type_is_used_and_nothing_is_rounded(
    monkeypatch: pytest.MonkeyPatch, slow: bool
) -> None:
    monkeypatch.setattr("layline.layers.linear.wide_bfloat16_is_slow", lambda: slow)
    generator = torch.Generator().manual_seed(0)
    weight, x = (
        torch.randn(*shape, generator=generator).to(torch.bfloat16) for shape in ((48, 64), (9, 64))
    )
    layer = Linear(weight)
    out = layer(x, MixedPhase(4))
    wider = torch.float32 if slow else torch.bfloat16
    assert out.dtype is wider
    assert layer.output_dtype(MixedPhase(4)) is wider
    if slow:
        assert torch.equal(out[:4], layer(x[:4], Phase.DECODE).float())
        assert torch.equal(out[4:], layer(x[4:], Phase.PREFILL))


def attended(
    backend: TorchAttention, phase: Phase | MixedPhase, spans: list[SequenceSpan], row: int
) -> list[torch.Tensor]:
    """Outputs for each window, of rows ``row`` .. of the same queries, keys and values."""
    generator = torch.Generator().manual_seed(1)
    cache = torch.randn(SLOTS, 2, 2, 8, generator=generator)
    q = torch.randn(20, 6, 8, generator=generator)
    kv = torch.randn(20, 2, 2, 8, generator=generator)
    cache[:BLOCK] = 0
    stop = row + sum(span.count for span in spans)
    plan = backend.plan(phase, spans, WINDOWS)
    held = PlainCache(cache)
    return [backend.attend(q[row:stop], kv[row:stop], held, plan, window) for window in (None, 5)]


@pytest.mark.parametrize("num_decode", [1, 3])
def test_attention_is_bitwise_that_of_each_phase_alone(num_decode: int) -> None:
    backend = TorchAttention(BLOCK, CPU, PaddedDecode(BLOCK, CPU, torch.float32))
    starts = (9, 2, 14)[:num_decode]
    ones = [
        SequenceSpan(at, 1, [1 + 4 * i, 2 + 4 * i, 3 + 4 * i, 4 + 4 * i], at + 1)
        for i, at in enumerate(starts)
    ]
    prompts = [SequenceSpan(0, 7, [13, 14], 7), SequenceSpan(6, 3, [16, 15, 17], 9)]
    both = attended(backend, MixedPhase(num_decode), [*ones, *prompts], 0)
    decoded = attended(backend, Phase.DECODE, ones, 0)
    prefilled = attended(backend, Phase.PREFILL, prompts, num_decode)
    for mixed, first, rest in zip(both, decoded, prefilled, strict=True):
        assert torch.equal(mixed, torch.cat([first, rest]))
    assert not torch.allclose(both[0], both[1]), "the window hides nothing"
