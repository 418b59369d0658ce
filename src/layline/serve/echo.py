"""A prompt given back before its continuation, with the log-probabilities of its own tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from layline.sampling import TokenLogprobs
from layline.serve.jobs import PromptText
from layline.serve.logprobs import Placed, completion_logprobs, shown
from layline.serve.responses import CompletionLogprobs
from layline.text.tokenizer import Tokenizer


def echoed_logprobs(
    tokenizer: Tokenizer,
    prompt: PromptText,
    found: Sequence[TokenLogprobs],
    placed: Sequence[Placed],
) -> CompletionLogprobs:
    """Of a prompt, ``found`` from its second token on, and then of its continuation."""
    first = prompt.ids[0]
    known = [Placed(at, one) for at, one in zip(prompt.offsets[1:], found, strict=True)]
    rest = completion_logprobs(tokenizer, [*known, *moved(placed, len(prompt.text))])
    # Nothing comes before the first token, so nothing is said of it.
    return CompletionLogprobs(
        tokens=[shown(tokenizer, first, "bytes:"), *rest.tokens],
        token_logprobs=[None, *rest.token_logprobs],
        top_logprobs=[None, *rest.top_logprobs],
        text_offset=[0, *rest.text_offset],
        bytes=[list(tokenizer.token_bytes(first)), *rest.bytes],
    )


def moved(placed: Sequence[Placed], characters: int) -> list[Placed]:
    """Tokens of a continuation whose text begins after so many characters."""
    return [replace(one, offset=one.offset + characters) for one in placed]
