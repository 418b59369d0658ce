"""A step's phase, and what it does to one sequence, as plain numbers. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Phase(Enum):
    """Which part of a request's life rows serve; kernels are chosen by it."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class MixedPhase:
    """The first ``num_decode`` rows decode, and at least one more row prefills."""

    num_decode: int


StepPhase = Phase | MixedPhase
"""The phase of all rows of a step, or of each part of them."""


def step_phase(num_decode: int, num_rows: int) -> StepPhase:
    """The phase of rows of which the first ``num_decode`` decode; without rows it is DECODE."""
    if num_decode == num_rows:
        return Phase.DECODE
    return MixedPhase(num_decode) if num_decode else Phase.PREFILL


@dataclass(frozen=True, slots=True)
class SequenceSpan:
    """``count`` new tokens of one sequence, at positions ``start`` .. ``start + count - 1``.

    ``blocks`` is the sequence's block table: token ``i`` lives in row ``i % block_size`` of block
    ``blocks[i // block_size]``. ``rope_length`` is the sequence length that dynamic rope scaling
    goes by: the whole prompt while it is prefilled, the length so far afterwards.
    """

    start: int
    count: int
    blocks: Sequence[int]
    rope_length: int

    @property
    def length(self) -> int:
        """Tokens in the cache once the step has run."""
        return self.start + self.count
