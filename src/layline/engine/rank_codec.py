"""What ranks read from messages and what they answer. The driver's side is in remote.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from layline.engine.executor import RowSpec
from layline.engine.outcome import FailedRow, Outcome
from layline.engine.reading import Reading
from layline.engine.wire import Admit, Read, Tokens
from layline.grammar import Grammar
from layline.sampling import SamplingParams, TokenLogprobs


def spec_of(message: Admit) -> RowSpec:
    """The row of an admitted request."""
    return RowSpec(
        params=params_of(message.params),
        seed=message.seed,
        valid_vocab=message.valid_vocab,
        prompt_ids=message.prompt_ids,
        eos_ids=frozenset(message.eos_ids),
        banned_ids=frozenset(message.banned_ids),
    )


def params_of(fields: Mapping[str, Any]) -> SamplingParams:
    """Parameters from their fields as a message carries them."""
    grammar = fields.get("grammar")
    return SamplingParams(**{**fields, "grammar": grammar and Grammar(**grammar)})


def packed_tokens(
    number: int, drawn: Sequence[Outcome], readings: Sequence[Reading | FailedRow]
) -> Tokens:
    """What came of step ``number``, as it travels."""
    ids: list[int] = []
    logprobs: list[tuple[float, list[tuple[int, float]]] | None] = []
    failed: list[tuple[int, str, str]] = []
    for row, one in enumerate(drawn):
        if isinstance(one, FailedRow):
            failed.append((row, one.message, one.places))
            ids.append(-1)
            logprobs.append(None)
        else:
            ids.append(one[0])
            logprobs.append(None if one[1] is None else packed_logprobs(one[1]))
    reads = [packed_reading(one) for one in readings]
    return Tokens(number, ids, logprobs, failed=failed, reads=reads)


def packed_reading(reading: Reading | FailedRow) -> Read:
    """One reading as it travels; the ids of its tokens are known where it goes."""
    if isinstance(reading, FailedRow):
        return Read(failed=(reading.message, reading.places))
    logprobs = [packed_logprobs(one) for one in reading if isinstance(one, TokenLogprobs)]
    return Read(logprobs, [one for one in reading if isinstance(one, float)])


def packed_logprobs(found: TokenLogprobs) -> tuple[float, list[tuple[int, float]]]:
    """Log-probabilities without the id, which travels beside them."""
    return found.logprob, list(found.top)
