"""Liveness counters of one runtime: proof that a path really ran. No torch here.

Bits of two equal unsplit walks are equal too, so a gate also asks that the counters of what it
claims have advanced.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

LOOPS = ("eager", "deferred", "batch", "verify", "prime", "graph")
NAMES = (
    *(f"{loop}_splits" for loop in LOOPS),
    "graph_captures",
    "prime_split_chunks",
    "prime_pipe_overlaps",
    "step_overlaps",
    "late_growths",
    "prime_batches",
    "prime_batch_splits",
    "slot_switches",
    "growth_events",
    "growth_syncs",
    "remote_reads",
    "remote_read_bytes",
)


class Counters:
    """Numbers that only grow, one for each of NAMES. Any thread may add to them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values = dict.fromkeys(NAMES, 0)

    def add(self, name: str, amount: int = 1) -> None:
        """Add to one counter. Raises KeyError for a name that is none of NAMES."""
        assert amount >= 0, "counters only grow"
        with self._lock:
            self._values[name] += amount

    def __getitem__(self, name: str) -> int:
        with self._lock:
            return self._values[name]

    def snapshot(self) -> Mapping[str, int]:
        """All counters as they are now."""
        with self._lock:
            return MappingProxyType(dict(self._values))

    def since(self, before: Mapping[str, int]) -> dict[str, int]:
        """How far each counter has advanced since a snapshot."""
        return {name: value - before[name] for name, value in self.snapshot().items()}

    def stalled(self, before: Mapping[str, int], names: Iterable[str]) -> list[str]:
        """Those of ``names`` that have not advanced since a snapshot: what a gate must refuse."""
        grown = self.since(before)
        return [name for name in names if grown[name] == 0]


class WalkerWatch:
    """Notices overlap of steps, or of the chunks of one prefill, and counts it as ``name``.

    A chunk on a later stage counts once if an earlier stage walked another chunk meanwhile. With
    C chunks on N stages that can be (N - 1)(C - 1) times, and is so in a full pipeline; one walker
    after the other gives none, however work was enqueued. No number comes twice.
    """

    def __init__(self, counters: Counters, name: str = "prime_pipe_overlaps") -> None:
        self._counters = counters
        self._name = name
        self._lock = threading.Lock()
        self._active: set[tuple[int, int]] = set()
        self._counted: set[tuple[int, int]] = set()

    @contextmanager
    def walking(self, stage: int, chunk: int) -> Iterator[None]:
        """The scope in which a stage walks its layers for one chunk."""
        entered = (stage, chunk)
        with self._lock:
            self._active.add(entered)
            for each in self._active:
                meets = any(other[0] < each[0] for other in self._active)
                if meets and each not in self._counted:
                    self._counted.add(each)
                    self._counters.add(self._name)
        try:
            yield
        finally:
            with self._lock:
                self._active.discard(entered)
                self._counted.discard(entered)
