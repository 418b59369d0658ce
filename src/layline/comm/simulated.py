"""Ranks as threads of one process: any world size, and mistakes found at once.

Every rank's call is compared with those of the ranks already there, so that a call of another
kind, shape or dtype, in another order, or for a rank that has finished fails when it is made; and
when all ranks that still run wait, they fail instead of waiting for ever. The message says where
each rank is.

Sums are added from the group's first rank to its last and rounded to the tensors' dtype each time,
so every rank has the same result whatever order the threads ran in. No result shares memory with
an input or with another rank's result.
"""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from layline.comm.calls import Call, make_call
from layline.comm.groups import CollectiveKind, Group
from layline.comm.wires import add_in_order
from layline.errors import CollectiveError
from layline.topology import GroupName, Topology

Result = TypeVar("Result")

# How often a caller looks whether a rank has failed, and how long it then waits for the others.
POLL_S = 0.05
GRACE_S = 2.0


@dataclass
class _Meeting:
    """One collective on its way: what the ranks that have come bring, by position."""

    name: GroupName
    ranks: tuple[int, ...]
    sequence: int
    changed: threading.Condition
    calls: dict[int, Call] = field(default_factory=dict)
    inputs: dict[int, Tensor] = field(default_factory=dict)
    total: Tensor | None = None

    def place(self, position: int) -> str:
        """Where the rank at ``position`` is, in words."""
        return f"{self.name.value} #{self.sequence} {self.calls[position]}"


class SimulatedWorld:
    """Ranks 0 to ``world_size - 1``, each on a thread of its own.

    With ``spend_inputs`` the input of an all-reduce is overwritten with NaN, as a real group may
    reuse it; give each rank a tensor of its own. After a failure every call raises CollectiveError
    with its cause.
    """

    def __init__(self, world_size: int, *, spend_inputs: bool = True) -> None:
        self.world_size = world_size
        self.failure: tuple[int | None, BaseException] | None = None
        self._spend_inputs = spend_inputs
        self._lock = threading.Lock()
        self._meetings: dict[tuple[GroupName, tuple[int, ...]], _Meeting] = {}
        self._waiting: dict[int, _Meeting] = {}
        self._finished: set[int] = set()

    def groups(self, topology: Topology) -> dict[GroupName, Group]:
        """The ends of ``topology.rank``'s groups that have more than one rank.

        Raises CollectiveError when the topology is not of this world's size.
        """
        if topology.world_size != self.world_size:
            raise CollectiveError(
                f"the topology has {topology.world_size} ranks; the world has {self.world_size}"
            )
        return {
            name: SimulatedGroup(self, name, topology.group(name), topology.rank)
            for name in GroupName
            if topology.size(name) > 1
        }

    def finish(self, rank: int) -> None:
        """Say that ``rank`` makes no more calls. Ranks that wait for it fail."""
        with self._lock:
            self._finished.add(rank)
            if self.failure is None:
                self._check_progress(rank)

    def fail(self, rank: int | None, cause: BaseException) -> None:
        """End the world because of ``cause`` on ``rank``; the first failure stays."""
        with self._lock:
            self._fail(rank, cause)

    def where(self) -> str:
        """What every rank does, in one line."""
        with self._lock:
            return self._where()

    def exchange(self, group: SimulatedGroup, call: Call, x: Tensor) -> Tensor:
        """Bring ``x`` and wait for the others: the sum of all inputs, or all of them joined.

        The result is shared between ranks. Raises CollectiveError for every failure.
        """
        here = group.ranks[group.rank]
        with self._lock:
            self._raise_failure()
            meeting = self._enter(group, call, x)
            if len(meeting.calls) < group.size:
                self._waiting[here] = meeting
                self._check_progress(here)
                while meeting.total is None:
                    self._raise_failure()
                    meeting.changed.wait()
                return meeting.total
        # The others still count as waiting, and this rank as running, so nothing is a deadlock.
        total = self._combine(call, [meeting.inputs[index] for index in range(group.size)])
        with self._lock:
            self._meetings[group.name, group.ranks] = self._new_meeting(group, meeting.sequence + 1)
            for rank in group.ranks:
                self._waiting.pop(rank, None)
            meeting.total = total
            meeting.changed.notify_all()
        return total

    def _new_meeting(self, group: SimulatedGroup, sequence: int) -> _Meeting:
        return _Meeting(group.name, group.ranks, sequence, threading.Condition(self._lock))

    def _enter(self, group: SimulatedGroup, call: Call, x: Tensor) -> _Meeting:
        key = (group.name, group.ranks)
        meeting = self._meetings.setdefault(key, self._new_meeting(group, 0))
        here = group.ranks[group.rank]
        for position, other in meeting.calls.items():
            if other != call:
                self._fail(
                    here,
                    CollectiveError(
                        f"rank {here} calls {call} on {group.name.value} (#{meeting.sequence}) "
                        f"while rank {group.ranks[position]} calls {other}; {self._where()}"
                    ),
                )
                self._raise_failure()
        meeting.calls[group.rank] = call
        meeting.inputs[group.rank] = x
        return meeting

    def _combine(self, call: Call, inputs: Sequence[Tensor]) -> Tensor:
        with torch.no_grad():
            if call.kind is CollectiveKind.ALL_GATHER:
                return torch.cat(list(inputs))
            total = add_in_order(inputs)
        if call.kind is CollectiveKind.ALL_REDUCE and self._spend_inputs:
            # Inference mode, because a rank may bring a tensor made in it.
            with torch.inference_mode():
                for x in inputs:
                    if x.is_contiguous():
                        x.fill_(float("nan"))
        return total

    def _check_progress(self, here: int) -> None:
        """Fail when a rank waits for one that has finished, or when all that are left wait."""
        meetings = {id(meeting): meeting for meeting in self._waiting.values()}
        gone = sorted(
            rank
            for meeting in meetings.values()
            for rank in self._finished.intersection(meeting.ranks)
            if meeting.ranks.index(rank) not in meeting.calls
        )
        if gone:
            reason = f"rank {gone[0]} has finished and others wait for it"
        elif self._waiting and len(self._waiting) + len(self._finished) == self.world_size:
            reason = "every rank waits"
        else:
            return
        self._fail(here, CollectiveError(f"deadlock: {reason}; {self._where()}"))

    def _fail(self, rank: int | None, cause: BaseException) -> None:
        if self.failure is None:
            self.failure = (rank, cause)
            for meeting in self._waiting.values():
                meeting.changed.notify_all()

    def _raise_failure(self) -> None:
        if self.failure is None:
            return
        rank, cause = self.failure
        if isinstance(cause, CollectiveError):
            raise CollectiveError(str(cause)) from cause
        raise CollectiveError(f"rank {rank} failed: {type(cause).__name__}: {cause}") from cause

    def _where(self) -> str:
        places: dict[str, list[int]] = {}
        for rank in range(self.world_size):
            meeting = self._waiting.get(rank)
            if meeting is not None:
                place = f"waiting at {meeting.place(meeting.ranks.index(rank))}"
            else:
                place = "finished" if rank in self._finished else "running"
            places.setdefault(place, []).append(rank)
        return "; ".join(
            f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: {place}"
            for place, ranks in places.items()
        )


class SimulatedGroup:
    """One thread's end of a group. Implements comm.groups.Group; see there."""

    __slots__ = ("_world", "name", "rank", "ranks")

    def __init__(
        self, world: SimulatedWorld, name: GroupName, ranks: tuple[int, ...], global_rank: int
    ) -> None:
        self.name = name
        self.ranks = ranks
        self.rank = ranks.index(global_rank)
        self._world = world

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def all_reduce(self, x: Tensor, /) -> Tensor:
        """See Group.all_reduce."""
        return self._exchange(CollectiveKind.ALL_REDUCE, x).clone()

    def all_gather(self, x: Tensor, /) -> Tensor:
        """See Group.all_gather."""
        return self._exchange(CollectiveKind.ALL_GATHER, x).clone()

    def reduce_scatter(self, x: Tensor, /) -> Tensor:
        """See Group.reduce_scatter."""
        total = self._exchange(CollectiveKind.REDUCE_SCATTER, x)
        rows = total.shape[0] // self.size
        return total.narrow(0, self.rank * rows, rows).clone()

    def reduce_scatter_v(self, x: Tensor, counts: Sequence[int], /) -> Tensor:
        """See Group.reduce_scatter_v."""
        total = self._exchange(CollectiveKind.REDUCE_SCATTER_V, x, counts)
        return total.narrow(0, sum(counts[: self.rank]), counts[self.rank]).clone()

    def _exchange(
        self, kind: CollectiveKind, x: Tensor, counts: Sequence[int] | None = None
    ) -> Tensor:
        call = make_call(kind, x, (self.name, self.size), counts)
        return self._world.exchange(self, call, x)


def run_ranks(
    topology: Topology,
    function: Callable[[Topology, dict[GroupName, Group]], Result],
    *,
    timeout_s: float = 60.0,
    spend_inputs: bool = True,
) -> list[Result]:
    """Run ``function(topology.at(rank), groups)`` for every rank, each on its own thread.

    Every thread has a copy of the caller's context variables; torch's inference mode is a thread's
    own, so it is for ``function`` to enter. Returns the results by rank.

    Raises the first exception that any rank raised, with a note that names the rank; the other
    ranks fail at their next call. Raises CollectiveError when ranks disagree or wait for ever, and
    when they still run after ``timeout_s``; those threads are left behind as daemons.
    """
    world = SimulatedWorld(topology.world_size, spend_inputs=spend_inputs)
    results: dict[int, Result] = {}

    def run(rank: int) -> None:
        try:
            here = topology.at(rank)
            results[rank] = function(here, world.groups(here))
        except BaseException as error:
            world.fail(rank, error)
        finally:
            world.finish(rank)

    threads = [
        threading.Thread(
            target=contextvars.copy_context().run,
            args=(run, rank),
            name=f"rank {rank}",
            daemon=True,
        )
        for rank in range(topology.world_size)
    ]
    try:
        for thread in threads:
            thread.start()
        _join(threads, world, timeout_s)
    except BaseException as error:
        world.fail(None, error)
        raise
    if world.failure is not None:
        rank, cause = world.failure
        if rank is not None:
            cause.add_note(f"on simulated rank {rank} of {topology.world_size}")
        raise cause
    return [results[rank] for rank in range(topology.world_size)]


def _join(threads: Sequence[threading.Thread], world: SimulatedWorld, timeout_s: float) -> None:
    """Wait for the threads, after a failure only so long that each can reach its next call."""
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        while thread.is_alive() and time.monotonic() < deadline:
            thread.join(POLL_S)
            if world.failure is not None:
                deadline = min(deadline, time.monotonic() + GRACE_S)
    if any(thread.is_alive() for thread in threads):
        late = CollectiveError(f"ranks still run after {timeout_s:g} s: {world.where()}")
        world.fail(None, late)
