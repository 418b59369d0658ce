"""Which cores a rank gets, and threads that keep to them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from layline import cores
from layline.cores import CoreKeeper, allowed_cores, cores_of_rank, usable_cores

EIGHT = frozenset({0, 1, 2, 3, 8, 9, 10, 11})


@pytest.fixture
def eight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "allowed_cores", lambda: EIGHT)


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    """A thread of its own, so that this one stays where it is."""
    with ThreadPoolExecutor(1) as pool:
        yield pool


@pytest.mark.usefixtures("eight")
@pytest.mark.parametrize(
    ("local_ranks", "threads", "shares"),
    [
        (1, 8, [[0, 1, 2, 3, 8, 9, 10, 11]]),
        (2, 4, [[0, 1, 2, 3], [8, 9, 10, 11]]),
        (4, 2, [[0, 1], [2, 3], [8, 9], [10, 11]]),
        (3, 2, [[0, 1], [2, 3], [8, 9]]),
        (8, 1, [[0], [1], [2], [3], [8], [9], [10], [11]]),
    ],
)
def test_ranks_whose_threads_take_it_all_get_a_share_each(
    local_ranks: int, threads: int, shares: list[list[int]]
) -> None:
    """In the order of the machine's numbers, which may have gaps; what is left over is nobody's."""
    found = [cores_of_rank(rank, local_ranks, threads) for rank in range(local_ranks)]
    assert found == shares


@pytest.mark.usefixtures("eight")
@pytest.mark.parametrize(("local_ranks", "threads"), [(2, 1), (2, 3), (2, 5), (1, 1), (9, 1)])
def test_ranks_with_fewer_threads_or_more_get_none(local_ranks: int, threads: int) -> None:
    assert [cores_of_rank(rank, local_ranks, threads) for rank in range(local_ranks)] == (
        [[]] * local_ranks
    )


def test_the_allowed_cores_are_those_of_the_thread(thread: ThreadPoolExecutor) -> None:
    before = allowed_cores()
    assert before == os.sched_getaffinity(0)
    assert usable_cores() == len(before)
    one = min(before)
    thread.submit(os.sched_setaffinity, 0, {one}).result()
    assert thread.submit(allowed_cores).result() == {one}
    assert thread.submit(usable_cores).result() == 1
    assert allowed_cores() == before


def test_where_the_system_does_not_say_no_core_is_anybodys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    assert allowed_cores() == frozenset()
    assert usable_cores() == (os.cpu_count() or 1)
    assert cores_of_rank(0, 1, 1) == []
    CoreKeeper(cores_of_rank(0, 1, 1), allowed_cores()).keep(True)


def several() -> frozenset[int]:
    found = allowed_cores()
    if len(found) < 2:
        pytest.skip("one core: a thread cannot be kept from any")
    return found


def test_a_thread_keeps_to_the_own_cores_or_uses_every_one(thread: ThreadPoolExecutor) -> None:
    """By thread: others stay where they are."""
    every = several()
    own = max(every)
    keeper = CoreKeeper([own], every)
    for strictly in (True, False, False, True):
        thread.submit(keeper.keep, strictly).result()
        assert thread.submit(allowed_cores).result() == ({own} if strictly else every)
        assert allowed_cores() == every
    with ThreadPoolExecutor(1) as another:
        another.submit(keeper.keep, True).result()
        assert another.submit(allowed_cores).result() == {own}


def test_a_thread_starts_where_the_one_that_made_it_is(thread: ThreadPoolExecutor) -> None:
    every = several()

    def of_a_new_thread() -> frozenset[int]:
        with ThreadPoolExecutor(1) as inner:
            return inner.submit(allowed_cores).result()

    thread.submit(CoreKeeper([min(every)], every).keep, True).result()
    assert thread.submit(of_a_new_thread).result() == {min(every)}


def test_what_has_not_changed_does_not_ask_the_system(
    thread: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step is too short for a system call in vain."""
    asked: list[set[int]] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: asked.append(set(cores)))
    keeper = CoreKeeper([3], EIGHT)
    for strictly in (True, True, False, False, True):
        thread.submit(keeper.keep, strictly).result()
    assert asked == [{3}, set(EIGHT), {3}]


def test_without_own_cores_a_thread_stays_where_it_is(
    thread: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_setaffinity", None)
    keeper = CoreKeeper([], EIGHT)
    for strictly in (True, False):
        thread.submit(keeper.keep, strictly).result()
