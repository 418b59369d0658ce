"""Drafts from the text itself: what followed the last time its latest tokens occurred.

As in prompt lookup decoding (Saxena, 2023). Pure Python without torch: an index of pairs is kept
up to date token by token, so that a step costs microseconds however long the text is.
"""

from __future__ import annotations

from collections.abc import Sequence

from layline.engine.request import Request
from layline.engine.speculation.proposer import DraftRoom

SHORTEST = 2
"""Tokens that must have occurred before; below, a match is chance."""
LONGEST = 8
"""Tokens beyond which a longer match is not looked for."""
COMPARED = 16
"""Latest places of a pair that are compared; a text of one repeated pair has thousands."""


class TextIndex:
    """A request's tokens and the places of each pair of neighbours in them."""

    def __init__(self, token_ids: Sequence[int] = ()) -> None:
        self._ids: list[int] = []
        # For each pair the latest position after it, and for each position the one before that.
        self._latest: dict[tuple[int, int], int] = {}
        self._earlier: list[int] = []
        self.extend(token_ids)

    def __len__(self) -> int:
        return len(self._ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add tokens behind those that are there."""
        ids = self._ids
        for token_id in token_ids:
            earlier = 0
            if len(ids) >= SHORTEST:
                # Only now has the pair before this token something that follows it.
                pair = (ids[-2], ids[-1])
                earlier = self._latest.get(pair, 0)
                self._latest[pair] = len(ids)
            self._earlier.append(earlier)
            ids.append(token_id)

    def following(self, count: int) -> tuple[int, ...]:
        """``count`` tokens from the place whose past agrees longest with the end of the text.

        Of equally good places the latest; () where the last pair has not occurred before. The copy
        may run into what it has copied: a text that repeats itself goes on repeating.
        """
        ids = self._ids
        if len(ids) <= SHORTEST:
            return ()
        place = self._latest.get((ids[-2], ids[-1]), 0)
        best, longest = 0, 0
        for _ in range(COMPARED):
            if place == 0:
                break
            length = self._agreement(place)
            if length > longest:
                best, longest = place, length
            if length == LONGEST:
                break
            place = self._earlier[place]
        if best == 0:
            return ()
        period = len(ids) - best
        drafts: list[int] = []
        for number in range(count):
            drafts.append(ids[best + number] if number < period else drafts[number - period])
        return tuple(drafts)

    def _agreement(self, place: int) -> int:
        """How many tokens before ``place`` equal the last ones of the text."""
        ids, end = self._ids, len(self._ids)
        length = SHORTEST
        while length < min(LONGEST, place) and ids[place - 1 - length] == ids[end - 1 - length]:
            length += 1
        return length


class NgramProposer:
    """Proposes what followed in the request's own prompt and answer."""

    def __init__(self) -> None:
        self._texts: dict[int, TextIndex] = {}

    def propose(self, rooms: Sequence[DraftRoom], /) -> list[tuple[int, ...]]:
        """See Proposer."""
        return [self._text(room.request).following(room.count) for room in rooms]

    def settle(self, request: Request, accepted: int, /) -> None:
        """See Proposer. The index takes new tokens when it is asked next."""

    def forget(self, request: Request, /) -> None:
        """See Proposer."""
        self._texts.pop(request.request_id, None)

    def _text(self, request: Request) -> TextIndex:
        text = self._texts.get(request.request_id)
        if text is None:
            text = self._texts[request.request_id] = TextIndex()
        text.extend(request.token_ids(len(text), request.num_tokens))
        return text
