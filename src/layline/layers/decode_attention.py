"""Attention of sequences that have one query each, over a paged cache.

Shape suffixes: B sequences, L cache rows of a sequence, N query heads, K key/value heads, G query
heads of a key head, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from layline.kernels.native.attend import attend_cache
from layline.kernels.native.library import NativeLibrary
from layline.layers.cache_slots import Reach, padded_slots, visible
from layline.layers.kv_cache import KVCache, PlainCache
from layline.layers.spans import SequenceSpan
from layline.layers.transfer import upload


class DecodePlan:
    """What a :class:`DecodeAttention` prepared for one step and window."""

    __slots__ = ()


class DecodeAttention(Protocol):
    """How queries that stand alone read the cache. One object serves all layers of a device."""

    def plan(self, spans: Sequence[SequenceSpan], window: int | None) -> DecodePlan:
        """Prepare a step with one token of each span, its last."""

    def attend(self, q_BND: torch.Tensor, cache: KVCache, plan: DecodePlan) -> torch.Tensor:
        """Attend to the cache, which already holds this step's rows; [B, N x D]."""


@dataclass(frozen=True, slots=True)
class _Padded(DecodePlan):
    """Rows padded to the longest; ``mask`` [B, 1, 1, L] hides padding."""

    reach: Reach
    mask: torch.Tensor | None


class PaddedDecode:
    """One call of torch's scaled_dot_product_attention, on rows gathered for it."""

    def __init__(self, block_size: int, device: torch.device, dtype: torch.dtype) -> None:
        """``dtype`` is what it computes in."""
        self._block_size = block_size
        self._device = device
        self._dtype = dtype

    def plan(self, spans: Sequence[SequenceSpan], window: int | None) -> _Padded:
        """See DecodeAttention."""
        firsts, counts = visible(spans, window)
        if len(spans) == 1:
            return _Padded(Reach.of(spans[0], firsts[0], self._block_size, self._device), None)
        slots, ended = padded_slots(spans, firsts, counts, self._block_size)
        gather = upload(slots.reshape(-1), self._device)
        mask = None
        if ended.any():
            mask = torch.zeros(len(spans), 1, 1, slots.shape[1], dtype=self._dtype)
            mask[torch.from_numpy(ended)[:, None, None, :]] = float("-inf")
            mask = upload(mask, self._device)
        return _Padded(Reach(0, 0, gather), mask)

    def attend(self, q_BND: torch.Tensor, cache: KVCache, plan: DecodePlan) -> torch.Tensor:
        """See DecodeAttention."""
        assert isinstance(plan, _Padded)
        batch, heads, size = q_BND.shape
        rows = plan.reach.read(cache)
        kv_heads = rows.shape[2]
        keys, values = rows.view(batch, -1, 2, kv_heads, size).permute(2, 0, 3, 1, 4).unbind(0)
        # The queries that share a key head become rows of it: grouped attention without copies.
        q_BKGD = q_BND.view(batch, kv_heads, heads // kv_heads, size)
        q_BKGD, keys, values = (each.to(self._dtype) for each in (q_BKGD, keys, values))
        out = F.scaled_dot_product_attention(q_BKGD, keys, values, attn_mask=plan.mask)
        return out.reshape(batch, heads * size).to(q_BND.dtype)


@dataclass(frozen=True, slots=True)
class _Slots(DecodePlan):
    """``slots`` [B, L], of which each sequence has the first ``counts`` [B]; int64."""

    slots: torch.Tensor
    counts: torch.Tensor


class NativeDecode:
    """The native kernel, in FP32, on the rows of a plain cache where they lie."""

    def __init__(self, library: NativeLibrary, block_size: int) -> None:
        self._library = library
        self._block_size = block_size

    def plan(self, spans: Sequence[SequenceSpan], window: int | None) -> _Slots:
        """See DecodeAttention."""
        firsts, counts = visible(spans, window)
        slots, _ = padded_slots(spans, firsts, counts, self._block_size)
        return _Slots(torch.from_numpy(slots), torch.tensor(counts))

    def attend(self, q_BND: torch.Tensor, cache: KVCache, plan: DecodePlan) -> torch.Tensor:
        """See DecodeAttention."""
        assert isinstance(plan, _Slots)
        assert isinstance(cache, PlainCache)
        (rows,) = cache.tensors
        return attend_cache(self._library, q_BND, rows, plan.slots, plan.counts)
