"""Attention whose rows come out alike, to the bit, however a sequence's tokens are divided over
steps and whoever shares a step with it.

Shape suffixes: T token rows, L cache rows of a sequence, N query heads, K key/value heads, G query
heads of a key head, D head size.

Queries are computed in tiles of TILE positions, counted from the sequence's beginning, with the
keys up to the tile's end (from the first that the window of the tile's first query may reach). So a
query at some position always stands at the same place of a call of the same shapes. Places that the
step has no token for are zeros, and so are the keys there; what a mask hides enters a sum as an
exact zero. Keys are read from the cache, in every phase.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from layline.layers.cache_slots import NULL_SLOT
from layline.layers.forward_batch import AttentionPlan
from layline.layers.kv_cache import KVCache
from layline.layers.spans import SequenceSpan, StepPhase

TILE = 16


@dataclass(frozen=True, slots=True)
class _Tile:
    """Rows of a step that stand in one tile, from ``place`` on.

    ``slots`` [L] are those of the keys; ``mask`` [TILE, L] is True where a query may see one.
    """

    rows: slice
    place: int
    slots: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class InvariantAttentionPlan(AttentionPlan):
    """The tiles of a step, for each attention window of the model."""

    tiles: dict[int | None, tuple[_Tile, ...]]


class InvariantAttention:
    """Backend for batch-invariant runs on the CPU; see AttentionBackend."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size

    def plan(
        self, _: StepPhase, spans: Sequence[SequenceSpan], windows: frozenset[int | None]
    ) -> InvariantAttentionPlan:
        """Prepare one step; every phase is computed alike."""
        return InvariantAttentionPlan(
            {window: tuple(self._tiles(spans, window)) for window in windows}
        )

    def attend(
        self,
        q_TND: torch.Tensor,
        kv_T2KD: torch.Tensor,
        cache: KVCache,
        plan: AttentionPlan,
        window: int | None,
    ) -> torch.Tensor:
        """See AttentionBackend.attend."""
        assert isinstance(plan, InvariantAttentionPlan)
        outputs = [
            self._attend_tile(q_TND, kv_T2KD.shape[2], cache, tile) for tile in plan.tiles[window]
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _attend_tile(
        self, q_TND: torch.Tensor, kv_heads: int, cache: KVCache, tile: _Tile
    ) -> torch.Tensor:
        """Outputs [rows of the tile, N x D]."""
        heads, size = q_TND.shape[1:]
        groups = heads // kv_heads
        count = tile.rows.stop - tile.rows.start
        dtype = torch.promote_types(q_TND.dtype, cache.dtype)
        padded = q_TND.new_zeros(TILE, heads, size, dtype=dtype)
        padded[tile.place : tile.place + count] = q_TND[tile.rows]
        # The queries that share a key head become rows of it, those of one head after another.
        q_1KRD = padded.view(TILE, kv_heads, groups, size).permute(1, 2, 0, 3).flatten(1, 2)[None]
        read = cache.read(tile.slots).to(dtype)
        keys, values = read.permute(1, 2, 0, 3).unsqueeze(1).unbind(0)
        mask = tile.mask.repeat(groups, 1)
        out = F.scaled_dot_product_attention(q_1KRD, keys, values, attn_mask=mask)
        rows = out.view(kv_heads, groups, TILE, size).permute(2, 0, 1, 3).flatten(1)
        return rows[tile.place : tile.place + count].to(q_TND.dtype)

    def _tiles(self, spans: Sequence[SequenceSpan], window: int | None) -> Iterator[_Tile]:
        row = 0
        for span in spans:
            at = span.start
            while at < span.length:
                begin = at // TILE * TILE
                count = min(begin + TILE, span.length) - at
                first = 0 if window is None else max(0, begin - window + 1) // TILE * TILE
                yield _Tile(
                    slice(row, row + count),
                    at - begin,
                    torch.from_numpy(self._slots(span, first, begin + TILE)),
                    _visible(begin, first, window),
                )
                at, row = at + count, row + count

    def _slots(self, span: SequenceSpan, first: int, last: int) -> np.ndarray:
        """Slots of the tokens ``first`` .. ``last - 1``, int64; those to come have the null slot.

        Nothing has been written there, or by another sequence: a masked key has to be finite.
        """
        tokens = np.arange(first, last, dtype=np.int64)
        known = tokens[: span.length - first]
        blocks = np.asarray(span.blocks, dtype=np.int64)
        slots = np.full(len(tokens), NULL_SLOT, dtype=np.int64)
        slots[: len(known)] = (
            blocks[known // self._block_size] * self._block_size + known % self._block_size
        )
        return slots


def _visible(begin: int, first: int, window: int | None) -> torch.Tensor:
    queries = torch.arange(begin, begin + TILE)[:, None]
    keys = torch.arange(first, begin + TILE)[None, :]
    mask = keys <= queries
    return mask if window is None else mask & (keys > queries - window)
