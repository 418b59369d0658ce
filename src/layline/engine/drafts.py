"""What drafts take of a scheduler's rows and cache blocks, and what has come of them.

Pure Python without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile

from layline.engine.blocks import BlockPool
from layline.engine.request import Request

VERIFIED_ROWS = 32
"""Rows of a decode step up to which requests bring drafts: a full batch has no time to spare."""


class DraftLedger:
    """The drafts of one scheduler's requests.

    ``drafted`` counts those that steps have verified, ``accepted`` those that became tokens.
    """

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self.drafted = self.accepted = 0

    def count(self, drafted: int, accepted: int) -> None:
        """Add a request's drafts of one step."""
        self.drafted += drafted
        self.accepted += accepted

    def free_slots(self, request: Request) -> int:
        """Slots behind the request's known and pending tokens; -1 where the last has none yet."""
        length = request.num_tokens + request.num_pending
        return len(request.blocks) * self._block_size - length

    def rooms(
        self, ready: Sequence[Request], spare: int, wants: Callable[[Request], int]
    ) -> list[tuple[Request, int]]:
        """Which of the requests that decode next may bring drafts, and how many.

        Each gets what it ``wants`` as far as rows last. The blocks are taken, all but ``spare``:
        one for each request that runs to grow into.
        """
        rows = VERIFIED_ROWS - len(ready) - sum(len(request.drafts) for request in ready)
        wanted = [
            (request, count)
            for request in ready
            if request.num_tokens - request.num_computed == 1 and not request.drafts
            if (count := wants(request)) > 0
        ]
        rooms = []
        for number, (request, count) in enumerate(wanted):
            share = rows // (len(wanted) - number)
            found = self._take(request, min(count, share), spare)
            if found > 0:
                rooms.append((request, found))
                rows -= found
        return rooms

    def _take(self, request: Request, count: int, spare: int) -> int:
        length = request.num_tokens + count
        missing = -(-length // self._block_size) - len(request.blocks)
        more = min(missing, self._pool.num_available - spare)
        if more > 0:
            request.blocks.extend(self._pool.take(more) or ())
        return min(count, self.free_slots(request))

    def take_back(self, requests: Iterable[Request]) -> bool:
        """Free the blocks that only drafts would use; whether there were any."""
        freed = False
        for request in requests:
            needed = -(-(request.num_tokens + request.num_pending) // self._block_size)
            if len(request.blocks) > needed:
                self._pool.give_back(request.blocks[needed:])
                # A new list, as a table that grows again may go on with other blocks.
                request.blocks = request.blocks[:needed]
                freed = True
        return freed

    def computed(self, request: Request, count: int) -> None:
        """Record that a draft model has the request's first ``count`` tokens in its cache."""
        full = slice(request.num_drafted // self._block_size, count // self._block_size)
        self._pool.drafted.update(request.blocks[full])
        request.num_drafted = count

    def found(self, blocks: Iterable[int]) -> int:
        """Tokens at a sequence's beginning that a draft model need not compute again."""
        known = takewhile(self._pool.drafted.__contains__, blocks)
        return sum(1 for _ in known) * self._block_size
