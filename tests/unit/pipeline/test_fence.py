"""Fences: even ones, cuts that are checked, and which stage has which layer."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layline.errors import UsageError
from layline.pipeline.fence import (
    boundaries,
    check_cuts,
    even_fence,
    fence_of,
    layers_of,
    stage_of,
)

relaxed = settings(max_examples=200, deadline=None, database=None)

# (layers, stages) and the fence by hand.
EVEN = {
    (30, 2): (0, 15, 30),
    (30, 4): (0, 7, 15, 22, 30),
    (32, 3): (0, 10, 21, 32),
    (7, 5): (0, 1, 2, 4, 5, 7),
    (3, 3): (0, 1, 2, 3),
    (9, 1): (0, 9),
}
sizes = st.integers(1, 60).flatmap(
    lambda layers: st.tuples(st.just(layers), st.integers(1, layers))
)


@pytest.mark.parametrize("sizes", EVEN)
def test_even_fences_by_hand(sizes: tuple[int, int]) -> None:  # pipeline G2
    assert even_fence(*sizes) == EVEN[sizes]


@relaxed
@given(sizes)
def test_an_even_fence_gives_every_stage_its_share(sizes: tuple[int, int]) -> None:  # pipeline G2
    layers, stages = sizes
    fence = even_fence(layers, stages)
    assert (len(fence), fence[0], fence[-1]) == (stages + 1, 0, layers)
    counts = [len(layers_of(fence, stage)) for stage in range(stages)]
    assert sum(counts) == layers
    assert {layers // stages} <= set(counts) <= {layers // stages, layers // stages + 1}


@relaxed
@given(sizes, st.data())
def test_every_layer_is_on_the_stage_whose_range_has_it(
    sizes: tuple[int, int], data: st.DataObject
) -> None:  # pipeline G10
    layers, stages = sizes
    inside = st.lists(
        st.integers(1, max(layers - 1, 1)), min_size=stages - 1, max_size=stages - 1, unique=True
    )
    cuts = tuple(sorted(data.draw(inside))) if stages > 1 else ()
    fence = fence_of(cuts, layers)
    assert boundaries(fence) == cuts
    owners = [stage for stage in range(stages) for _ in layers_of(fence, stage)]
    assert [stage_of(fence, layer) for layer in range(layers)] == owners


def test_layers_beyond_the_stack_are_with_the_last_stage() -> None:  # pipeline G11
    fence = (0, 4, 9)
    assert [stage_of(fence, layer) for layer in (0, 3, 4, 8, 9, 10, 99)] == [0, 0, 1, 1, 1, 1, 1]
    assert stage_of((0, 9), 12) == 0


@pytest.mark.parametrize(
    ("cuts", "stages", "expected"),
    [
        ((10, 10), 3, "the nearest is 10,20"),
        ((20, 10), 3, "the nearest is 10,20"),
        ((0, 10), 3, "expected 2 increasing layer numbers from 1 to 29"),
        ((10, 30), 3, "into 3 stages"),
        ((10,), 3, "the nearest is 10,20"),
        ((5, 10, 15), 2, "the nearest is 15"),
        ((), 2, "the nearest is 15"),
    ],
)
def test_cuts_are_checked(cuts: tuple[int, ...], stages: int, expected: str) -> None:
    # pipeline G3
    with pytest.raises(UsageError, match=expected):
        check_cuts(cuts, 30, stages)


@relaxed
@given(st.lists(st.integers(-2, 12), max_size=6), st.integers(1, 10))
def test_cuts_pass_just_when_every_stage_has_a_layer(cuts: list[int], layers: int) -> None:
    # pipeline G3
    ends = [0, *cuts, layers]
    fine = all(first < second for first, second in pairwise(ends))
    if fine:
        assert fence_of(cuts, layers) == tuple(ends)
    else:
        with pytest.raises(UsageError, match="pp_splits"):
            fence_of(cuts, layers)


@pytest.mark.parametrize("stages", [0, -1, 5])
def test_a_stack_has_at_most_a_stage_for_each_layer(stages: int) -> None:
    with pytest.raises(UsageError, match=f"pp_stages {stages} does not fit the model's 4 layers"):
        even_fence(4, stages)
