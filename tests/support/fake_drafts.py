"""Proposers without a model: guesses of a known quality, and a cache that checks what it is fed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from layline.engine.balance import SampleRow
from layline.engine.outcome import Outcome, StepResult
from layline.engine.request import Request
from layline.engine.speculation.proposer import DraftRoom
from layline.engine.step import MeshStep

NextToken = Callable[[tuple[int, ...]], int]


def known_tokens(request: Request) -> tuple[int, ...]:
    return (*request.prompt_ids, *request.output_ids)


def guess(known: tuple[int, ...], next_token: NextToken) -> int:
    """The token that comes next, or every third time another one."""
    right = next_token(known)
    return right + 1 if len(known) % 3 == 2 else right


class Guesses:
    """Proposes what ``guess`` says."""

    def __init__(self, next_token: NextToken) -> None:
        self._next = next_token
        self.settled = 0

    def propose(self, rooms: Sequence[DraftRoom], /) -> list[tuple[int, ...]]:
        found = []
        for room in rooms:
            known = known_tokens(room.request)
            start = len(known)
            for _ in range(room.count):
                known = (*known, guess(known, self._next))
            found.append(known[start:])
        return found

    def settle(self, request: Request, accepted: int, /) -> None:
        self.settled += accepted

    def forget(self, request: Request, /) -> None:
        pass


class Garbage(Guesses):
    """Proposes one token again and again, whatever the text is."""

    def __init__(self, token_id: int) -> None:
        super().__init__(lambda known: token_id)

    def propose(self, rooms: Sequence[DraftRoom], /) -> list[tuple[int, ...]]:
        return [(self._next(()),) * room.count for room in rooms]


class CheckedDraftModel:
    """A draft model whose cache remembers for which tokens each slot was written.

    ``live`` are the requests that there are; each step must find in the cache what it attends to.
    """

    def __init__(self, ranks: int, block_size: int, next_token: NextToken) -> None:
        self._block_size = block_size
        self._next = next_token
        self._cache: list[dict[int, tuple[int, ...]]] = [{} for _ in range(ranks)]
        self.live: dict[int, Request] = {}
        self.computed = 0

    def draft(self, step: MeshStep, rows: Sequence[Sequence[SampleRow]], /) -> StepResult:
        parts = enumerate(step.parts)
        return StepResult([self._run(rank, part, rows[rank]) for rank, part in parts], [])

    def _run(self, rank: int, part: Any, rows: Sequence[SampleRow]) -> list[Outcome]:
        cache, row, left = self._cache[rank], 0, list(rows)
        tokens: list[Outcome] = []
        for span, samples in zip(part.spans, part.samples, strict=True):
            (request,) = [each for each in self.live.values() if each.blocks is span.blocks]
            assert request.attn_dp == rank
            known = known_tokens(request)
            past = cache[self._slot(span.blocks, span.start - 1)] if span.start else ()
            assert past[: len(known)] == known[: span.start], "the past is not in the cache"
            for position in range(span.start):
                slot = self._slot(span.blocks, position)
                assert cache[slot] == past[: position + 1], "a hole in the past"
            for position in range(span.start, span.length):
                if position < len(known):
                    assert part.token_ids[row] == known[position]
                past = (*past, part.token_ids[row])
                cache[self._slot(span.blocks, position)] = past
                row += 1
                self.computed += 1
            if samples:
                asked = left.pop(0)
                assert asked.request_id == request.request_id
                assert asked.index == len(past) - len(request.prompt_ids)
                assert asked.ahead == len(past) - len(known)
                tokens.append((guess(past, self._next), None))
        assert not left
        return tokens

    def _slot(self, blocks: Sequence[int], position: int) -> int:
        return blocks[position // self._block_size] * self._block_size + position % self._block_size
