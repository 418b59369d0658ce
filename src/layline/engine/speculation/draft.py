"""Drafts from a second, smaller model that continues each request for a few tokens.

It has weights and a key-value cache of its own, but no bookkeeping: its cache has as many blocks as
the model's and is addressed by the same block tables, so blocks that are shared, lost or freed are
so in both. ``Request.num_drafted`` says how many of a request's tokens it has computed, and the
pool which blocks it has filled, so that a prefix found in the cache need not be computed by either.

Drafts are drawn with the request's own sampling parameters and the very random numbers that its
tokens will be drawn with: the better the draft model's distribution, the likelier both draws agree.

Pure Python: the steps it plans are run by the executor, on every rank of the mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from layline.engine.balance import MeshScheduler, SampleRow, StepRules
from layline.engine.facts import ModelFacts
from layline.engine.outcome import FailedRow, StepResult
from layline.engine.request import Request
from layline.engine.speculation.proposer import DraftRoom
from layline.engine.step import IDLE, MeshStep, RankStep
from layline.layers.spans import SequenceSpan

CATCH_UP_TOKENS = 512
"""Most known tokens that the draft model computes on an attention DP rank before it proposes."""
CATCH_UP_ROWS = 4
"""Known tokens that it may lack and still compute beside its first guess, a row for each."""


class DraftExecutor(Protocol):
    """Runs steps of the draft model; every Executor is one."""

    def draft(self, step: MeshStep, rows: Sequence[Sequence[SampleRow]], /) -> StepResult:
        """See Executor."""


@dataclass(slots=True)
class _Row:
    """One request in a round: the tokens to feed, from position ``start`` on."""

    request: Request
    start: int
    token_ids: Sequence[int]
    ahead: int


@dataclass(slots=True)
class _Guess:
    """The drafts of one request so far; ``ended`` once the draft model had none for it."""

    room: DraftRoom
    drafts: list[int] = field(default_factory=list)
    ended: bool = False

    def wants(self, number: int) -> bool:
        """Whether it is to have more than ``number`` drafts."""
        return self.room.count > number and not self.ended


class DraftProposer:
    """Proposes what the draft model says."""

    def __init__(
        self,
        facts: ModelFacts,
        scheduler: MeshScheduler,
        executor: DraftExecutor,
        rules: StepRules,
    ) -> None:
        self._facts = facts
        self._scheduler = scheduler
        self._executor = executor
        self._rules = rules
        self._ranks = len(scheduler.parts)
        # Prompts with ids that the draft model's table lacks: padding beyond the vocabulary.
        self._known: dict[int, bool] = {}

    def propose(self, rooms: Sequence[DraftRoom], /) -> list[tuple[int, ...]]:
        """See Proposer. Runs steps of the draft model on every rank."""
        guesses = [_Guess(self._fitting(room)) for room in rooms]
        ready = self._catch_up([guess for guess in guesses if guess.room.count > 0])
        for number in range(max((guess.room.count for guess in ready), default=0)):
            self._round([guess for guess in ready if guess.wants(number)], number)
        return [tuple(guess.drafts) for guess in guesses]

    def settle(self, request: Request, accepted: int, /) -> None:
        """See Proposer. Every draft but the last was fed, at the place that it now has."""
        known = request.num_tokens - 1 - accepted
        if request.num_drafted == known:
            fed = len(request.drafts) - 1
            self._scheduler.drafted(request, known + min(accepted, fed))

    def forget(self, request: Request, /) -> None:
        """See Proposer."""
        self._known.pop(request.request_id, None)

    def _fitting(self, room: DraftRoom) -> DraftRoom:
        """The room that the draft model's vocabulary and context leave."""
        request = room.request
        known = self._known.get(request.request_id)
        if known is None:
            vocabulary = self._facts.config.vocab_size
            known = max(request.prompt_ids) < vocabulary
            self._known[request.request_id] = known
        count = min(room.count, self._facts.max_model_len - request.num_tokens + 1)
        return DraftRoom(request, count if known else 0)

    def _catch_up(self, guesses: Sequence[_Guess]) -> list[_Guess]:
        """Compute what the draft model lacks, a bounded part of it; those that can be continued."""
        left = [CATCH_UP_TOKENS] * self._ranks
        rows: list[_Row] = []
        ready: list[_Guess] = []
        for guess in guesses:
            request = guess.room.request
            start, last = request.num_drafted, request.num_tokens - 1
            if last - start <= CATCH_UP_ROWS:
                ready.append(guess)
                continue
            count = min(last - start, left[request.attn_dp])
            if count:
                rows.append(_Row(request, start, request.token_ids(start, start + count), 0))
                left[request.attn_dp] -= count
            if start + count == last:
                ready.append(guess)
        if rows:
            self._executor.draft(self._step(rows, self._chunks), [[] for _ in range(self._ranks)])
            for row in rows:
                self._scheduler.drafted(row.request, row.start + len(row.token_ids))
        return ready

    def _round(self, guesses: Sequence[_Guess], number: int) -> None:
        """One more draft for each of ``guesses``, which have ``number`` by now."""
        rows = []
        for guess in guesses:
            request, known = guess.room.request, guess.room.request.num_tokens
            if number:
                rows.append(_Row(request, known - 1 + number, guess.drafts[-1:], number))
            else:
                # Its last token is always fed, even where a round before this one has broken off.
                start = min(request.num_drafted, known - 1)
                rows.append(_Row(request, start, request.token_ids(start, known), 0))
        sampled = [
            [
                SampleRow(row.request.request_id, len(row.request.output_ids) + number, number)
                for row in rows
                if row.request.attn_dp == rank
            ]
            for rank in range(self._ranks)
        ]
        result = self._executor.draft(self._step(rows, self._decodes), sampled)
        drawn = [iter(part) for part in result.tokens]
        for guess in guesses:
            outcome = next(drawn[guess.room.request.attn_dp])
            if isinstance(outcome, FailedRow):
                guess.ended = True
            else:
                guess.drafts.append(outcome[0])
            if not number:
                self._scheduler.drafted(guess.room.request, guess.room.request.num_tokens)

    def _step(self, rows: Sequence[_Row], make: Callable[[Sequence[_Row]], RankStep]) -> MeshStep:
        home = [[row for row in rows if row.request.attn_dp == rank] for rank in range(self._ranks)]
        parts = tuple([make(own) if own else IDLE for own in home])
        return MeshStep(parts, self._rules.rows(parts))

    @staticmethod
    def _chunks(rows: Sequence[_Row]) -> RankStep:
        """Known tokens, computed as prompts are; nothing is sampled."""
        spans: list[SequenceSpan] = []
        token_ids: list[int] = []
        for row in rows:
            count = len(row.token_ids)
            length = row.request.num_tokens
            spans.append(SequenceSpan(row.start, count, row.request.blocks, length))
            token_ids.extend(row.token_ids)
        return RankStep(0, tuple(spans), tuple(token_ids), (False,) * len(spans))

    @staticmethod
    def _decodes(rows: Sequence[_Row]) -> RankStep:
        """A row for each token; the last one of each request is sampled."""
        spans: list[SequenceSpan] = []
        token_ids: list[int] = []
        samples: list[bool] = []
        for row in rows:
            for place, token_id in enumerate(row.token_ids, start=row.start):
                spans.append(SequenceSpan(place, 1, row.request.blocks, place + 1))
                token_ids.append(token_id)
                samples.append(False)
            samples[-1] = True
        return RankStep(len(spans), tuple(spans), tuple(token_ids), tuple(samples))
