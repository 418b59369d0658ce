"""Drafts from the text itself, against a search that looks at every place."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from layline.engine.speculation.ngram import (
    COMPARED,
    LONGEST,
    SHORTEST,
    NgramProposer,
    TextIndex,
)
from layline.engine.speculation.proposer import DraftRoom
from support.fake_requests import fake_request


def searched(ids: list[int], count: int) -> tuple[int, ...]:
    """What ``TextIndex.following`` says it gives, the slow way."""
    end = ids[-SHORTEST:]
    places = [p for p in range(SHORTEST, len(ids)) if ids[p - SHORTEST : p] == end]
    best, longest = 0, 0
    for place in list(reversed(places))[:COMPARED]:
        length = 0
        while length < min(LONGEST, place) and ids[place - 1 - length] == ids[-1 - length]:
            length += 1
        if length > longest:
            best, longest = place, length
    if not best:
        return ()
    text = list(ids)
    for number in range(count):
        text.append(text[best + number])
    return tuple(text[len(ids) :])


@given(
    ids=st.lists(st.integers(0, 3), max_size=80),
    cuts=st.lists(st.integers(0, 80), max_size=4),
    count=st.integers(1, 9),
)
@settings(max_examples=400, deadline=None)
def test_the_index_finds_what_a_search_finds(ids: list[int], cuts: list[int], count: int) -> None:
    index = TextIndex()
    for end in sorted({*cuts, len(ids)}):
        index.extend(ids[len(index) : end])
        assert index.following(count) == searched(ids[:end], count)


def test_the_longest_agreement_wins_and_then_the_latest_place() -> None:
    ids = [1, 2, 3, 4, 9, 2, 3, 5, 9, 2, 3, 6, 0, 1, 2, 3]
    assert TextIndex(ids).following(2) == (4, 9)
    assert TextIndex([*ids[1:13], 7, 2, 3]).following(2) == (6, 0)
    assert TextIndex([5, 5, 5]).following(4) == (5, 5, 5, 5), "a copy may read what it wrote"
    assert TextIndex([1, 2, 3, 1, 2]).following(5) == (3, 1, 2, 3, 1)
    assert TextIndex([1, 2, 3]).following(2) == ()
    assert TextIndex([1, 2]).following(2) == TextIndex().following(2) == ()


def test_a_request_is_followed_through_prompt_and_answer() -> None:
    proposer, request = NgramProposer(), fake_request([1, 2, 3, 4, 1], 9)
    assert proposer.propose([DraftRoom(request, 3)]) == [()]
    request.output_ids.append(2)
    assert proposer.propose([DraftRoom(request, 3)]) == [(3, 4, 1)]
    request.output_ids += [3, 4, 1, 2]
    other = fake_request([7, 8, 7, 8], 9)
    assert proposer.propose([DraftRoom(request, 2), DraftRoom(other, 1)]) == [(3, 4), (7,)]
    for each in (request, request, other):
        proposer.forget(each)
    assert not proposer._texts
