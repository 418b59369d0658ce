"""What speculation asks of whoever guesses tokens. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from layline.engine.request import Request


@dataclass(frozen=True, slots=True)
class DraftRoom:
    """At most ``count`` drafts can be verified after the tokens that ``request`` has by now."""

    request: Request
    count: int


class Proposer(Protocol):
    """Guesses how requests go on. A wrong guess costs time and changes no token."""

    def propose(self, rooms: Sequence[DraftRoom], /) -> list[tuple[int, ...]]:
        """Drafts for each of ``rooms``, as many as there is room for or fewer."""

    def settle(self, request: Request, accepted: int, /) -> None:
        """``accepted`` of ``request.drafts`` have become tokens, and one further token has come."""

    def forget(self, request: Request, /) -> None:
        """The request has ended; one that is not known is no error."""
