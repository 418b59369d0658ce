"""One request on its way through the engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from time import perf_counter

from layline.engine.reading import PromptReading
from layline.errors import RequestError
from layline.sampling import SamplingParams, TokenLogprobs
from layline.text.detokenize import IncrementalDecoder
from layline.text.stop import StopMatcher


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One generated token, the text it released, and whether it ended the request.

    The only event of a request that generates nothing has no token.
    """

    token_id: int | None
    text: str
    finish_reason: FinishReason | None


class FinishReason(Enum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(slots=True, eq=False)
class Request:
    """A prompt, how to continue it, and what has come of it.

    ``num_computed`` counts tokens whose keys and values are in the cache; ``most_tokens`` is the
    largest number of tokens the request may generate in its context, ``attn_dp`` the attention DP
    rank it runs on. Requests of a higher ``priority`` are admitted first; those with the same
    ``cache_salt`` share cached beginnings. ``num_cached`` counts prompt tokens that were found in
    the cache when the request was first admitted, ``num_preempted`` how often it lost its blocks.
    ``drafts`` are guesses at its next tokens, to be verified by its next decode; ``num_drafted``
    counts tokens that a draft model has in its cache.
    ``reading`` says what is read of the prompt: ``prompt_logprobs`` from its second token on, or
    ``hidden_sum``; ``num_read`` tokens have been computed at some time, so that they are read once.
    ``error`` says why a request with the reason ERROR ended.
    ``num_pending`` counts tokens that steps under way sample, the latest of them from the sampled
    row ``pending_row`` of the step that its scheduler began as number ``pending_step``.
    """

    request_id: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    decoder: IncrementalDecoder
    stops: StopMatcher
    end_ids: frozenset[int]
    most_tokens: int
    priority: int = 0
    cache_salt: str = ""
    reading: PromptReading | None = None
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    hidden_sum: list[float] = field(default_factory=list)
    events: deque[TokenEvent] = field(default_factory=deque)
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_read: int = 0
    num_pending: int = 0
    pending_row: int = 0
    pending_step: int = 0
    num_cached: int = 0
    num_preempted: int = 0
    drafts: tuple[int, ...] = ()
    num_drafted: int = 0
    attn_dp: int = 0
    text: str = ""
    finish_reason: FinishReason | None = None
    error: RequestError | None = None
    arrived: float = field(default_factory=perf_counter)
    first_token: float = 0.0
    last_token: float = 0.0

    @property
    def most_length(self) -> int:
        """The longest the sequence can become, prompt and output."""
        return len(self.prompt_ids) + self.most_tokens

    @property
    def num_tokens(self) -> int:
        """Tokens known by now, prompt and output."""
        return len(self.prompt_ids) + len(self.output_ids)

    def token_ids(self, start: int, stop: int) -> Sequence[int]:
        """Known tokens ``start`` .. ``stop - 1``, prompt and output as one sequence."""
        prompt = len(self.prompt_ids)
        if stop <= prompt:
            return self.prompt_ids[start:stop]
        if start >= prompt:
            return self.output_ids[start - prompt : stop - prompt]
        return (*self.prompt_ids[start:], *self.output_ids[: stop - prompt])

    @property
    def is_prefilled(self) -> bool:
        """True when every prompt token is in the cache."""
        return self.num_computed >= len(self.prompt_ids)

    @property
    def must_end(self) -> bool:
        """True when the tokens under way are the last that it may generate."""
        return self.num_pending > 0 and self.num_pending + len(self.output_ids) >= self.most_tokens

    def accept(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        """Take one generated token: its text, and whether the request ends with it."""
        self.last_token = perf_counter()
        if not self.output_ids:
            self.first_token = self.last_token
        self.output_ids.append(token_id)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        if token_id in self.end_ids:
            self.finish_reason = FinishReason.STOP
            released = self.decoder.finish()
        else:
            released = self.decoder.add(token_id)
            if len(self.output_ids) >= self.most_tokens:
                self.finish_reason = FinishReason.LENGTH
                released += self.decoder.finish()
        text, matched = self.stops.feed(released, armed=self._may_stop)
        if matched is not None:
            self.finish_reason = FinishReason.STOP
        elif self.finish_reason is not None:
            text += self.stops.flush()
        self.text += text
        self.events.append(TokenEvent(token_id, text, self.finish_reason))

    def end_unsampled(self) -> None:
        """End a request that generates nothing: its prompt is computed and read."""
        self.first_token = self.last_token = perf_counter()
        self.finish_reason = FinishReason.LENGTH
        self.events.append(TokenEvent(None, "", self.finish_reason))

    def fail(self, error: RequestError) -> None:
        """End with an error; what the request has generated so far stays."""
        self.error = error
        self.finish_reason = FinishReason.ERROR

    @property
    def _may_stop(self) -> bool:
        """Stop strings, like end ids, wait for ``min_tokens`` tokens before the one that ends."""
        minimum = self.params.min_tokens
        return minimum == 0 or len(self.output_ids) > minimum
