"""Bit by bit: where two replays differ first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Difference:
    """The first value that differs: of which step, at which index, and what it should be."""

    step: int
    index: tuple[int, ...]
    found: float
    expected: float
    differing: int
    of: int

    def __str__(self) -> str:
        place = ", ".join(map(str, self.index))
        return (
            f"step {self.step}, value [{place}] is {self.found!r} and on one stage "
            f"{self.expected!r}; {self.differing} of the step's {self.of} values differ"
        )


def first_difference(
    found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]
) -> Difference | None:
    """None where every bit is the same. Raises ValueError for other steps, shapes or dtypes."""
    for step, (one, other) in enumerate(zip(found, expected, strict=True)):
        if one.shape != other.shape or one.dtype != other.dtype:
            raise ValueError(
                f"step {step} gave {list(one.shape)} of {one.dtype} and on one stage "
                f"{list(other.shape)} of {other.dtype}"
            )
        differs = bits(one) != bits(other)
        count = int(differs.sum())
        if count:
            place = tuple(differs.nonzero()[0].tolist())
            return Difference(
                step, place, float(one[place]), float(other[place]), count, differs.numel()
            )
    return None


def bits(values: torch.Tensor) -> torch.Tensor:
    """The same memory as integers, so that a NaN equals itself."""
    return values.contiguous().view(_INTEGERS[values.dtype.itemsize])
