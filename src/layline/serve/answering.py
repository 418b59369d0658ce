"""What both kinds of completions have in common: from a body to the end of its answers."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, Literal, cast

from msgspec import UNSET, Struct, UnsetType

from layline.engine.answers import AnswerStream, Chunk, Part
from layline.errors import LaylineError
from layline.serve.accounts import Account
from layline.serve.exchange import Reply
from layline.serve.jobs import Job, check_stream, wants_usage
from layline.serve.logprobs import Placed, PlacedLogprobs
from layline.serve.problems import as_api_error
from layline.serve.requests import Sampling
from layline.serve.responses import PromptDetails, Usage
from layline.serve.service import Service

Reason = Literal["stop", "length"]
SentUsage = Usage | None | UnsetType


class Answering(ABC):
    """One request to an endpoint; subclasses say what is asked and what an answer looks like."""

    prefix: str
    param: str

    def __init__(self, service: Service, body: Sampling, account: Account) -> None:
        self.service = service
        self.id = f"{self.prefix}-{secrets.token_hex(12)}"
        self.created = int(time.time())
        self._options = body
        self._account = account
        self.parts: list[Part] = []
        self._logprobs: dict[int, PlacedLogprobs] = {}
        self._generated = 0
        self._cached = 0

    async def run(self, reply: Reply) -> None:
        """Answer. Raises ApiError until the answer has begun."""
        self.service.require_model(self._options.model)
        self.service.require_text()
        check_stream(self._options)
        job = await self.prepare()
        submissions = job.submissions(self._account.tenant)
        if job.params.logprobs is not None:
            self._logprobs = {
                index: PlacedLogprobs(self.service.tokenizer, each.prompt_ids, each.shown_ids)
                for index, each in enumerate(submissions)
            }
        try:
            started = self.service.submit(submissions, self.param, job.grammar_param)
            async with await started as answers:
                self.parts = answers.parts
                if self._options.stream:
                    await self._stream(reply, answers, job)
                else:
                    await reply.json(await self._whole(answers, job))
        finally:
            self._account.spend_tokens(job.prompt_tokens + self._generated)

    @abstractmethod
    async def prepare(self) -> Job:
        """What is asked of the engine. Raises ApiError."""

    @abstractmethod
    def piece(self, chunk: Chunk, placed: Sequence[Placed], *, first: bool) -> Iterable[Struct]:
        """The choices of the events that ``chunk`` becomes; ``first`` is an answer's beginning."""

    @abstractmethod
    def choice(self, index: int, text: str, placed: Sequence[Placed], reason: Reason) -> Struct:
        """A whole answer."""

    @abstractmethod
    def event(self, choices: Sequence[Any], usage: SentUsage) -> Struct:
        """An event of a stream."""

    @abstractmethod
    def whole(self, choices: Sequence[Any], usage: Usage) -> Struct:
        """The answer that is no stream."""

    @property
    def has_logprobs(self) -> bool:
        """Whether log-probabilities were asked for."""
        return bool(self._logprobs)

    def usage(self, job: Job) -> Usage:
        """Tokens so far."""
        prompt, generated = job.prompt_tokens, self._generated
        return Usage(prompt, generated, prompt + generated, PromptDetails(self._cached))

    def _count_cached(self, answers: AnswerStream, job: Job) -> None:
        """As prompts are, each is counted once: for its first answer."""
        first = answers.parts[:: job.choices]
        self._cached = sum(part.cached_tokens for part in first)

    def _placed(self, chunk: Chunk) -> list[Placed]:
        self._generated += len(chunk.token_ids)
        return self._logprobs[chunk.index].take(chunk) if self._logprobs else []

    async def _whole(self, answers: AnswerStream, job: Job) -> Struct:
        texts: dict[int, list[str]] = defaultdict(list)
        placed: dict[int, list[Placed]] = defaultdict(list)
        reasons: dict[int, str] = {}
        try:
            async for chunk in answers:
                texts[chunk.index].append(chunk.text)
                placed[chunk.index] += self._placed(chunk)
                if chunk.finish_reason is not None:
                    reasons[chunk.index] = chunk.finish_reason
        except LaylineError as error:
            raise as_api_error(error, log_as=self.id) from None
        self._count_cached(answers, job)
        choices = [
            self.choice(index, "".join(texts[index]), placed[index], cast(Reason, reasons[index]))
            for index in range(len(answers.parts))
        ]
        return self.whole(choices, self.usage(job))

    async def _stream(self, reply: Reply, answers: AnswerStream, job: Job) -> None:
        begun: set[int] = set()
        await reply.start_events()
        try:
            async for chunk in answers:
                placed = self._placed(chunk)
                first = chunk.index not in begun
                begun.add(chunk.index)
                await self.send(reply, self.piece(chunk, placed, first=first))
        except LaylineError as error:
            await reply.event(as_api_error(error, log_as=self.id).body())
            await reply.end_events(done=False)
            return
        self._count_cached(answers, job)
        await self.send_end(reply, job)

    async def send(self, reply: Reply, choices: Iterable[Struct]) -> None:
        """One event for each choice."""
        usage: SentUsage = None if wants_usage(self._options) else UNSET
        for choice in choices:
            await reply.event(self.event([choice], usage))

    async def send_end(self, reply: Reply, job: Job) -> None:
        """End the stream, after the event of token counts where that was asked for."""
        if wants_usage(self._options):
            await reply.event(self.event([], self.usage(job)))
        await reply.end_events()
