"""Attention over a paged key-value cache, behind one backend interface.

Shape suffixes: T token rows, B sequences, L cache rows of a sequence, N query heads, K key/value
heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

from layline.layers.forward_batch import AttentionPlan
from layline.layers.kv_cache import KVCache
from layline.layers.spans import MixedPhase, Phase, SequenceSpan, StepPhase
from layline.layers.transfer import upload

QUERY_ROWS = 128
NULL_SLOT = 0  # Block 0 is never given to a sequence; its rows stay zero, so padding reads zeros.


class AttentionBackend(Protocol):
    """How attention reads the cache. One object serves all layers of a device."""

    def plan(
        self, phase: StepPhase, spans: Sequence[SequenceSpan], windows: frozenset[int | None]
    ) -> AttentionPlan:
        """Prepare a step whose rows are the spans' tokens in order, those that decode first."""

    def attend(
        self,
        q_TND: torch.Tensor,
        kv_T2KD: torch.Tensor,
        cache: KVCache,
        plan: AttentionPlan,
        window: int | None,
    ) -> torch.Tensor:
        """Attend to the cache, which already holds this step's rows ``kv_T2KD``; [T, N x D]."""


@dataclass(frozen=True, slots=True)
class _Reach:
    """Cache rows that a group of sequences reads: a range of slots, or a list to gather."""

    first: int
    last: int
    gather: torch.Tensor | None

    def read(self, cache: KVCache) -> torch.Tensor:
        if self.gather is None:
            return cache.read(slice(self.first, self.last))
        return cache.read(self.gather)


@dataclass(frozen=True, slots=True)
class _DecodeReach:
    """A decode step's rows, padded to the longest; ``mask`` [B, 1, 1, L] hides padding."""

    reach: _Reach
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _Segment:
    """Consecutive query rows of one sequence in a prefill step, with the keys they may see.

    The keys are rows of this step (``own``) when the sequence starts in it, else cache rows
    (``reach``). ``mask`` [queries, keys] is None where plain causal attention is meant.
    """

    rows: slice
    own: slice | None
    reach: _Reach | None
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class TorchAttentionPlan(AttentionPlan):
    """Prepared reads for each attention window of the model.

    The first ``num_decode`` rows decode; ``prefill`` names the rows of each of its segments.
    """

    num_decode: int
    decode: dict[int | None, _DecodeReach]
    prefill: dict[int | None, tuple[_Segment, ...]]


class TorchAttention:
    """Backend on torch's scaled_dot_product_attention, for the CPU and for eager CUDA."""

    def __init__(self, block_size: int, device: torch.device, dtype: torch.dtype) -> None:
        """``dtype`` is what decode computes in; prefill computes in that of its queries."""
        self._block_size = block_size
        self._device = device
        self._dtype = dtype
        if device.type == "cuda":
            # cuDNN builds a new plan for every length it meets, 1.5 ms each on an H200, and a
            # decode step meets a new one each time. Torch has this switch for the process only.
            torch.backends.cuda.enable_cudnn_sdp(False)

    def plan(
        self, phase: StepPhase, spans: Sequence[SequenceSpan], windows: frozenset[int | None]
    ) -> TorchAttentionPlan:
        """Prepare one step; decode spans have one token each. A rank may have none."""
        if isinstance(phase, MixedPhase):
            count = phase.num_decode
        else:
            count = len(spans) if phase is Phase.DECODE else 0
        ones, prompts = spans[:count], spans[count:]
        decode = {window: self._decode_reach(ones, window) for window in windows if ones}
        prefill = {window: self._segments(prompts, count, window) for window in windows if prompts}
        return TorchAttentionPlan(count, decode, prefill)

    def attend(
        self,
        q_TND: torch.Tensor,
        kv_T2KD: torch.Tensor,
        cache: KVCache,
        plan: AttentionPlan,
        window: int | None,
    ) -> torch.Tensor:
        """See AttentionBackend.attend."""
        assert isinstance(plan, TorchAttentionPlan)
        segments = plan.prefill.get(window, ())
        # A sequence's own rows are rounded as the cache rounds them: a chunk must not see more
        # than the next chunk will.
        if any(segment.reach is None for segment in segments):
            kv_T2KD = cache.rounded(kv_T2KD)
        outputs = [self._prefill(q_TND, kv_T2KD, cache, segment) for segment in segments]
        if plan.decode:
            decoded = self._decode(q_TND[: plan.num_decode], kv_T2KD, cache, plan, window)
            outputs.insert(0, decoded)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _decode(
        self,
        q_TND: torch.Tensor,
        kv_T2KD: torch.Tensor,
        cache: KVCache,
        plan: TorchAttentionPlan,
        window: int | None,
    ) -> torch.Tensor:
        batch, heads, size = q_TND.shape
        kv_heads = kv_T2KD.shape[2]
        step = plan.decode[window]
        rows = step.reach.read(cache)
        keys, values = rows.view(batch, -1, 2, kv_heads, size).permute(2, 0, 3, 1, 4).unbind(0)
        # The queries that share a key head become rows of it: grouped attention without copies.
        q_BKGD = q_TND.view(batch, kv_heads, heads // kv_heads, size)
        q_BKGD, keys, values = (each.to(self._dtype) for each in (q_BKGD, keys, values))
        out = F.scaled_dot_product_attention(q_BKGD, keys, values, attn_mask=step.mask)
        return out.reshape(batch, heads * size).to(q_TND.dtype)

    def _prefill(
        self,
        q_TND: torch.Tensor,
        kv_T2KD: torch.Tensor,
        cache: KVCache,
        segment: _Segment,
    ) -> torch.Tensor:
        own = kv_T2KD[segment.own] if segment.reach is None else segment.reach.read(cache)
        keys, values = own.permute(1, 2, 0, 3).unsqueeze(1).unbind(0)
        q_1NTD = q_TND[segment.rows].transpose(0, 1).unsqueeze(0)
        # Queries come in FP32 where prefill computes in it, and a cache may be wider than the run.
        dtype = torch.promote_types(q_TND.dtype, keys.dtype)
        q_1NTD, keys, values = (each.to(dtype) for each in (q_1NTD, keys, values))
        out = F.scaled_dot_product_attention(
            q_1NTD,
            keys,
            values,
            attn_mask=segment.mask,
            is_causal=segment.mask is None,
            enable_gqa=q_1NTD.shape[1] != keys.shape[1],
        )
        return out.squeeze(0).transpose(0, 1).flatten(1).to(q_TND.dtype)

    def _decode_reach(self, spans: Sequence[SequenceSpan], window: int | None) -> _DecodeReach:
        firsts = [0 if window is None else max(0, span.length - window) for span in spans]
        counts = [span.length - first for span, first in zip(spans, firsts, strict=True)]
        if len(spans) == 1:
            return _DecodeReach(self._reach(spans[0], firsts[0]), None)
        longest = max(counts)
        hidden = np.arange(longest)[None, :] >= np.asarray(counts)[:, None]
        slots = self._slots_from(spans, firsts, longest)
        slots[hidden] = NULL_SLOT
        gather = upload(slots.reshape(-1), self._device)
        mask = None
        if min(counts) != longest:
            mask = torch.zeros(len(spans), 1, 1, longest, dtype=self._dtype)
            mask[torch.from_numpy(hidden)[:, None, None, :]] = float("-inf")
            mask = upload(mask, self._device)
        return _DecodeReach(_Reach(0, 0, gather), mask)

    def _slots_from(
        self, spans: Sequence[SequenceSpan], firsts: Sequence[int], count: int
    ) -> np.ndarray:
        """Slots of ``count`` tokens of each span from ``firsts`` on, int64 [spans, count].

        All spans at once: a step of many sequences would spend longer on calls than on numbers.
        Past the end of a block table they are those of block 0.
        """
        size = self._block_size
        tables = np.array(list(zip_longest(*[span.blocks for span in spans], fillvalue=0))).T
        tokens = np.asarray(firsts)[:, None] + np.arange(count)[None, :]
        blocks = np.minimum(tokens // size, tables.shape[1] - 1)
        slots: np.ndarray = np.take_along_axis(tables, blocks, axis=1) * size + tokens % size
        return slots

    def _segments(
        self, spans: Sequence[SequenceSpan], row: int, window: int | None
    ) -> tuple[_Segment, ...]:
        """Segments of ``spans``, the first of which begins at ``row`` of the step."""
        segments: list[_Segment] = []
        for span in spans:
            # Rows in blocks, each with the keys up to its last: hidden scores are not computed.
            step = QUERY_ROWS if self._device.type == "cpu" else span.count
            for offset in range(0, span.count, step):
                start, count = span.start + offset, min(step, span.count - offset)
                part = replace(span, start=start, count=count)
                first = 0 if window is None else max(0, start - window + 1)
                own = reach = None
                if span.start:
                    reach = self._reach(part, first)
                else:
                    own = slice(row + first, row + part.length)
                rows = slice(row + offset, row + offset + count)
                segments.append(_Segment(rows, own, reach, self._mask(part, first, window)))
            row += span.count
        return tuple(segments)

    def _mask(self, span: SequenceSpan, first: int, window: int | None) -> torch.Tensor | None:
        """True where a query may see a key from ``first`` on; None for plain causal attention."""
        slides = window is not None and span.length > window
        if not slides and span.start == 0:
            return None
        queries = torch.arange(span.start, span.length, device=self._device)[:, None]
        keys = torch.arange(first, span.length, device=self._device)[None, :]
        mask = keys <= queries
        if window is not None:
            mask &= keys > queries - window
        return mask

    def _reach(self, span: SequenceSpan, first: int) -> _Reach:
        slots = slot_numbers(span, first, span.length, self._block_size)
        start = int(slots[0])
        if int(slots[-1]) - start == len(slots) - 1 and bool((np.diff(slots) == 1).all()):
            return _Reach(start, start + len(slots), None)
        return _Reach(0, 0, upload(slots, self._device))


def slot_numbers(span: SequenceSpan, first: int, last: int, block_size: int) -> np.ndarray:
    """Cache slots of the span's tokens ``first`` .. ``last - 1``, int64 [last - first]."""
    tokens = np.arange(first, last, dtype=np.int64)
    blocks = np.asarray(span.blocks, dtype=np.int64)
    slots: np.ndarray = blocks[tokens // block_size] * block_size + tokens % block_size
    return slots
