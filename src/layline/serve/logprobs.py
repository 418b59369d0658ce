"""Log-probabilities of answers in the two forms of OpenAI's API.

A token is reported when some of its text is in the answer: tokens whose text is still held back
wait for it, those that a stop string cut off and the token that ended the answer are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from layline.engine.answers import Chunk
from layline.sampling import TokenLogprobs
from layline.serve.responses import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob
from layline.text.detokenize import IncrementalDecoder
from layline.text.tokenizer import Tokenizer

LEAST = -9999.0
"""Stands for the logarithm of zero, which JSON has no number for."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A token's log-probabilities and where its text begins, in characters of the answer."""

    offset: int
    found: TokenLogprobs


class PlacedLogprobs:
    """Says of one answer which tokens each piece of its text brings."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        shown_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._decoder = IncrementalDecoder(tokenizer, prompt_ids, shown_ids=shown_ids)
        self._waiting: list[Placed] = []
        self._decoded = 0
        self._released = 0

    def take(self, chunk: Chunk) -> list[Placed]:
        """The tokens to report with ``chunk``."""
        for found in chunk.logprobs:
            self._waiting.append(Placed(self._decoded, found))
            self._decoded += len(self._decoder.add(found.token_id))
        self._released += len(chunk.text)
        if chunk.finish_reason == "length":
            ready, self._waiting = self._waiting, []
            return ready
        ready = [placed for placed in self._waiting if placed.offset < self._released]
        self._waiting = self._waiting[len(ready) :]
        return ready


def chat_logprobs(tokenizer: Tokenizer, placed: Sequence[Placed]) -> ChatLogprobs:
    """The form of chat answers."""
    return ChatLogprobs(
        [
            TokenLogprob(
                token=shown(tokenizer, one.found.token_id),
                logprob=finite(one.found.logprob),
                bytes=list(tokenizer.token_bytes(one.found.token_id)),
                top_logprobs=[
                    TopLogprob(
                        token=shown(tokenizer, token_id),
                        logprob=finite(value),
                        bytes=list(tokenizer.token_bytes(token_id)),
                    )
                    for token_id, value in one.found.top
                ],
            )
            for one in placed
        ]
    )


def completion_logprobs(tokenizer: Tokenizer, placed: Sequence[Placed]) -> CompletionLogprobs:
    """The form of completions."""
    ids = [one.found.token_id for one in placed]
    tops: list[dict[str, float] | None] = []
    for one in placed:
        top = {shown(tokenizer, i, "bytes:"): finite(value) for i, value in one.found.top}
        # As there, the token that was taken is among them even where it is not a likely one.
        top.setdefault(shown(tokenizer, one.found.token_id, "bytes:"), finite(one.found.logprob))
        tops.append(top)
    return CompletionLogprobs(
        tokens=[shown(tokenizer, token_id, "bytes:") for token_id in ids],
        token_logprobs=[finite(one.found.logprob) for one in placed],
        top_logprobs=tops,
        text_offset=[one.offset for one in placed],
        bytes=[list(tokenizer.token_bytes(token_id)) for token_id in ids],
    )


def shown(tokenizer: Tokenizer, token_id: int, prefix: str = "") -> str:
    """A token as text; where it is a part of a character, its bytes written out."""
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in data)


def finite(value: float) -> float:
    """``value``, or a number below all others for the logarithm of zero."""
    return max(value, LEAST)
