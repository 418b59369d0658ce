"""What an engine has done and how long it took, as plain numbers. No torch here.

One thread writes; others may read at any time and see numbers that are at most a step old.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

LATENCY_BOUNDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0),
)
"""Upper bounds of a histogram's buckets, in seconds."""


class Histogram:
    """How often a value fell into each bucket, with the sum of all values."""

    def __init__(self, bounds: tuple[float, ...] = LATENCY_BOUNDS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count ``value``, ``times`` times over; a value on a bound belongs below it."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def cumulative(self) -> list[tuple[float, int]]:
        """(upper bound, values at or below it), the last bound infinite."""
        rows, so_far = [], 0
        for bound, count in zip((*self.bounds, float("inf")), tuple(self.counts), strict=True):
            so_far += count
            rows.append((bound, so_far))
        return rows


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Numbers of now (requests, blocks) and since the start (tokens looked up, preemptions).

    ``prefix_hits`` of the ``prefix_lookups`` prompt and replayed tokens were found in the cache,
    ``accepted`` of the ``drafted`` verified drafts became tokens.
    """

    waiting: int = 0
    running: int = 0
    blocks: int = 0
    blocks_held: int = 0
    blocks_idle: int = 0
    prefix_lookups: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    drafted: int = 0
    accepted: int = 0


@dataclass
class EngineStatistics:
    """Totals since the engine began. Times are in seconds.

    ``finished`` counts ended requests by reason: stop, length, abort or error. ``inter_token`` is
    the time between a request's tokens, ``first_token`` from submission to the first of them.
    """

    prompt_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    first_token: Histogram = field(default_factory=Histogram)
    inter_token: Histogram = field(default_factory=Histogram)
    request: Histogram = field(default_factory=Histogram)
    step: Histogram = field(default_factory=Histogram)
