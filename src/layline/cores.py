"""Which of the machine's cores a process runs on. No torch here."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence


def usable_cores() -> int:
    """Cores this process may run on."""
    return len(allowed_cores()) or os.cpu_count() or 1


def cores_of_rank(rank: int, local_ranks: int, threads: int) -> list[int]:
    """The cores of a rank whose threads take its whole share of those this process may run on.

    None of them where ranks have fewer threads or more: others may be meant to use the rest, and
    the system divides them better.
    """
    cores = sorted(allowed_cores())
    share = len(cores) // local_ranks
    return cores[rank * share : (rank + 1) * share] if share == threads else []


class CoreKeeper:
    """Threads that keep to a rank's ``own`` cores or may use ``every`` one, as the work has it.

    A stage that waits for the one before leaves its core to the threads beside it, if they do not
    take the other one's. Where all stages are busy the system knows better. Without own cores
    nothing is done.
    """

    def __init__(self, own: Sequence[int], every: Iterable[int]) -> None:
        self._sets = (frozenset(every), frozenset(own))
        self._now = threading.local()

    def keep(self, strictly: bool) -> None:
        """Let the calling thread keep to the own cores, or not, from here on."""
        if not self._sets[1] or getattr(self._now, "strictly", None) is strictly:
            return
        os.sched_setaffinity(0, self._sets[strictly])
        self._now.strictly = strictly


def allowed_cores() -> frozenset[int]:
    """The cores that the calling thread may run on; none where the system does not say."""
    try:
        return frozenset(os.sched_getaffinity(0))
    except AttributeError:
        return frozenset()
