"""What is read of prompts while they are computed, beside the rows that are sampled.

Two things can be read: the log-probabilities of a prompt's own tokens, and its hidden states as one
vector. Each prompt row is read once, by the step that computes it first. No torch here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from layline.sampling import TokenLogprobs

Reading = tuple[TokenLogprobs, ...] | tuple[float, ...]
"""Log-probabilities of the rows' next tokens, or the sum of their hidden states."""


@dataclass(frozen=True, slots=True)
class RowRead:
    """Rows of one span that a step reads.

    They are rows ``first`` .. ``first + count - 1`` of the span numbered ``span``. With
    ``next_ids``, one a row, their log-probabilities over the first ``vocab`` ids are reported, with
    ``top`` alternatives; without, the sum of the rows' normalised hidden states.
    """

    span: int
    first: int
    count: int
    next_ids: tuple[int, ...] = ()
    top: int = 0
    vocab: int = 0


@dataclass(frozen=True, slots=True)
class PromptReading:
    """What a request wants read of its prompt.

    ``vocab`` ids have log-probabilities, of which ``top`` are reported beside each token's; where
    ``vocab`` is 0 hidden states are pooled, all of them or, with ``last_only``, the last.
    """

    vocab: int = 0
    top: int = 0
    last_only: bool = False

    def rows(self, prompt_ids: Sequence[int], start: int, stop: int) -> range:
        """Of the prompt's rows ``start`` .. ``stop - 1``, those that are read."""
        length = len(prompt_ids)
        if self.vocab:
            return range(start, min(stop, length - 1))  # Nothing known follows the last.
        if self.last_only:
            start = max(start, length - 1)
        return range(start, min(stop, length))

    def of_span(self, prompt_ids: Sequence[int], rows: range, span: int, start: int) -> RowRead:
        """The read of prompt rows ``rows`` in span number ``span``, which begins at ``start``."""
        first = rows.start - start
        if not self.vocab:
            return RowRead(span, first, len(rows))
        next_ids = tuple(prompt_ids[rows.start + 1 : rows.stop + 1])
        return RowRead(span, first, len(rows), next_ids, self.top, self.vocab)

    def cacheable(self, num_read: int, tokens: int) -> int:
        """Of ``tokens`` leading ones, those that the cache may give once ``num_read`` were read."""
        return tokens if self.last_only else num_read
