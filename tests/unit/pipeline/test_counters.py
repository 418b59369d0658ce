"""Liveness counters, and overlap that is seen just when walkers are at work together."""

from __future__ import annotations

import threading
from contextlib import ExitStack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layline.pipeline.counters import LOOPS, NAMES, Counters, WalkerWatch
from layline.pipeline.schedule import wavefront

relaxed = settings(max_examples=200, deadline=None, database=None)


def test_every_loop_counts_its_splits() -> None:
    counters = Counters()
    before = counters.snapshot()
    for count, loop in enumerate(LOOPS, start=1):
        counters.add(f"{loop}_splits", count)
    grown = counters.since(before)
    assert [grown[f"{loop}_splits"] for loop in LOOPS] == list(range(1, len(LOOPS) + 1))
    assert set(counters.stalled(before, NAMES)) == set(NAMES) - {f"{loop}_splits" for loop in LOOPS}
    assert counters["prime_batches"] == 0
    with pytest.raises(KeyError):
        counters.add("no_such_counter")


def test_a_snapshot_stays_as_it_was() -> None:
    counters = Counters()
    before = counters.snapshot()
    counters.add("growth_events")
    assert before["growth_events"] == 0
    assert counters.stalled(before, ["growth_events", "growth_syncs"]) == ["growth_syncs"]
    assert Counters()["growth_events"] == 0, "counters belong to one runtime"


def test_threads_lose_no_count() -> None:
    counters = Counters()
    start = threading.Barrier(4)

    def count() -> None:
        start.wait(10)
        for _ in range(2000):
            counters.add("batch_splits")

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert counters["batch_splits"] == 8000


@relaxed
@given(st.integers(1, 5), st.integers(1, 9))
def test_a_full_pipeline_overlaps_at_every_later_stage(stages: int, chunks: int) -> None:

    counters = Counters()
    watch = WalkerWatch(counters)
    turns = list(wavefront(stages, chunks))
    for tick in range(stages + chunks - 1):
        with ExitStack() as open_walkers:
            for turn in turns:
                if turn.tick == tick:
                    open_walkers.enter_context(watch.walking(turn.stage, turn.item))
    assert counters["prime_pipe_overlaps"] == (stages - 1) * (chunks - 1)


def test_one_walker_after_the_other_does_not_overlap() -> None:
    counters = Counters()
    watch = WalkerWatch(counters)
    for turn in wavefront(2, 6):
        with watch.walking(turn.stage, turn.item):
            pass
    assert counters["prime_pipe_overlaps"] == 0


def test_a_chunk_counts_once_however_often_it_is_passed() -> None:
    counters = Counters()
    watch = WalkerWatch(counters)
    with watch.walking(1, 0):
        for chunk in (1, 2, 3):
            with watch.walking(0, chunk):
                assert counters["prime_pipe_overlaps"] == 1
        with pytest.raises(RuntimeError, match="failed"), watch.walking(0, 4):
            raise RuntimeError("failed")
    with watch.walking(1, 4):
        assert counters["prime_pipe_overlaps"] == 1, "a walker that failed is gone"
