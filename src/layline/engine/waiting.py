"""The order in which requests are admitted, and in which they lose their place. Pure Python.

Higher priority goes first, then earlier arrival. A request that more than ``MAX_OVERTAKEN`` others
have overtaken goes before all that have not, whatever their priority, and none is admitted before
it any more; so nothing waits for ever.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from layline.engine.request import Request

MAX_OVERTAKEN = 64


class Rank(NamedTuple):
    """Where a request stands: the least is admitted first and the greatest preempted first."""

    not_aged: bool
    lowness: int
    arrival: int


@dataclass(slots=True, eq=False)
class Ticket:
    """A request as the scheduler keeps it, waiting or running.

    ``keys`` are those of its full blocks, as far as they are needed so far; ``num_kept`` counts
    blocks that were offered to the prefix cache. ``deadline`` is the number of admissions at which
    it has been overtaken too often.
    """

    request: Request
    rank: Rank
    deadline: int = 0
    keys: list[bytes] = field(default_factory=list)
    num_kept: int = 0

    @property
    def is_aged(self) -> bool:
        """True when nobody may overtake it any more."""
        return not self.rank.not_aged


class WaitingQueue:
    """Requests that wait, first the one to admit first."""

    def __init__(self) -> None:
        self._line: list[tuple[Rank, Ticket]] = []
        self._arrivals = itertools.count()
        self._admitted = 0
        self._next_deadline = 0

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[Ticket]:
        """The requests in order, those first that have waited too long.

        The queue must not change while it is read on.
        """
        if self._line and self._admitted >= self._next_deadline:
            self._age()
        return (ticket for _, ticket in self._line)

    def enter(self, request: Request) -> Ticket:
        """Queue a new request."""
        rank = Rank(True, -request.priority, next(self._arrivals))
        ticket = Ticket(request, rank)
        self._insert(ticket, self._admitted + len(self._line) + MAX_OVERTAKEN)
        return ticket

    def reenter(self, ticket: Ticket) -> None:
        """Queue a preempted request again, at the place of its arrival."""
        self._insert(ticket, self._admitted + MAX_OVERTAKEN)

    def leave(self, ticket: Ticket, *, admitted: bool) -> None:
        """Take a waiting request out, because it runs now or because nobody wants it any more."""
        position = bisect_left(self._line, ticket.rank, key=lambda each: each[0])
        assert self._line[position][1] is ticket, "the request does not wait"
        del self._line[position]
        self._admitted += admitted

    def _insert(self, ticket: Ticket, deadline: int) -> None:
        ticket.deadline = deadline
        if not self._line or deadline < self._next_deadline:
            self._next_deadline = deadline
        insort(self._line, (ticket.rank, ticket), key=lambda each: each[0])

    def _age(self) -> None:
        """Move requests past their deadline to the front.

        In a queue that nobody overtakes, a request is admitted after as many others as stood before
        it when it came; its deadline is ``MAX_OVERTAKEN`` admissions after that.
        """
        for _, ticket in self._line:
            if self._admitted >= ticket.deadline:
                ticket.rank = Rank(False, 0, ticket.rank.arrival)
        self._line = sorted(
            ((ticket.rank, ticket) for _, ticket in self._line), key=lambda each: each[0]
        )
        self._next_deadline = min(
            (ticket.deadline for _, ticket in self._line if not ticket.is_aged),
            default=self._admitted + MAX_OVERTAKEN,
        )
