"""The engine's loop: plan a step, have it executed, and hand tokens to their requests."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from time import perf_counter

from layline.engine.balance import MeshPlan, MeshScheduler
from layline.engine.executor import Executor, MemoryUse, RowSpec
from layline.engine.facts import ServedModel
from layline.engine.outcome import FailedRow, Outcome, StepResult
from layline.engine.reading import PromptReading
from layline.engine.reading_plan import take_reading
from layline.engine.request import FinishReason, Request
from layline.engine.speculation.speculation import Speculation
from layline.engine.speculation.verify import is_verified
from layline.engine.statistics import SchedulerStats
from layline.engine.step_plan import StepEntry
from layline.engine.step_queue import StepQueue
from layline.engine.step_times import StepTimes
from layline.errors import PromptError, RunError, UnsupportedModelError
from layline.grammar import Grammar
from layline.sampling import SamplingParams, fresh_seed
from layline.text.constraint import Constraint, ConstraintCompiler
from layline.text.detokenize import IncrementalDecoder
from layline.text.stop import StopMatcher


class Engine:
    """Runs requests to their end, many at a time, on one model.

    Calls may come from several threads: one runs at a time, and each step serves every request.
    With several steps ``in_flight`` one is launched before the tokens of those before it are read.
    """

    def __init__(
        self,
        model: ServedModel,
        scheduler: MeshScheduler,
        executor: Executor,
        times: StepTimes | None = None,
        speculation: Speculation | None = None,
        *,
        in_flight: int = 1,
    ) -> None:
        self.times = times or StepTimes()
        self._model = model
        self._scheduler = scheduler
        self._steps = StepQueue(scheduler, executor, self.times, most=in_flight)
        self._executor = executor
        self._speculation = speculation
        self._constraints = ConstraintCompiler(model.tokenizer)
        self._ids = itertools.count()
        self._lock = threading.RLock()
        self._in_step = False
        self._is_closed = False
        self._dropped: list[Request] = []

    @property
    def has_work(self) -> bool:
        """True while a request waits or runs."""
        with self._lock:
            self._forget_dropped()
            return self._scheduler.num_unfinished > 0

    def memory(self) -> MemoryUse:
        """What the ranks hold."""
        with self._lock:
            self._check_open()
            return self._executor.memory()

    def close(self, status: int) -> None:
        """End what runs elsewhere; whatever is asked afterwards raises RunError."""
        self._is_closed = True
        self._executor.close(status)

    def stats(self) -> SchedulerStats:
        """What waits and runs, and how full the cache is."""
        with self._lock:
            return self._scheduler.stats

    def compile(self, grammar: Grammar) -> Constraint:
        """Compile a grammar for this model's vocabulary; any thread may do so, and steps go on.

        Raises SamplingError for one that cannot be followed.
        """
        return self._constraints.compile(grammar)

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        shown_ids: frozenset[int] = frozenset(),
        constraint: Constraint | None = None,
        embeds: bool = False,
    ) -> Request:
        """Queue a request. Raises PromptError or SamplingError for one that can never run.

        Those with a higher ``priority`` are admitted first; only those with the same ``cache_salt``
        share cached beginnings of prompts. ``shown_ids`` are in the text although they are special.
        ``constraint`` is the compiled grammar of ``params``; without it it is compiled here. One
        that ``embeds`` generates nothing, whatever ``params`` say. Raises UnsupportedModelError
        when the model does not do what is asked.
        """
        self._check_open()
        reading = self._reading(params, embeds=embeds)
        if params.grammar is not None and constraint is None:
            constraint = self.compile(params.grammar)
        room = self._model.facts.max_model_len - len(prompt_ids)
        most = room if params.max_tokens is None else min(params.max_tokens, room)
        if embeds:
            most = 0
        self._check_prompt(prompt_ids, room, least=0 if embeds or params.max_tokens == 0 else 1)
        tokenizer = self._model.tokenizer
        end_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos or constraint is not None:
            end_ids |= tokenizer.eos_ids
        request = Request(
            request_id=next(self._ids),
            prompt_ids=tuple(prompt_ids),
            params=params,
            decoder=IncrementalDecoder(
                tokenizer, prompt_ids, skip_special=params.skip_special, shown_ids=shown_ids
            ),
            stops=StopMatcher(params.stop, include_in_output=params.include_stop_in_output),
            end_ids=end_ids,
            most_tokens=most,
            priority=priority,
            cache_salt=cache_salt,
            reading=reading,
        )
        spec = RowSpec(
            params=params,
            seed=fresh_seed() if params.seed is None else params.seed,
            valid_vocab=self._model.valid_vocab,
            prompt_ids=request.prompt_ids,
            eos_ids=tokenizer.eos_ids,
            banned_ids=tokenizer.unused_ids,
            constraint=constraint,
        )
        with self._lock:
            self._scheduler.add(request)
            try:
                self._executor.admit(request.request_id, request.attn_dp, spec)
            except BaseException:
                self._scheduler.remove(request)
                raise
        return request

    def abort(self, request: Request) -> None:
        """Stop a request wherever it is; its blocks are free afterwards, or after a running step.

        The garbage collector may call this in any thread and in the middle of this thread's own
        step, so it never waits.
        """
        if request.finish_reason is None:
            request.finish_reason = FinishReason.ABORT
        self._dropped.append(request)
        if self._lock.acquire(blocking=False):
            try:
                if not self._in_step:
                    self._forget_dropped()
            finally:
                self._lock.release()

    def run(self, requests: Sequence[Request], on_step: Callable[[], None] | None = None) -> None:
        """Run steps until every one of ``requests`` has ended; ``on_step`` is called after each."""
        for request in requests:
            while request.finish_reason is None:
                with self._lock:
                    if request.finish_reason is None:
                        self.step()
                if on_step is not None:
                    on_step()

    def advance(self, request: Request) -> None:
        """Run a step unless ``request`` has something to show already, or has ended."""
        with self._lock:
            if not request.events and request.finish_reason is None:
                self.step()

    @property
    def num_ahead(self) -> int:
        """Steps that were launched before the tokens of the one before them were read."""
        return self._steps.num_ahead

    def step(self) -> None:
        """Wait for one step; the tokens it produces go to their requests' ``events``.

        With overlap the step after it is launched first.
        """
        with self._lock:
            self._check_open()
            self._forget_dropped()
            self._in_step = True
            try:
                self._step()
            finally:
                self._in_step = False
                self._forget_dropped()
                if self._scheduler.num_unfinished == 0:
                    self._steps.forget()

    def _step(self) -> None:
        self.times.end_step()
        if self._speculation is not None:
            begin = perf_counter()
            self._speculation.propose()
            self.times.since("draft", begin)
        done = self._steps.advance()
        if done is None:
            return
        plan, result = done.plan, done.result
        begin = perf_counter()
        self._take_readings(plan, result)
        entries = list(itertools.chain(*plan.sampled))
        interruption: BaseException | None = done.failure
        for entry, outcome in zip(entries, itertools.chain(*result.tokens), strict=True):
            # A request that has ended since the step was planned takes no token, and one that ends
            # with a token none of those after it.
            if entry.request.finish_reason is None and is_verified(entry):
                interruption = self._take_token(entry.request, outcome) or interruption
        if self._speculation is not None:
            self._settle(entries, self._speculation)
        for request in {entry.request: None for entry in entries}:
            if request.finish_reason is not None:
                self._forget(request)
        self.times.since("deliver", begin)
        if interruption is not None:
            raise interruption

    def _take_readings(self, plan: MeshPlan, result: StepResult) -> None:
        """Hand out what was read, and end the requests that wanted nothing else."""
        for part, step, readings in zip(plan.parts, plan.step.parts, result.readings, strict=True):
            if part is None:
                continue
            for read, reading in zip(step.reads, readings, strict=True):
                request = part.entries[read.span].request
                if request.finish_reason is not None:
                    continue
                if isinstance(reading, FailedRow):
                    request.fail(reading.error())
                    self._forget(request)
                else:
                    take_reading(request, reading)
            for entry in part.entries:
                request = entry.request
                # Not by what is computed: a later chunk may be under way already.
                ends = request.most_tokens == 0 and entry.span.length >= len(request.prompt_ids)
                if ends and request.finish_reason is None:
                    request.end_unsampled()
                    self._forget(request)

    def _take_token(self, request: Request, outcome: Outcome) -> BaseException | None:
        """Give a request its token, or end it with an error that is its own.

        Returns an interruption of this process, to be raised once all have their tokens: they are
        in the cache already.
        """
        interruption: BaseException | None = None
        try:
            if isinstance(outcome, FailedRow):
                request.fail(outcome.error())
            else:
                request.accept(*outcome)
        except Exception as error:
            request.fail(FailedRow.of(error).error())
        except BaseException as error:
            request.finish_reason = FinishReason.ABORT
            interruption = error
        return interruption

    def _settle(self, entries: Iterable[StepEntry], speculation: Speculation) -> None:
        """Tell what has become of the drafts that the step verified; none outlives its step."""
        verified: dict[Request, tuple[int, int]] = {}
        for entry in entries:
            request, known = entry.request, entry.span.length - entry.ahead
            verified[request] = (entry.ahead, request.num_tokens - known - 1)
        for request, (count, accepted) in verified.items():
            gone = request.finish_reason in (FinishReason.ABORT, FinishReason.ERROR)
            if count and not gone:
                speculation.settle(request, count, accepted)
            # Perhaps none of them found room in the step, and a token has come nevertheless.
            request.drafts = ()

    def _check_open(self) -> None:
        if self._is_closed:
            raise RunError("the engine is closed")

    def _forget_dropped(self) -> None:
        while self._dropped:
            self._forget(self._dropped.pop())

    def _forget(self, request: Request) -> None:
        self._scheduler.remove(request)
        if self._speculation is not None:
            self._speculation.forget(request)
        self._executor.release(request.request_id, request.attn_dp)

    def _reading(self, params: SamplingParams, *, embeds: bool) -> PromptReading | None:
        pooling = self._model.facts.pooling
        if embeds:
            if pooling is None:
                raise UnsupportedModelError(
                    "this model generates text and makes no embeddings; expected a checkpoint with "
                    "modules.json and 1_Pooling"
                )
            return PromptReading(last_only=pooling.last_only)
        if pooling is not None:
            raise UnsupportedModelError(
                "this model makes embeddings and generates no text; use LLM.embed, or "
                "/v1/embeddings of layline serve"
            )
        if params.prompt_logprobs is None:
            return None
        return PromptReading(vocab=self._model.valid_vocab, top=params.prompt_logprobs)

    def _check_prompt(self, prompt_ids: Sequence[int], room: int, *, least: int) -> None:
        if not prompt_ids:
            raise PromptError("the prompt is empty; expected at least one token")
        if room < least:
            context = self._model.facts.max_model_len
            less = "one less than" if least else "which is"
            raise PromptError(
                f"the prompt has {len(prompt_ids)} tokens; expected at most {context - least}, "
                f"{less} the context of {context}"
            )
        vocab = self._model.facts.config.vocab_size
        for token_id in prompt_ids:
            if not 0 <= token_id < vocab:
                raise PromptError(f"token id {token_id} is not in the vocabulary of {vocab} ids")
