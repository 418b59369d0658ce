"""Which slots of a paged cache hold a sequence's tokens, and how to read them.

Shape suffixes: B sequences, L tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
import torch

from layline.layers.kv_cache import KVCache
from layline.layers.spans import SequenceSpan
from layline.layers.transfer import upload

NULL_SLOT = 0  # Block 0 is never given to a sequence; its rows stay zero, so padding reads zeros.


@dataclass(frozen=True, slots=True)
class Reach:
    """Cache rows that some queries read: a range of slots, or a list to gather."""

    first: int
    last: int
    gather: torch.Tensor | None

    @classmethod
    def of(cls, span: SequenceSpan, first: int, block_size: int, device: torch.device) -> Reach:
        """The span's tokens from ``first`` on."""
        slots = slot_numbers(span, first, span.length, block_size)
        start = int(slots[0])
        if int(slots[-1]) - start == len(slots) - 1 and bool((np.diff(slots) == 1).all()):
            return cls(start, start + len(slots), None)
        return cls(0, 0, upload(slots, device))

    def read(self, cache: KVCache) -> torch.Tensor:
        """The rows, [tokens, 2, K, D]; those of a range may be the cache's own memory."""
        if self.gather is None:
            return cache.read(slice(self.first, self.last))
        return cache.read(self.gather)


def slot_numbers(span: SequenceSpan, first: int, last: int, block_size: int) -> np.ndarray:
    """Cache slots of the span's tokens ``first`` .. ``last - 1``, int64 [last - first]."""
    tokens = np.arange(first, last, dtype=np.int64)
    blocks = np.asarray(span.blocks, dtype=np.int64)
    slots: np.ndarray = blocks[tokens // block_size] * block_size + tokens % block_size
    return slots


def visible(spans: Sequence[SequenceSpan], window: int | None) -> tuple[list[int], list[int]]:
    """The first token that each span's last may see within ``window``, and how many it sees."""
    firsts = [0 if window is None else max(0, span.length - window) for span in spans]
    counts = [span.length - first for span, first in zip(spans, firsts, strict=True)]
    return firsts, counts


def padded_slots(
    spans: Sequence[SequenceSpan], firsts: Sequence[int], counts: Sequence[int], block_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Slots of ``counts`` tokens of each span from ``firsts`` on, int64 [B, L], and what is none.

    All spans at once: a step of many sequences would spend longer on calls than on numbers. Where
    the second array is True a sequence has ended, and the slot is the null block's.
    """
    tables = np.array(list(zip_longest(*[span.blocks for span in spans], fillvalue=0))).T
    places = np.arange(max(counts))[None, :]
    tokens = np.asarray(firsts)[:, None] + places
    blocks = np.minimum(tokens // block_size, tables.shape[1] - 1)
    slots: np.ndarray = np.take_along_axis(tables, blocks, axis=1) * block_size
    slots += tokens % block_size
    ended: np.ndarray = places >= np.asarray(counts)[:, None]
    slots[ended] = NULL_SLOT
    return slots, ended
