"""What the asynchronous engine hands out: the chunks of one or several answers. No torch here.

The engine's thread decides, the event loop's thread delivers: everything below that changes a
stream's chunks runs in the loop that the stream was made in.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from layline.engine.request import Request
from layline.errors import LaylineError
from layline.sampling import SamplingParams, TokenLogprobs
from layline.text.constraint import Constraint


def again(error: LaylineError) -> LaylineError:
    """An error as it may be raised once more, elsewhere: with a traceback of its own."""
    copy = type(error)(*error.args)
    for note in getattr(error, "__notes__", ()):
        copy.add_note(note)
    copy.__cause__ = error
    return copy


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """One request to be: its prompt's token ids, and how to continue it.

    Those of a higher ``priority`` are admitted first; only those with the same ``cache_salt``
    share cached beginnings of prompts. ``shown_ids`` are in the text although they are special.
    With ``embeds`` an embedding is wanted and no text.
    """

    prompt_ids: Sequence[int]
    params: SamplingParams
    priority: int = 0
    cache_salt: str = ""
    shown_ids: frozenset[int] = frozenset()
    embeds: bool = False


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of answer ``index``. ``logprobs`` has one entry a token where they were asked for."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: str | None

    def followed_by(self, later: Chunk) -> Chunk:
        """Both pieces as one."""
        return Chunk(
            self.index,
            self.text + later.text,
            self.token_ids + later.token_ids,
            self.logprobs + later.logprobs,
            later.finish_reason,
        )


@dataclass(slots=True)
class Part:
    """One answer of a stream as the engine's thread keeps it; times are of ``perf_counter``."""

    stream: AnswerStream
    index: int
    submission: Submission
    arrived: float
    constraint: Constraint | None = None
    request: Request | None = None
    last_token: float = 0.0
    num_tokens: int = 0

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that were found in the cache."""
        return 0 if self.request is None else self.request.num_cached

    @property
    def prompt_logprobs(self) -> Sequence[TokenLogprobs]:
        """Those of the prompt from its second token on, whole once there is a chunk."""
        return () if self.request is None else self.request.prompt_logprobs


class AnswerStream(AsyncIterator[Chunk]):
    """The chunks of several answers, in the order in which they come; an iterator of its own.

    What came while nobody asked is joined to one chunk for each answer. Leaving ``async with``
    ends what still runs. Raises the engine's failure where it ends before the answers do, and
    RequestError when one of the requests failed.
    """

    def __init__(
        self,
        submissions: Sequence[Submission],
        arrived: float,
        on_abort: Callable[[AnswerStream], None],
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.parts = [Part(self, i, each, arrived) for i, each in enumerate(submissions)]
        self.aborted = False
        # Requests that the engine counts as open; its lock guards the number.
        self.num_open = len(self.parts)
        self._on_abort = on_abort
        self._chunks: dict[int, Chunk] = {}
        self._unfinished = len(self.parts)
        self._error: LaylineError | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def __anext__(self) -> Chunk:
        while not self._chunks:
            if self._error is not None:
                raise again(self._error)
            if self._unfinished == 0 or self.aborted:
                raise StopAsyncIteration
            self._waiter = self.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._chunks.pop(next(iter(self._chunks)))

    async def __aenter__(self) -> AnswerStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.abort()

    def abort(self) -> None:
        """End what still runs and free what it holds; from any thread, as often as one likes."""
        if not self.aborted and self._unfinished:
            self.aborted = True
            self._on_abort(self)

    def deliver(self, chunk: Chunk) -> None:
        """Add a chunk; in the stream's loop."""
        if chunk.finish_reason is not None:
            self._unfinished -= 1
        before = self._chunks.get(chunk.index)
        self._chunks[chunk.index] = chunk if before is None else before.followed_by(chunk)
        self._wake()

    def fail(self, error: LaylineError) -> None:
        """End the stream with an error after the chunks that are there; in the stream's loop."""
        self._error = self._error or error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
