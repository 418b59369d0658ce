"""Who is given drafts in a step, how many, and what has come of them. No torch here."""

from __future__ import annotations

from layline.engine.balance import MeshScheduler
from layline.engine.request import Request
from layline.engine.speculation.pace import Pace
from layline.engine.speculation.proposer import DraftRoom, Proposer


class Speculation:
    """Has drafts made before a step and goes by what was accepted after it."""

    def __init__(self, proposer: Proposer, scheduler: MeshScheduler, most: int) -> None:
        """``most`` is how many drafts a request may have in a step."""
        self._proposer = proposer
        self._scheduler = scheduler
        self._most = most
        self._paces: dict[int, Pace] = {}

    def propose(self) -> None:
        """Give drafts to the requests that decode next, as far as rows and cache blocks allow."""
        rooms = [DraftRoom(*room) for room in self._scheduler.draft_rooms(self._wants)]
        if rooms:
            for room, drafts in zip(rooms, self._proposer.propose(rooms), strict=True):
                assert len(drafts) <= room.count, "a proposer keeps to its room"
                room.request.drafts = drafts

    def settle(self, request: Request, drafted: int, accepted: int) -> None:
        """``accepted`` of ``drafted`` verified drafts have become tokens of the request."""
        self._scheduler.settle(request, drafted, accepted)
        self._proposer.settle(request, accepted)
        self._pace(request).observe(drafted, accepted, len(request.output_ids))

    def forget(self, request: Request) -> None:
        """The request has ended; one that is not known is no error."""
        self._paces.pop(request.request_id, None)
        self._proposer.forget(request)

    def _wants(self, request: Request) -> int:
        # A grammar's state cannot be tried and taken back.
        if request.params.grammar is not None:
            return 0
        produced = len(request.output_ids)
        # A step draws one token more than it verifies drafts.
        useful = request.most_tokens - produced - 1
        return min(useful, self._pace(request).wants(produced))

    def _pace(self, request: Request) -> Pace:
        pace = self._paces.get(request.request_id)
        if pace is None:
            pace = self._paces[request.request_id] = Pace.of(self._most)
        return pace
