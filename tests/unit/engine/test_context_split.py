"""How a prompt's new tokens are divided over attention CP ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layline.config import CP_LAYOUTS
from layline.engine.context_split import split_context
from layline.errors import UsageError


@given(st.integers(0, 300), st.integers(1, 9), st.sampled_from(CP_LAYOUTS))
def test_every_token_is_on_one_rank_and_shares_are_even(count: int, cp: int, layout: str) -> None:
    shares = split_context(count, cp, layout)
    assert len(shares) == cp
    assert sorted(token for parts in shares for part in parts for token in part) == [*range(count)]
    assert all(part for parts in shares for part in parts), "no part is empty"
    for parts in shares:
        assert [token for part in parts for token in part] == sorted(
            token for part in parts for token in part
        )
    sizes = [sum(map(len, parts)) for parts in shares]
    assert max(sizes) - min(sizes) <= (1 if layout == "contiguous" else 2)


def test_contiguous_parts_are_in_order() -> None:
    assert split_context(10, 3, "contiguous") == [[range(4)], [range(4, 7)], [range(7, 10)]]


def test_zigzag_pairs_an_early_piece_with_a_late_one() -> None:
    assert split_context(8, 2, "zigzag") == [
        [range(2), range(6, 8)],
        [range(2, 4), range(4, 6)],
    ]


@pytest.mark.parametrize("layout", CP_LAYOUTS)
def test_fewer_tokens_than_ranks_leave_some_without(layout: str) -> None:
    assert split_context(2, 4, layout) == [[range(1)], [range(1, 2)], [], []]
    assert split_context(0, 2, layout) == [[], []]


def test_an_unknown_layout_is_named() -> None:
    with pytest.raises(UsageError, match=r"'zigzg' is not one of .*did you mean 'zigzag'"):
        split_context(4, 2, "zigzg")
