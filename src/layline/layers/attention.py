"""Attention over a paged key-value cache, behind one backend interface.

Shape suffixes: T token rows, N query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F

from layline.layers.cache_slots import Reach
from layline.layers.decode_attention import DecodeAttention, DecodePlan
from layline.layers.forward_batch import AttentionPlan
from layline.layers.kv_cache import KVCache
from layline.layers.spans import MixedPhase, Phase, SequenceSpan, StepPhase

QUERY_ROWS = 128


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
class _Segment:
    """Consecutive query rows of one sequence in a prefill step, with the keys they may see.

    The keys are rows of this step (``own``) when the sequence starts in it, else cache rows
    (``reach``). ``mask`` [queries, keys] is None where plain causal attention is meant.
    """

    rows: slice
    own: slice | None
    reach: Reach | None
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class TorchAttentionPlan(AttentionPlan):
    """Prepared reads for each attention window of the model.

    The first ``num_decode`` rows decode; ``prefill`` names the rows of each of its segments.
    """

    num_decode: int
    decode: dict[int | None, DecodePlan]
    prefill: dict[int | None, tuple[_Segment, ...]]


class TorchAttention:
    """Backend on torch's scaled_dot_product_attention, for the CPU and for eager CUDA."""

    def __init__(self, block_size: int, device: torch.device, decode: DecodeAttention) -> None:
        """Prefill computes in its queries' dtype, decode as ``decode`` does."""
        self._block_size = block_size
        self._device = device
        self._decode = decode
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
        decode = {window: self._decode.plan(ones, window) for window in windows if ones}
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
            decoded = self._decode.attend(q_TND[: plan.num_decode], cache, plan.decode[window])
            outputs.insert(0, decoded)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

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
                    reach = Reach.of(part, first, self._block_size, self._device)
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
