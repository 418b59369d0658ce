"""Cuts by cost: against every fence there is, and the estimate that they are made from."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layline.errors import PlacementError, UsageError
from layline.pipeline.cuts import (
    PartCost,
    StackCost,
    StageDevice,
    balanced_fence,
    readable,
    shares_of,
    slowest,
)
from layline.pipeline.estimate import Load, PartShape, StackShape, chunk_load, cost_of, stack_cost
from layline.pipeline.fence import even_fence

relaxed = settings(max_examples=400, deadline=None, database=None)


def every_fence(num_layers: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    for cuts in itertools.combinations(range(1, num_layers), num_stages - 1):
        yield (0, *cuts, num_layers)


def rated(
    fence: tuple[int, ...], stack: StackCost, devices: list[StageDevice]
) -> tuple[float, float, tuple[int, ...]] | None:
    """(slowest stage, sum of squares, cuts) by adding up parts; None when memory is too small."""
    times, held = [], {}
    for stage, device in enumerate(devices):
        parts = list(stack.layers[fence[stage] : fence[stage + 1]])
        parts += [stack.embedding] if stage == 0 else []
        parts += [stack.head] if stage == len(devices) - 1 else []
        times.append(sum(part.cost for part in parts) / device.speed)
        held[device.name] = held.get(device.name, 0) + sum(part.num_bytes for part in parts)
    for device in devices:
        if device.memory is not None and held[device.name] > device.memory:
            return None
    return max(times), sum(each * each for each in times), fence


part = st.builds(
    lambda cost, num_bytes: PartCost(cost=cost, num_bytes=num_bytes),
    st.integers(0, 9),
    st.integers(0, 9),
)


@st.composite
def problems(draw: Any) -> tuple[StackCost, list[StageDevice]]:
    """Small stacks on devices of unequal speed and size, some of them shared."""
    layers = draw(st.lists(part, min_size=1, max_size=7))
    stages = draw(st.integers(1, min(4, len(layers))))
    stack = StackCost(layers=tuple(layers), embedding=draw(part), head=draw(part))
    names = draw(st.lists(st.integers(0, 3), min_size=stages, max_size=stages))
    # Powers of two, so that division is exact.
    speed = {name: draw(st.sampled_from((0.5, 1.0, 2.0))) for name in sorted(set(names))}
    memory = {name: draw(st.none() | st.integers(0, 40)) for name in sorted(set(names))}
    devices = [StageDevice(name=name, speed=speed[name], memory=memory[name]) for name in names]
    return stack, devices


@relaxed
@given(problems())
def test_the_best_of_all_fences_is_found(problem: tuple[StackCost, list[StageDevice]]) -> None:
    stack, devices = problem
    fences = every_fence(len(stack.layers), len(devices))
    found = [rating for fence in fences if (rating := rated(fence, stack, devices)) is not None]
    if not found:
        with pytest.raises(PlacementError, match=r"no cuts into .* fit"):
            balanced_fence(stack, devices)
        return
    fence = balanced_fence(stack, devices)
    rating = rated(fence, stack, devices)
    assert rating == min(found)
    shares = shares_of(fence, stack, devices)
    assert slowest(shares) == min(found)[0]
    assert [share.layers.start for share in shares] == list(fence[:-1])


@pytest.mark.parametrize("stages", range(1, 7))
def test_exhaustively_over_costs_of_a_small_stack(stages: int) -> None:
    """Every assignment of three costs to six layers, with and without a head."""
    devices = [StageDevice(name=stage) for stage in range(stages)]
    for costs in itertools.product((1, 2, 5), repeat=6):
        layers = tuple(PartCost(cost=cost) for cost in costs)
        for head in (0, 7):
            stack = StackCost(layers=layers, head=PartCost(cost=head))
            wanted = min(
                rating
                for fence in every_fence(6, stages)
                if (rating := rated(fence, stack, devices)) is not None
            )
            assert balanced_fence(stack, devices) == wanted[2]


def test_equal_layers_are_cut_as_evenly_as_even_cuts() -> None:
    for layers, stages in itertools.product((5, 8, 12), (2, 3, 4, 5)):
        stack = StackCost(layers=(PartCost(cost=3),) * layers)
        devices = [StageDevice(name=stage) for stage in range(stages)]
        fence = balanced_fence(stack, devices)
        sizes = sorted(len(share.layers) for share in shares_of(fence, stack, devices))
        even = shares_of(even_fence(layers, stages), stack, devices)
        assert sizes == sorted(len(share.layers) for share in even)


def test_a_heavy_head_takes_layers_from_the_last_stage() -> None:
    layers = (PartCost(cost=10),) * 12
    devices = [StageDevice(name=0), StageDevice(name=1)]
    assert balanced_fence(StackCost(layers=layers), devices) == (0, 6, 12)
    assert balanced_fence(StackCost(layers=layers, head=PartCost(cost=40)), devices) == (0, 8, 12)
    fast = [StageDevice(name=0), StageDevice(name=1, speed=3.0)]
    assert balanced_fence(StackCost(layers=layers), fast) == (0, 3, 12)
    small = [StageDevice(name=0, memory=40), StageDevice(name=1)]
    held = tuple(PartCost(cost=10, num_bytes=10) for _ in range(12))
    assert balanced_fence(StackCost(layers=held), small) == (0, 4, 12)


def test_what_does_not_fit_is_refused_with_numbers() -> None:
    gib = 1 << 30
    stack = StackCost(
        layers=tuple(PartCost(cost=1, num_bytes=2 * gib) for _ in range(6)),
        head=PartCost(cost=1, num_bytes=3 * gib),
    )
    devices = [StageDevice(name=0, memory=6 * gib), StageDevice(name=1, memory=5 * gib)]
    with pytest.raises(PlacementError) as error:
        balanced_fence(stack, devices)
    message = str(error.value)
    assert "into 2 stages fit: the model needs 15.0 GiB, its devices have 11.0 GiB" in message
    assert "the nearest cuts, 4, put 8.0 GiB on stage 0, which has room for 6.0 GiB" in message
    assert "expected more stages, more devices" in message
    shared = [StageDevice(name=0, memory=14 * gib)] * 2
    with pytest.raises(
        PlacementError, match=r"15.0 GiB on stage 0 and 1, which has room for 14.0 GiB"
    ):
        balanced_fence(stack, shared)
    with pytest.raises(UsageError, match="pp_stages 7 does not fit the model's 6 layers"):
        balanced_fence(stack, [StageDevice(name=stage) for stage in range(7)])


def test_a_deep_model_on_many_devices() -> None:
    stack = StackCost(
        layers=tuple(PartCost(cost=layer % 5 + 1, num_bytes=1) for layer in range(96))
    )
    devices = [StageDevice(name=stage, memory=20) for stage in range(16)]
    fence = balanced_fence(stack, devices)
    assert slowest(shares_of(fence, stack, devices)) == pytest.approx(
        -(-sum(part.cost for part in stack.layers) // 16), abs=3
    )


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1536, "1.5 KiB"), (5 << 20, "5.0 MiB"),
     (3 << 40, "3072.0 GiB")],
)  # fmt: skip
def test_bytes_in_words(num_bytes: int, text: str) -> None:
    assert readable(num_bytes) == text


# The estimate.

LAYER = PartShape(weights=1010, multiplied=1000, attended=16, cached=8)
SHAPE = StackShape(
    layers=(LAYER, PartShape(weights=1010, multiplied=1000, attended=16, cached=8, window=10)),
    embedding=PartShape(weights=5000, multiplied=0),
    head=PartShape(weights=5010, multiplied=5000, scored_only=True),
    itemsize=2,
    cached_itemsize=4,
    operations_per_byte=10,
)


def test_a_part_costs_the_longer_of_arithmetic_and_traffic() -> None:
    # Few rows: 1000 weights of 2 bytes, and for each of 3 sequences 50 keys of 8 x 4 bytes.
    few = Load(rows=3, sequences=3, context=50)
    assert cost_of(LAYER, SHAPE, few) == 1000 * 2 + 3 * 50 * 8 * 4
    # Many rows of one sequence: 2 operations each for 1000 weights and 50 keys of 16 values.
    many = Load(rows=400, sequences=1, context=50)
    assert cost_of(LAYER, SHAPE, many) == 400 * 2 * (1000 + 16 * 50) / 10
    windowed = SHAPE.layers[1]
    assert cost_of(windowed, SHAPE, few) == 1000 * 2 + 3 * 10 * 8 * 4
    assert cost_of(SHAPE.head, SHAPE, many) == 5000 * 2, "one row of a sequence is scored"
    assert cost_of(SHAPE.embedding, SHAPE, many) == 0


def test_the_estimate_has_every_part_and_what_it_keeps() -> None:
    found = stack_cost(SHAPE, Load(rows=1, sequences=1, context=0), kept_tokens=100)
    assert [part.num_bytes for part in found.layers] == [1010 * 2 + 8 * 100 * 4] * 2
    assert (found.embedding.num_bytes, found.head.num_bytes) == (10000, 10020)
    assert found == stack_cost(SHAPE, Load(rows=1, sequences=1, context=0), kept_tokens=100)


def test_a_later_chunk_costs_more() -> None:
    costs = [cost_of(LAYER, SHAPE, chunk_load(start, start + 64)) for start in range(0, 640, 64)]
    assert costs == sorted(costs)
    assert costs[0] < costs[-1]
    assert chunk_load(64, 128) == Load(rows=64, sequences=1, context=96)
