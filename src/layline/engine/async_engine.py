"""The engine for many concurrent callers: one thread runs steps, tasks await their answers.

Callers leave submissions in an inbox; the thread takes them between two steps, so nobody waits for
a step to end before going on with something else. After each step every event loop gets one call
that carries all new chunks.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic, perf_counter
from typing import Any, Protocol

from layline.engine.answers import AnswerStream, Chunk, Part, Submission, again
from layline.engine.compiling import CompileThreads
from layline.engine.core import Engine
from layline.engine.load import EngineLoad, cache_load
from layline.engine.outcome import FailedRow
from layline.engine.request import FinishReason, Request
from layline.engine.statistics import EngineStatistics
from layline.errors import LaylineError, OverloadedError, RunError, StoppingError
from layline.sampling import TokenLogprobs

IDLE_CHECK_S = 0.5
"""How often the ranks are looked at while no step runs."""

_POLL_S = 0.02


class EngineSource(Protocol):
    """What the asynchronous engine needs of a loaded model; an LLM has it."""

    @property
    def engine(self) -> Engine: ...

    def failure(self) -> LaylineError | None: ...


@dataclass(frozen=True, slots=True)
class _Arrival:
    stream: AnswerStream
    accepted: asyncio.Future[None]


class AsyncEngine:
    """Runs the requests of many tasks and threads on one engine, which nothing else may step.

    Args:
        source: the loaded model.
        max_open: requests that may wait and run together; None sets no limit.
        on_failure: called once, in the engine's thread, when the engine has failed.
    """

    def __init__(
        self,
        source: EngineSource,
        *,
        max_open: int | None = None,
        on_failure: Callable[[LaylineError], None] = lambda error: None,
    ) -> None:
        self.statistics = EngineStatistics()
        self._source = source
        self._engine = source.engine
        self.times = source.engine.times
        self._max_open = max_open
        self._on_failure = on_failure
        # Looking at the engine waits for its step, so only the thread that runs steps does.
        self._cache = cache_load(self._engine)
        self._compiling = CompileThreads(self._engine.compile)
        self._condition = threading.Condition()
        self._inbox: deque[_Arrival] = deque()
        self._open: list[Part] = []
        self._num_open = 0
        self._woken = False
        self._stopping = False
        self._ending: StoppingError | None = None
        self._closed = False
        self._failure: LaylineError | None = None
        self._thread = threading.Thread(target=self._run, name="layline-engine", daemon=True)
        self._thread.start()

    @property
    def failure(self) -> LaylineError | None:
        """What the engine failed with, or None while it can run."""
        return self._failure

    @property
    def is_stopping(self) -> bool:
        """True once :meth:`drain` or :meth:`close` was called."""
        return self._stopping

    @property
    def load(self) -> EngineLoad:
        """Requests at this moment, and the cache as it was after the last step; never waits."""
        kept = [part for part in tuple(self._open) if not part.stream.aborted]
        running = sum(1 for part in kept if part.request and part.request.blocks)
        return EngineLoad(max(self._num_open - running, 0), running, self._cache)

    async def submit(self, submissions: Sequence[Submission]) -> AnswerStream:
        """Queue requests together: all are taken, or none.

        Raises PromptError or SamplingError for one that can never run, OverloadedError when too
        many are open, StoppingError when the engine ends, and its failure when it has failed.
        """
        stream = AnswerStream(submissions, perf_counter(), self._abort)
        with self._condition:
            self._check(len(submissions))
            self._num_open += stream.num_open
        try:
            await self._compile(stream)
            with self._condition:
                self._check_runs()
                accepted = stream.loop.create_future()
                self._inbox.append(_Arrival(stream, accepted))
                self._condition.notify()
        except BaseException:
            self._release(stream, len(stream.parts))
            raise
        try:
            await accepted
        except BaseException:
            stream.abort()
            raise
        return stream

    async def _compile(self, stream: AnswerStream) -> None:
        """Give the parts of a stream their compiled grammars. Raises SamplingError."""
        grammars = [p.submission.params.grammar for p in stream.parts]
        found = await self._compiling.compile(one for one in grammars if one is not None)
        for part, grammar in zip(stream.parts, grammars, strict=True):
            part.constraint = found.get(grammar) if grammar is not None else None

    async def drain(self, timeout_s: float) -> bool:
        """Take no new requests and wait for the open ones; True when all of them finished.

        Those that have not after ``timeout_s`` seconds end with StoppingError.
        """
        with self._condition:
            self._stopping = True
        deadline = monotonic() + timeout_s
        while self._num_open and self._failure is None and monotonic() < deadline:
            await asyncio.sleep(_POLL_S)
        if not self._num_open or self._failure is not None:
            return self._failure is None
        with self._condition:
            self._ending = StoppingError(
                f"the server is stopping and the answer was not done within {timeout_s:g} s"
            )
            self._condition.notify()
        while self._num_open and self._failure is None:
            await asyncio.sleep(_POLL_S)
        return False

    def close(self) -> None:
        """End the thread after its step; open requests end with StoppingError."""
        with self._condition:
            self._stopping = self._closed = True
            self._condition.notify()
        self._thread.join()

    def _check_runs(self) -> None:
        if self._failure is not None:
            raise again(self._failure)
        if self._closed:
            raise StoppingError("the server is stopping")

    def _check(self, count: int) -> None:
        self._check_runs()
        if self._stopping:
            raise StoppingError("the server is stopping and takes no new requests")
        if self._max_open is not None and self._num_open + count > self._max_open:
            raise OverloadedError(
                f"{self._num_open} requests wait or run; expected at most {self._max_open}, "
                "try again later"
            )

    def _abort(self, stream: AnswerStream) -> None:
        for part in stream.parts:
            if part.request is not None:
                # Ranks that are gone hold nothing; the engine's thread tells of them.
                with contextlib.suppress(LaylineError):
                    self._engine.abort(part.request)
        self._release(stream, len(stream.parts))
        with self._condition:
            self._woken = True
            self._condition.notify()

    def _run(self) -> None:
        try:
            while not self._closed:
                self._turn()
            self._end_all(StoppingError("the server is stopping"))
        except BaseException as error:
            self._die(error)

    def _turn(self) -> None:
        while self._inbox:
            self._accept(self._inbox.popleft())
        with self._condition:
            woken, self._woken = self._woken, False
            ending, self._ending = self._ending, None
        if ending is not None:
            self._end_all(ending)
        if woken:
            self._sweep()
        if self._engine.has_work:
            begin = perf_counter()
            self._engine.step()
            now = perf_counter()
            self.statistics.steps += 1
            self.statistics.step.observe(now - begin)
            self._hand_out(now)
            self.times.since("deliver", now)
            self.times.end_step()
            self._cache = cache_load(self._engine)
            return
        self._cache = cache_load(self._engine)
        failure = self._source.failure()
        if failure is not None:
            raise failure
        with self._condition:
            if not (self._inbox or self._woken or self._closed or self._ending):
                self._condition.wait(IDLE_CHECK_S)

    def _accept(self, arrival: _Arrival) -> None:
        stream, accepted = arrival.stream, arrival.accepted
        if accepted.cancelled():
            return
        try:
            for part in stream.parts:
                given = part.submission
                part.request = self._engine.submit(
                    given.prompt_ids,
                    given.params,
                    priority=given.priority,
                    cache_salt=given.cache_salt,
                    shown_ids=given.shown_ids,
                    constraint=part.constraint,
                    embeds=given.embeds,
                )
        except Exception as error:
            for part in stream.parts:
                if part.request is not None:
                    self._engine.abort(part.request)
            self._release(stream, len(stream.parts))
            _call(stream.loop, _refuse, accepted, error)
            if self._source.failure() is not None:
                raise
            return
        self._open += stream.parts
        self.statistics.prompt_tokens += sum(len(p.submission.prompt_ids) for p in stream.parts)
        _call(stream.loop, _agree, accepted)
        if stream.aborted:
            # It was given up before there were requests to abort.
            self._abort(stream)

    def _sweep(self) -> None:
        """Forget requests that were given up."""
        gone = [part for part in self._open if part.stream.aborted]
        if gone:
            self._open = [part for part in self._open if not part.stream.aborted]
            self.statistics.finished["abort"] += sum(not _has_failed(part) for part in gone)

    def _hand_out(self, now: float) -> None:
        """Give every loop the chunks of its streams."""
        batches: dict[asyncio.AbstractEventLoop, list[tuple[AnswerStream, Chunk]]] = {}
        ended = False
        for part in self._open:
            assert part.request is not None
            if part.stream.aborted:
                continue
            if part.request.events:
                chunk = self._safe_chunk(part, part.request, now)
                if chunk is not None:
                    batches.setdefault(part.stream.loop, []).append((part.stream, chunk))
            ended = ended or part.request.finish_reason is not None
        # After the chunks that are there, so that its client has all it got.
        failed = [part for part in self._open if ended and _ended_unsaid(part)]
        if ended:
            for part in self._open:
                if _is_finished(part):
                    self._release(part.stream, 1)
            self._open = [part for part in self._open if not _is_finished(part)]
        for loop, batch in batches.items():
            if not _call(loop, _deliver, batch):
                for stream, _ in batch:
                    stream.abort()
        for part in failed:
            self._fail(part)

    def _fail(self, part: Part) -> None:
        """End a stream with what one of its requests failed with."""
        assert part.request is not None
        error = part.request.error or RunError("the engine gave this request up")
        self.statistics.finished["error"] += 1
        _call(part.stream.loop, part.stream.fail, error)

    def _safe_chunk(self, part: Part, request: Request, now: float) -> Chunk | None:
        """The new chunk of a request; an error in making it is that request's alone."""
        try:
            return self._chunk(part, request, now)
        except Exception as error:
            request.events.clear()
            request.fail(FailedRow.of(error).error())
            self._engine.abort(request)
            return None

    def _chunk(self, part: Part, request: Request, now: float) -> Chunk:
        statistics = self.statistics
        texts: list[str] = []
        token_ids: list[int] = []
        reason = None
        while request.events:
            event = request.events.popleft()
            texts.append(event.text)
            if event.token_id is not None:
                token_ids.append(event.token_id)
            reason = event.finish_reason
        statistics.generated_tokens += len(token_ids)
        if token_ids and part.num_tokens == 0:
            statistics.first_token.observe(now - part.arrived)
        elif token_ids:
            statistics.inter_token.observe((now - part.last_token) / len(token_ids), len(token_ids))
        part.last_token = now
        logprobs: tuple[TokenLogprobs, ...] = ()
        if request.params.logprobs is not None:
            until = part.num_tokens + len(token_ids)
            logprobs = tuple(request.logprobs[part.num_tokens : until])
        part.num_tokens += len(token_ids)
        if reason is not None:
            statistics.finished[reason.value] += 1
            statistics.request.observe(now - part.arrived)
        name = None if reason is None else reason.value
        return Chunk(part.index, "".join(texts), tuple(token_ids), logprobs, name)

    def _release(self, stream: AnswerStream, most: int) -> None:
        """Count up to ``most`` requests of a stream as ended; each is counted once."""
        with self._condition:
            count = min(most, stream.num_open)
            stream.num_open -= count
            self._num_open -= count

    def _end_all(self, error: LaylineError, *, failed: bool = False) -> None:
        """End every open and every waiting request with ``error``."""
        self._sweep()
        with self._condition:
            arrivals, self._inbox = self._inbox, deque()
        parts, self._open = self._open, []
        for stream in {*[arrival.stream for arrival in arrivals], *[part.stream for part in parts]}:
            self._release(stream, len(stream.parts))
        for arrival in arrivals:
            _call(arrival.stream.loop, _refuse, arrival.accepted, error)
        for part in parts:
            if not failed:
                assert part.request is not None
                self._engine.abort(part.request)
            _call(part.stream.loop, part.stream.fail, error)
        if parts:
            self.statistics.finished["error"] += len(parts)

    def _die(self, error: BaseException) -> None:
        failure = error
        if not isinstance(failure, LaylineError):
            failure = RunError(f"the engine failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
        with self._condition:
            # From here on nothing gets into the inbox.
            self._failure = failure
        self._end_all(failure, failed=True)
        self._on_failure(failure)


def _has_failed(part: Part) -> bool:
    return part.request is not None and part.request.error is not None


def _ended_unsaid(part: Part) -> bool:
    """True when a request has ended without an event that says so: it failed or was given up."""
    request = part.request
    if request is None or request.finish_reason is None or part.stream.aborted:
        return False
    return request.error is not None or request.finish_reason is FinishReason.ABORT


def _is_finished(part: Part) -> bool:
    """True when the request has ended and all of it was handed out."""
    request = part.request
    return (
        request is not None
        and request.finish_reason is not None
        and not request.events
        and not part.stream.aborted
    )


def _call(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: Any) -> bool:
    """Have ``loop`` call a function; False when the loop is closed."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function, *arguments)
        return True
    return False


def _agree(accepted: asyncio.Future[None]) -> None:
    if not accepted.done():
        accepted.set_result(None)


def _refuse(accepted: asyncio.Future[None], error: Exception) -> None:
    if not accepted.done():
        accepted.set_exception(error)


def _deliver(batch: Sequence[tuple[AnswerStream, Chunk]]) -> None:
    for stream, chunk in batch:
        try:
            stream.deliver(chunk)
        except Exception as error:
            stream.fail(FailedRow.of(error).error())
