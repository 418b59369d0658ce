"""What a request asks of the sampler, and the random numbers it is entitled to. No torch here.

A draw is a pure function of the request's seed and of the index of the token being drawn. It
therefore cannot depend on which other requests share the batch, on the row the request happens
to sit in, on the device, or on having been preempted and resumed.
"""

from __future__ import annotations

import math
import operator
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, SupportsIndex

from layline.errors import SamplingError
from layline.grammar import Grammar

GREEDY_BELOW = 1e-5
"""A temperature below this picks the most likely token: dividing by it would only overflow."""

MAX_TOP_LOGPROBS = 20
"""The most alternatives a request may ask for beside each chosen token, as in the OpenAI API."""

_UNSET_TOP_K = (0, -1)
_MASK64 = (1 << 64) - 1
_SEED_LIMIT = 1 << 63


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities at one generated position, before any sampling parameter.

    ``top`` holds the most likely ids of the position as (id, logprob), best first, ties by
    ascending id; ids of probability zero are left out. It need not contain ``token_id``.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How one request's tokens are chosen and when it ends. Validated when made, then frozen.

    Args:
        max_tokens: most tokens to generate; None leaves it to the context length; 0 only with
            ``prompt_logprobs``.
        min_tokens: until this many are generated, end-of-sequence and stop ids cannot be chosen.
        temperature: 0 to 100; below 1e-5 the most likely token is taken (lowest id among equals).
        top_k: keep this many most likely ids; 0 or -1 keeps all.
        top_p: keep the fewest most likely ids whose probability sums to at least this.
        min_p: drop ids less likely than this share of the most likely one.
        repetition_penalty: of every id in prompt or output, positive logits are divided and
            negative ones multiplied by this (0.01 to 100; 1 is off).
        presence_penalty: subtracted from ids that were generated (-2 to 2).
        frequency_penalty: subtracted once per time an id was generated (-2 to 2).
        logit_bias: added to the logits of these ids (-100 to 100); copied, not to be changed later.
        stop: strings that end the text; one string is taken as a list of one.
        stop_token_ids: ids that end the text as the end-of-sequence id does.
        ignore_eos: go on after an end-of-sequence id.
        include_stop_in_output: leave the stop string in the text.
        seed: makes the draws repeatable; None gives each request a fresh one.
        logprobs: alternatives to report beside each chosen token (0 to 20; 0 reports only the
            chosen one, None nothing).
        prompt_logprobs: the same for each token of the prompt but the first. The whole prompt is
            computed for it, so that ``max_tokens`` may be 0 then: nothing is generated.
        skip_special: leave special tokens out of the text.
        grammar: what the text must look like. The end-of-sequence id can be chosen exactly where
            the text is complete, and only there where nothing can follow under ``min_tokens`` and
            ``ignore_eos``, which then ends it too. Stop strings and ids cut the text as they always
            do; banned ids stay banned, bias and penalties weigh what the grammar leaves.

    Raises:
        SamplingError: a value is of the wrong type or outside its range.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    # A dict has no hash; params that differ only here share one and still compare unequal.
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_in_output: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special: bool = True
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        self._check_lengths()
        self._check_shape()
        self._set("logit_bias", _checked_bias(self.logit_bias))
        self._set("stop", _checked_stop(self.stop))
        self._set("stop_token_ids", _checked_ids("stop_token_ids", self.stop_token_ids))
        for name in ("ignore_eos", "include_stop_in_output", "skip_special"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise SamplingError(f"{name} {value!r} is not a boolean; use True or False")
        if self.seed is not None:
            self._set("seed", _integer("seed", self.seed, -_SEED_LIMIT, _SEED_LIMIT - 1))
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._set(name, _integer(name, getattr(self, name), 0, MAX_TOP_LOGPROBS))
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise SamplingError(f"grammar is {type(self.grammar).__name__}; expected a Grammar")

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_lengths(self) -> None:
        if self.max_tokens is not None:
            least = 1 if self.prompt_logprobs is None else 0
            self._set("max_tokens", _integer("max_tokens", self.max_tokens, least))
        self._set("min_tokens", _integer("min_tokens", self.min_tokens, 0))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise SamplingError(
                f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}; "
                f"expected 0 to {self.max_tokens}"
            )

    def _check_shape(self) -> None:
        self._set("temperature", _number("temperature", self.temperature, 0.0, 100.0))
        top_k = _integer("top_k", self.top_k, -1)
        self._set("top_k", 0 if top_k in _UNSET_TOP_K else top_k)
        top_p = _number("top_p", self.top_p, 0.0, 1.0)
        if top_p == 0.0:
            raise SamplingError("top_p 0 keeps no token; expected above 0 and up to 1")
        self._set("top_p", top_p)
        self._set("min_p", _number("min_p", self.min_p, 0.0, 1.0))
        # The bounds keep a penalised logit inside float32 whatever the model says.
        repetition = _number("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        self._set("repetition_penalty", repetition)
        for name in ("presence_penalty", "frequency_penalty"):
            self._set(name, _number(name, getattr(self, name), -2.0, 2.0))

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken, without a draw (temperature below 1e-5)."""
        return self.temperature < GREEDY_BELOW

    @property
    def needs_repetition(self) -> bool:
        """Whether ids of the prompt and the output are penalised."""
        return self.repetition_penalty != 1.0

    @property
    def needs_penalties(self) -> bool:
        """Whether logits depend on the ids seen so far."""
        return (
            self.needs_repetition or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
        )

    @property
    def needs_history(self) -> bool:
        """Whether what may be drawn depends on every earlier token, so each must be read first."""
        return self.needs_penalties or self.grammar is not None


def fresh_seed() -> int:
    """An unpredictable seed in the range that ``SamplingParams.seed`` accepts."""
    return secrets.randbits(63)


def uniform(seed: int, step: int, stream: int = 0) -> float:
    """The random number of a request's ``step``-th token: in (0, 1), with 53 random bits.

    Counter based: the same arguments give the same number anywhere, in any order. ``stream``
    separates several numbers needed for one token. The mixing function is the 64-bit finaliser of
    SplitMix64 (Steele, Lea and Flood, 2014), chained over seed, stream and step so that nearby
    seeds, streams and steps give unrelated numbers.
    """
    state = _mix64(seed & _MASK64)
    state = _mix64(state ^ (stream & _MASK64))
    state = _mix64(state ^ (step & _MASK64))
    # Zero has one chance in 2**53; moving it to the next value keeps the interval open.
    return ((state >> 11) or 1) * 2.0**-53


def _mix64(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def _integer(name: str, value: SupportsIndex, low: int, high: int | None = None) -> int:
    expected = f"{low} or more" if high is None else f"{low} to {high}"
    if isinstance(value, bool):
        raise SamplingError(f"{name} {value!r} is not an integer; expected {expected}")
    try:
        number = operator.index(value)
    except TypeError:
        raise SamplingError(f"{name} {value!r} is not an integer; expected {expected}") from None
    if number < low or (high is not None and number > high):
        raise SamplingError(f"{name} {number} is out of range; expected {expected}")
    return number


def _number(name: str, value: Any, low: float, high: float) -> float:
    expected = f"expected {low:g} to {high:g}"
    if isinstance(value, bool) or not isinstance(value, Real):
        raise SamplingError(f"{name} {value!r} is not a number; {expected}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not low <= number <= high:  # also refuses NaN, which compares false
        raise SamplingError(f"{name} {value!r} is out of range; {expected}")
    return number


def _checked_bias(bias: Mapping[int, float] | None) -> dict[int, float] | None:
    if bias is None:
        return None
    if not isinstance(bias, Mapping):
        raise SamplingError(f"logit_bias {bias!r} is not a mapping; expected token id to number")
    return {
        _integer("logit_bias token id", token_id, 0): _number(
            f"logit_bias of token {token_id}", value, -100.0, 100.0
        )
        for token_id, value in bias.items()
    }


def _checked_stop(stop: Iterable[str] | None) -> tuple[str, ...]:
    if stop is None:
        return ()
    strings = (stop,) if isinstance(stop, str) else _as_tuple("stop", stop, "strings")
    for text in strings:
        if not isinstance(text, str):
            raise SamplingError(f"stop {text!r} is not a string; expected one or more strings")
        if not text:
            raise SamplingError(
                "stop '' would match everywhere; expected strings that are not empty"
            )
    return strings


def _checked_ids(name: str, ids: Iterable[int] | None) -> tuple[int, ...]:
    if ids is None:
        return ()
    return tuple(_integer(name, token_id, 0) for token_id in _as_tuple(name, ids, "token ids"))


def _as_tuple(name: str, values: Iterable[Any], content: str) -> tuple[Any, ...]:
    # Text and mappings iterate too, but never mean a list of ids or of stop strings.
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
        raise SamplingError(f"{name} {values!r} is not a list; expected a list of {content}")
    return tuple(values)
