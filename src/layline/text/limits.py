"""What one rendering of a chat template may use."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds far above what long conversations need, and far below what stalls a server.

    Attributes:
        passes: loop passes and macro calls together.
        seconds: time, looked at with each pass.
        length: characters or items in one value, and characters of output.
        number: the largest number that a method or filter is given.
        bits: size of an integer that a product or power makes.
        source: characters of template source.
    """

    passes: int = 1_000_000
    seconds: float = 10.0
    length: int = 1 << 24
    number: int = 100_000
    bits: int = 1 << 14
    source: int = 1 << 20
