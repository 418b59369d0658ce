"""A record of every collective that ran on a rank. Imports torch only to time a GPU.

A collective that all ranks enter with zero rows sends nothing and is not recorded, on any rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

from layline.comm.groups import CollectiveKind, CollectiveRecord, Group, Groups
from layline.topology import GroupName


class Timing(Enum):
    """How long a collective took: not asked, as the host saw it, or until the device was done."""

    OFF = "off"
    HOST = "host"
    SYNCHRONISED = "synchronised"


class Recorder:
    """The records of one rank, in the order in which they ran.

    With ``Timing.SYNCHRONISED`` the GPU is idle before and after each collective, which slows a run
    down; the other two add no wait.
    """

    def __init__(self, timing: Timing = Timing.OFF) -> None:
        self.timing = timing
        self.records: list[CollectiveRecord] = []

    def clear(self) -> None:
        """Forget what ran so far."""
        self.records.clear()


class RecordingGroup:
    """A group that records what it passes on. Implements comm.groups.Group; see there.

    A collective that raised is not recorded.
    """

    __slots__ = ("_group", "_in_compute", "_recorder", "name", "rank", "ranks")

    def __init__(self, group: Group, recorder: Recorder, in_compute: bool) -> None:
        self.name = group.name
        self.ranks = group.ranks
        self.rank = group.rank
        self._group = group
        self._recorder = recorder
        self._in_compute = in_compute

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def all_reduce(self, x: Any, /) -> Any:
        """See Group.all_reduce."""
        return self._run(CollectiveKind.ALL_REDUCE, x, self._group.all_reduce)

    def all_gather(self, x: Any, /) -> Any:
        """See Group.all_gather."""
        return self._run(CollectiveKind.ALL_GATHER, x, self._group.all_gather)

    def reduce_scatter(self, x: Any, /) -> Any:
        """See Group.reduce_scatter."""
        return self._run(CollectiveKind.REDUCE_SCATTER, x, self._group.reduce_scatter)

    def reduce_scatter_v(self, x: Any, counts: Sequence[int], /) -> Any:
        """See Group.reduce_scatter_v."""
        return self._run(
            CollectiveKind.REDUCE_SCATTER_V, x, lambda y: self._group.reduce_scatter_v(y, counts)
        )

    def _run(self, kind: CollectiveKind, x: Any, collective: Callable[[Any], Any]) -> Any:
        recorder = self._recorder
        waits = recorder.timing is Timing.SYNCHRONISED and x.is_cuda
        if waits:
            _synchronise()
        begin = time.perf_counter()
        result = collective(x)
        if waits:
            _synchronise()
        seconds = None if recorder.timing is Timing.OFF else time.perf_counter() - begin
        rows, columns = x.shape
        if kind is CollectiveKind.ALL_GATHER:
            rows *= self.size
        if rows * columns == 0:
            return result
        payload = rows * columns * x.element_size()
        recorder.records.append(
            CollectiveRecord(kind, self.name, rows, columns, payload, self._in_compute, seconds)
        )
        return result


def record_groups(
    groups: Groups, recorder: Recorder
) -> tuple[dict[GroupName, Group], dict[GroupName, Group]]:
    """``groups`` recorded twice over: the ends for boundaries and the ends for compute modules."""

    def ends(in_compute: bool) -> dict[GroupName, Group]:
        return {name: RecordingGroup(group, recorder, in_compute) for name, group in groups.items()}

    return ends(in_compute=False), ends(in_compute=True)


def _synchronise() -> None:
    import torch

    torch.cuda.synchronize()
