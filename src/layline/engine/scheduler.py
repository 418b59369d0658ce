"""What runs in the next step. Pure Python without torch; deterministic in the order of arrival.

A request is admitted when the cache can hold it at its longest, so that an admitted request always
finishes. Prompts go first, in chunks under a token budget; decodes run together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from layline.engine.blocks import BlockPool
from layline.engine.request import Request
from layline.layers.spans import Phase, SequenceSpan

BLOCK_SIZE = 16
"""Tokens in a block of the key-value cache."""


@dataclass(frozen=True, slots=True)
class StepEntry:
    """One request's part of a step. ``samples`` is False while its prompt is incomplete."""

    request: Request
    span: SequenceSpan
    samples: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: its phase, its sequences in row order, and the token ids of its rows."""

    phase: Phase
    entries: tuple[StepEntry, ...]
    token_ids: tuple[int, ...]


class Scheduler:
    """Holds waiting and running requests and the blocks they own."""

    def __init__(
        self, pool: BlockPool, *, block_size: int, max_running: int, prefill_tokens: int
    ) -> None:
        self._pool = pool
        self._block_size = block_size
        self._max_running = max_running
        self._prefill_tokens = prefill_tokens
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []

    @property
    def num_unfinished(self) -> int:
        """Requests that wait or run."""
        return len(self._waiting) + len(self._running)

    @property
    def reserved_tokens(self) -> int:
        """Tokens that the waiting and running requests may take at their longest."""
        unfinished = (*self._waiting, *self._running)
        return sum(request.most_length for request in unfinished)

    def blocks_for(self, length: int) -> int:
        """Blocks that a sequence of ``length`` tokens takes."""
        return -(-length // self._block_size)

    def add(self, request: Request) -> None:
        """Queue a request that fits the pool when it is alone in it."""
        if self.blocks_for(request.most_length) > self._pool.capacity:
            raise ValueError(f"request {request.request_id} can never fit the cache")
        self._waiting.append(request)

    def remove(self, request: Request) -> None:
        """Forget a finished or aborted request and free its blocks; a second call does nothing."""
        if request in self._waiting:
            self._waiting.remove(request)
        elif request in self._running:
            self._running.remove(request)
            self._pool.give_back(request.blocks)
            request.blocks = []

    def next_step(self) -> StepPlan | None:
        """The next step, or None when nothing is left to run."""
        self._admit()
        prefill = [request for request in self._running if not request.is_prefilled]
        if prefill:
            return self._prefill(prefill)
        return self._decode() if self._running else None

    def complete(self, plan: StepPlan) -> None:
        """Record that the step's tokens are in the cache."""
        for entry in plan.entries:
            entry.request.num_computed = entry.span.length

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._max_running:
            request = self._waiting[0]
            blocks = self._pool.take(self.blocks_for(request.most_length))
            if blocks is None:
                return
            request.blocks = blocks
            self._running.append(self._waiting.popleft())

    def _prefill(self, requests: Sequence[Request]) -> StepPlan:
        entries: list[StepEntry] = []
        token_ids: list[int] = []
        budget = self._prefill_tokens
        for request in requests:
            start, total = request.num_computed, len(request.prompt_ids)
            count = min(budget, total - start)
            if count == 0:
                break
            budget -= count
            span = SequenceSpan(start, count, request.blocks, rope_length=total)
            entries.append(StepEntry(request, span, samples=span.length == total))
            token_ids.extend(request.prompt_ids[start : start + count])
        return StepPlan(Phase.PREFILL, tuple(entries), tuple(token_ids))

    def _decode(self) -> StepPlan:
        entries = tuple(
            StepEntry(
                request,
                SequenceSpan(
                    request.num_computed, 1, request.blocks, rope_length=request.num_computed + 1
                ),
                samples=True,
            )
            for request in self._running
        )
        return StepPlan(
            Phase.DECODE, entries, tuple(request.output_ids[-1] for request in self._running)
        )
