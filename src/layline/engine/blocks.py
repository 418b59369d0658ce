"""The pool of cache blocks. Pure Python: the scheduler decides with it, no tensor is touched."""

from __future__ import annotations

import heapq
from collections.abc import Iterable


class BlockPool:
    """Hands out cache blocks by number, lowest first, so that fresh sequences lie in one run.

    Block 0 is never given out: its rows stay zero and padding reads them.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"a pool of {num_blocks} blocks has none to give; block 0 is reserved")
        self._free = list(range(1, num_blocks))
        self._held: set[int] = set()

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out now."""
        return len(self._free)

    @property
    def capacity(self) -> int:
        """Blocks in all, block 0 left out."""
        return len(self._free) + len(self._held)

    def take(self, count: int) -> list[int] | None:
        """``count`` blocks in rising order, or None (and nothing taken) when fewer are free."""
        if count > len(self._free):
            return None
        taken = [heapq.heappop(self._free) for _ in range(count)]
        self._held.update(taken)
        return taken

    def give_back(self, blocks: Iterable[int]) -> None:
        """Return blocks that :meth:`take` handed out. Raises ValueError for any other."""
        for block in blocks:
            if block not in self._held:
                raise ValueError(f"block {block} is given back but not held")
            self._held.remove(block)
            heapq.heappush(self._free, block)
