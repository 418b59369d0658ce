"""When stages handed over to other processes and waited for them, for timelines. No torch here."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

Handover = tuple[int, str, float, float]
"""(stage, what it did, begin, end), by the machine's monotonic clock in seconds."""
Note = Callable[[str, float, float], None]
"""Told of each with what was done, begin and end."""
MOST_KEPT = 1000


def unnoted(what: str, begin: float, end: float) -> None:
    """A Note that nobody reads."""


class HandoverLog:
    """Those of one process, the latest if nobody takes them. Any thread may note."""

    def __init__(self) -> None:
        self._found: deque[Handover] = deque(maxlen=MOST_KEPT)

    def of_stage(self, stage: int) -> Note:
        """What notes a stage's."""

        def note(what: str, begin: float, end: float) -> None:
            self._found.append((stage, what, begin, end))

        return note

    def take(self) -> list[Handover]:
        """All that were noted since the last call."""
        return [self._found.popleft() for _ in range(len(self._found))]
