"""The engine's loop: plan a step, run it, sample, and hand tokens to their requests."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence

import torch

from layline.engine.model import LoadedModel
from layline.engine.request import FinishReason, Request
from layline.engine.scheduler import Scheduler
from layline.errors import PromptError
from layline.layers.sampler import Sampler
from layline.layers.sampling_state import RowState
from layline.sampling import SamplingParams, fresh_seed
from layline.text.detokenize import IncrementalDecoder
from layline.text.stop import StopMatcher


class Engine:
    """Runs requests to their end, many at a time, on one loaded model.

    Calls may come from several threads: one runs at a time, and each step serves every request.
    """

    def __init__(self, loaded: LoadedModel, scheduler: Scheduler) -> None:
        self._loaded = loaded
        self._scheduler = scheduler
        self._sampler = Sampler()
        self._ids = itertools.count()
        self._lock = threading.RLock()
        self._in_step = False
        self._dropped: list[Request] = []

    @property
    def has_work(self) -> bool:
        """True while a request waits or runs."""
        return self._scheduler.num_unfinished > 0

    def submit(self, prompt_ids: Sequence[int], params: SamplingParams) -> Request:
        """Queue a request. Raises PromptError or SamplingError for one that can never run."""
        room = self._loaded.max_model_len - len(prompt_ids)
        self._check_prompt(prompt_ids, room)
        most = room if params.max_tokens is None else min(params.max_tokens, room)
        tokenizer = self._loaded.tokenizer
        end_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            end_ids |= tokenizer.eos_ids
        request = Request(
            request_id=next(self._ids),
            prompt_ids=tuple(prompt_ids),
            params=params,
            row=RowState(
                params,
                seed=fresh_seed() if params.seed is None else params.seed,
                valid_vocab=self._loaded.valid_vocab,
                prompt_ids=prompt_ids,
                eos_ids=tokenizer.eos_ids,
                banned_ids=tokenizer.unused_ids,
            ),
            decoder=IncrementalDecoder(tokenizer, prompt_ids, skip_special=params.skip_special),
            stops=StopMatcher(params.stop, include_in_output=params.include_stop_in_output),
            end_ids=end_ids,
            most_tokens=most,
        )
        with self._lock:
            self._scheduler.add(request)
        return request

    def abort(self, request: Request) -> None:
        """Stop a request wherever it is; its blocks are free afterwards."""
        with self._lock:
            if request.finish_reason is None:
                request.finish_reason = FinishReason.ABORT
            # The garbage collector may close a stream in the middle of this thread's own step.
            if self._in_step:
                self._dropped.append(request)
            else:
                self._scheduler.remove(request)

    def run(self, requests: Sequence[Request]) -> None:
        """Run steps until every one of ``requests`` has ended."""
        for request in requests:
            while request.finish_reason is None:
                with self._lock:
                    if request.finish_reason is None:
                        self.step()

    def advance(self, request: Request) -> None:
        """Run a step unless ``request`` has something to show already, or has ended."""
        with self._lock:
            if not request.events and request.finish_reason is None:
                self.step()

    def step(self) -> None:
        """Run one step; the tokens it produces go to their requests' ``events``."""
        with self._lock:
            self._in_step = True
            try:
                self._step()
            finally:
                self._in_step = False
                while self._dropped:
                    self._scheduler.remove(self._dropped.pop())

    @torch.inference_mode()
    def _step(self) -> None:
        plan = self._scheduler.next_step()
        if plan is None:
            return
        logits = self._loaded.runner.run(plan)
        requests = [entry.request for entry in plan.entries if entry.samples]
        sampled = self._sampler.sample(logits, [request.row for request in requests])
        tokens = list(zip(requests, sampled.read(), sampled.logprobs, strict=True))
        # Only now: a step that failed or was interrupted can be run again as if it had not begun.
        self._scheduler.complete(plan)
        # A request that was aborted while the step ran takes no token.
        live = [token for token in tokens if token[0].finish_reason is None]
        for request, token_id, logprobs in live:
            request.accept(token_id, logprobs)
            if request.finish_reason is not None:
                self._scheduler.remove(request)

    def _check_prompt(self, prompt_ids: Sequence[int], room: int) -> None:
        if not prompt_ids:
            raise PromptError("the prompt is empty; expected at least one token")
        if room < 1:
            raise PromptError(
                f"the prompt has {len(prompt_ids)} tokens; expected at most "
                f"{self._loaded.max_model_len - 1}, one less than the context of "
                f"{self._loaded.max_model_len}"
            )
        vocab = self._loaded.config.vocab_size
        for token_id in prompt_ids:
            if not 0 <= token_id < vocab:
                raise PromptError(f"token id {token_id} is not in the vocabulary of {vocab} ids")
