"""The pool of cache blocks. Pure Python: the scheduler decides with it, no tensor is touched.

A block is free, held by one or more requests, or idle: held by none, but kept because its contents
are known and may serve a later request. Free and idle blocks can be taken.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from layline.engine.prefix import PrefixCache

_EVICTED_TOGETHER = 16
"""Idle blocks given up at a time: several, so that what is taken next lies in few runs."""


class BlockPool:
    """Hands out cache blocks by number, lowest first, so that fresh sequences lie in one run.

    Block 0 is never given out: its rows stay zero and padding reads them. With ``prefix`` blocks
    whose contents it knows become idle instead of free; the one that was used longest ago is given
    up first, and of one sequence the last block first, so that a beginning outlives what follows.

    ``drafted`` are blocks that a draft model has filled too, in a cache of its own.
    """

    def __init__(self, num_blocks: int, prefix: PrefixCache | None = None) -> None:
        if num_blocks < 2:
            raise ValueError(f"a pool of {num_blocks} blocks has none to give; block 0 is reserved")
        self.prefix = prefix
        self.drafted: set[int] = set()
        self._free = list(range(1, num_blocks))
        self._holders = [0] * num_blocks
        self._idle: dict[int, None] = {}

    @property
    def capacity(self) -> int:
        """Blocks in all, block 0 left out."""
        return len(self._holders) - 1

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing of use."""
        return len(self._free)

    @property
    def num_idle(self) -> int:
        """Blocks that no request holds and whose contents are kept."""
        return len(self._idle)

    @property
    def num_available(self) -> int:
        """Blocks that can be taken now: free and idle ones."""
        return len(self._free) + len(self._idle)

    @property
    def num_held(self) -> int:
        """Blocks that requests hold, each counted once."""
        return self.capacity - self.num_available

    def holders(self, block: int) -> int:
        """How many requests hold ``block``."""
        return self._holders[block]

    def idle_among(self, blocks: Iterable[int]) -> int:
        """How many of ``blocks`` are idle, so that holding them leaves fewer to take."""
        return sum(block in self._idle for block in blocks)

    def take(self, count: int) -> list[int] | None:
        """``count`` blocks in rising order, or None (and nothing taken) when fewer are there.

        Idle blocks are given up when free ones do not suffice. The contents are undefined.
        """
        missing = count - len(self._free)
        if missing > 0:
            if missing > len(self._idle):
                return None
            self._evict(max(missing, min(_EVICTED_TOGETHER, len(self._idle))))
        taken = [heapq.heappop(self._free) for _ in range(count)]
        for block in taken:
            self._holders[block] = 1
        if self.drafted:
            self.drafted.difference_update(taken)
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Hold blocks that are idle or that others hold; each call is one more holder."""
        for block in blocks:
            if self._holders[block] == 0:
                assert block in self._idle, f"block {block} holds nothing that could be shared"
                del self._idle[block]
            self._holders[block] += 1

    def give_back(self, blocks: Sequence[int]) -> None:
        """End one holding of each of a sequence's blocks, in its order.

        Raises ValueError for one that nobody holds.
        """
        for block in reversed(blocks):
            if self._holders[block] == 0:
                raise ValueError(f"block {block} is given back but not held")
            self._holders[block] -= 1
            if self._holders[block] > 0:
                continue
            if self.prefix is not None and block in self.prefix:
                self._idle[block] = None
            else:
                heapq.heappush(self._free, block)

    def disown(self, blocks: Iterable[int]) -> None:
        """Offer ``blocks`` to nobody any more, as they do not hold what was said of them."""
        for block in blocks:
            if self.prefix is None or block not in self.prefix:
                continue
            self.prefix.forget(block)
            if block in self._idle:
                del self._idle[block]
                heapq.heappush(self._free, block)

    def _evict(self, count: int) -> None:
        assert self.prefix is not None
        for _ in range(count):
            block = next(iter(self._idle))
            del self._idle[block]
            self.prefix.forget(block)
            heapq.heappush(self._free, block)
