"""Chunks of prompts, the order of work, and timelines, against computations of their own."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layline.pipeline.schedule import (
    ChunkRule,
    decode_wavefront,
    fixed_chunks,
    ideal_bubble,
    ideal_speedup,
    prime_chunks,
    steady_bubble,
    timeline,
    wavefront,
)

relaxed = settings(max_examples=200, deadline=None, database=None)

AUTO = ChunkRule()
FIXED = ChunkRule(dynamic=False)


def by_counting(num_tokens: int, first: int, count: int) -> tuple[int, ...]:
    """The dynamic schedule by its definition, one token at a time, with integers alone.

    Lengths grow until the cost L^2 + 8 T L passes each of the equal shares after the first chunk.
    """
    cost = [length * length + 8 * num_tokens * length for length in range(num_tokens + 1)]
    cuts = [0, first]
    for length in range(first, num_tokens + 1):
        share = len(cuts) - 1
        if share < count - 1:
            done = (cost[length] - cost[first]) * (count - 1)
            if done >= (cost[num_tokens] - cost[first]) * share:
                cuts.append(length)
    cuts.append(num_tokens)
    return tuple(stop - start for start, stop in itertools.pairwise(cuts))


# The figures of the document.
QUOTED = {
    461: (64, 141, 132, 124),
    4096: (256, 602, 580, 563, 545, 531, 516, 503),
}


@pytest.mark.parametrize("num_tokens", QUOTED)
def test_the_quoted_schedules(num_tokens: int) -> None:  # pipeline G50
    quoted = QUOTED[num_tokens]
    assert prime_chunks(num_tokens, 2, AUTO) == quoted
    assert by_counting(num_tokens, quoted[0], len(quoted)) == quoted


@relaxed
@given(st.integers(256, 9000), st.integers(2, 8))
def test_a_dynamic_schedule_follows_its_definition(num_tokens: int, stages: int) -> None:
    # pipeline G50
    fixed = prime_chunks(num_tokens, stages, FIXED)
    dynamic = prime_chunks(num_tokens, stages, AUTO)
    assert sum(fixed) == sum(dynamic) == num_tokens
    assert len(dynamic) == len(fixed)
    assert min(dynamic) >= 16
    if len(fixed) < 3:
        assert dynamic == fixed
    else:
        nominal = fixed[0]
        assert dynamic == by_counting(num_tokens, max(64, nominal // 2), len(fixed))


@relaxed
@given(st.integers(1, 20000), st.integers(1, 8))
def test_fixed_chunks_have_the_nominal_size(num_tokens: int, stages: int) -> None:
    chunks = prime_chunks(num_tokens, stages, FIXED)
    nominal = 4096
    if stages > 1 and num_tokens >= 256:
        nominal = min(4096, max(128, (num_tokens + 4 * stages - 1) // (4 * stages)))
    assert sum(chunks) == num_tokens
    assert set(chunks[:-1]) <= {nominal}
    assert chunks[-1] < nominal + 16
    assert len(chunks) == 1 or chunks[-1] >= 16


@pytest.mark.parametrize(
    ("num_tokens", "stages", "chunks"),
    [
        (255, 2, (255,)),
        (256, 2, (128, 128)),
        (271, 2, (128, 143)),
        (272, 2, (64, 109, 99)),
        (461, 1, (461,)),
        (40_000, 2, (2048, *by_counting(40_000, 2048, 10)[1:])),
        (4111, 1, (4111,)),
        (4112, 1, (4096, 16)),
        (1, 4, (1,)),
    ],
)
def test_where_rules_begin(num_tokens: int, stages: int, chunks: tuple[int, ...]) -> None:
    # pipeline G50
    assert prime_chunks(num_tokens, stages, AUTO) == chunks


@pytest.mark.parametrize("dynamic", [True, False])
def test_a_size_that_is_given_is_kept(dynamic: bool) -> None:
    assert prime_chunks(1200, 2, ChunkRule(size=513, dynamic=dynamic)) == (513, 513, 174)
    assert prime_chunks(1040, 2, ChunkRule(size=513, dynamic=dynamic)) == (513, 527)
    assert prime_chunks(9000, 2, ChunkRule(size=0, dynamic=dynamic)) == (9000,)
    assert prime_chunks(12, 2, ChunkRule(size=5, dynamic=dynamic)) == (5, 7)
    assert prime_chunks(10, 2, ChunkRule(size=5, dynamic=dynamic)) == (5, 5)
    assert prime_chunks(3, 2, ChunkRule(size=100, dynamic=dynamic)) == (3,)


@relaxed
@given(st.integers(1, 3000), st.integers(1, 700))
def test_fixed_chunks_cover_the_prompt(num_tokens: int, size: int) -> None:
    chunks = fixed_chunks(num_tokens, size)
    assert sum(chunks) == num_tokens
    assert all(each == size for each in chunks[:-1])
    assert 0 < chunks[-1] < size + 16


# Order.


@relaxed
@given(st.integers(1, 8), st.integers(1, 12))
def test_a_wavefront_does_all_work_in_order(stages: int, items: int) -> None:
    turns = list(wavefront(stages, items))
    assert len(turns) == stages * items
    place = {(turn.stage, turn.item): index for index, turn in enumerate(turns)}
    assert len(place) == stages * items
    for (stage, item), index in place.items():
        if stage:
            assert place[stage - 1, item] < index, "an item is sent before it is received"
        if item:
            assert place[stage, item - 1] < index
        if stage + 1 < stages and item >= 2:
            # The read of a slot is issued before the send that uses it again.
            assert place[stage + 1, item - 2] < index
    ticks = {(turn.tick, turn.stage) for turn in turns}
    assert len(ticks) == len(turns), "a stage does one thing in a tick"
    assert turns[-1].tick == stages + items - 2


@relaxed
@given(st.integers(1, 6), st.integers(1, 9), st.integers(1, 4))
def test_decoding_waits_for_the_tokens_of_the_step_before(
    stages: int, microbatches: int, steps: int
) -> None:
    turns = list(decode_wavefront(stages, microbatches, steps))
    when = {(turn.stage, turn.item): turn.tick for turn in turns}
    assert len(when) == len(turns) == stages * microbatches * steps
    for (stage, item), tick in when.items():
        if stage:
            assert when[stage - 1, item] == tick - 1
        elif item >= microbatches:
            assert when[stages - 1, item - microbatches] < tick
    assert len({(turn.tick, turn.stage) for turn in turns}) == len(turns)
    idle = 1 - len(turns) / (stages * (turns[-1].tick + 1))
    if microbatches >= stages:
        assert idle == pytest.approx(ideal_bubble(stages, microbatches * steps))


def test_the_quoted_speedups_of_two_stages() -> None:
    quoted = {2: 1.33, 4: 1.60, 8: 1.78, 16: 1.88}
    for chunks, speedup in quoted.items():
        assert round(ideal_speedup(2, chunks), 2) == speedup
        assert ideal_bubble(2, chunks) == pytest.approx(1 / (chunks + 1))


# Timelines.

costs = st.integers(1, 4).flatmap(
    lambda stages: st.lists(
        st.lists(st.integers(1, 9), min_size=stages, max_size=stages), min_size=1, max_size=7
    )
)


def by_ticks(work: list[list[int]], in_flight: int | None) -> dict[tuple[int, int], int]:
    """The start of each (item, stage) in a simulation of one unit of time after another."""
    stages = len(work[0])
    start: dict[tuple[int, int], int] = {}
    sent: set[tuple[int, int]] = set()
    left = {(item, stage): row[stage] for item, row in enumerate(work) for stage in range(stages)}
    for now in range(sum(map(sum, work)) + 1):
        for _ in range(2 * len(left)):
            for (item, stage), rest in left.items():
                done = rest == 0
                # A finished item leaves when the next stage has begun the one before last.
                full = stage + 1 < stages and item >= 2 and (item - 2, stage + 1) not in start
                if done and not full:
                    sent.add((item, stage))
                arrived = stage == 0 or (item, stage - 1) in sent
                free = item == 0 or (item - 1, stage) in sent
                if stage == 0 and in_flight is not None and item >= in_flight:
                    arrived = (item - in_flight, stages - 1) in sent
                if arrived and free and (item, stage) not in start:
                    start[item, stage] = now
        for key in start:
            left[key] = max(0, left[key] - 1)
    return start


@relaxed
@given(costs, st.none() | st.integers(1, 4))
def test_a_timeline_is_what_a_simulation_of_ticks_finds(
    work: list[list[int]], in_flight: int | None
) -> None:
    done = timeline(work, in_flight=in_flight)
    assert {(bar.item, bar.stage): bar.start for bar in done.bars} == by_ticks(work, in_flight)
    busy = sum(map(sum, work))
    stages = len(work[0])
    idle = sum(stop - start for stage in range(stages) for start, stop in done.idle(stage))
    assert idle + busy == pytest.approx(stages * done.length)
    assert done.bubble == pytest.approx(idle / (stages * done.length))


@relaxed
@given(st.integers(1, 6), st.integers(1, 12))
def test_equal_stages_have_the_ideal_bubble(stages: int, items: int) -> None:
    assert timeline([[1.0] * stages] * items).bubble == pytest.approx(ideal_bubble(stages, items))


def test_stages_on_one_device_take_turns() -> None:
    done = timeline([[2.0, 3.0]] * 4, devices=["a", "a"])
    assert done.length == 20.0
    assert timeline([[2.0, 3.0]] * 4, devices=["a", "b"]).length == 14.0


@pytest.mark.parametrize(
    ("times", "microbatches", "devices", "bubble"),
    [
        ([1.0, 1.0], 2, "ab", 0.0),
        ([1.0, 1.0], 1, "ab", 0.5),
        ([1.0, 1.0, 1.0, 1.0], 3, "abcd", 0.25),
        ([1.0, 3.0], 2, "ab", 1 / 3),
        ([1.0, 1.0], 2, "aa", 0.5),
    ],
)
def test_the_bubble_in_the_long_run(
    times: list[float], microbatches: int, devices: str, bubble: float
) -> None:
    assert steady_bubble(times, microbatches, devices) == pytest.approx(bubble)
    # What a long timeline comes to, fill and drain apart.
    steps = 400
    done = timeline([times] * (steps * microbatches), devices=devices, in_flight=microbatches)
    assert done.bubble == pytest.approx(bubble, abs=0.01)
