from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layline.engine.blocks import BlockPool


def test_lowest_blocks_first_and_never_block_zero() -> None:
    pool = BlockPool(6)
    assert pool.take(3) == [1, 2, 3]
    pool.give_back([2])
    assert pool.take(2) == [2, 4]


def test_a_request_that_does_not_fit_takes_nothing() -> None:
    pool = BlockPool(4)
    assert pool.take(4) is None
    assert pool.num_free == pool.capacity == 3


def test_a_block_is_given_back_once() -> None:
    pool = BlockPool(4)
    taken = pool.take(1)
    assert taken == [1]
    pool.give_back([1])
    with pytest.raises(ValueError, match="block 1 is given back but not held"):
        pool.give_back([1])
    with pytest.raises(ValueError, match="block 0"):
        pool.give_back([0])


def test_a_pool_needs_a_block_to_give() -> None:
    with pytest.raises(ValueError, match="block 0 is reserved"):
        BlockPool(1)


@given(st.lists(st.integers(-6, 6), max_size=60))
def test_blocks_are_neither_lost_nor_shared(moves: list[int]) -> None:
    pool = BlockPool(20)
    held: list[list[int]] = []
    for move in moves:
        if move >= 0:
            taken = pool.take(move)
            if taken is not None:
                held.append(taken)
        elif held:
            pool.give_back(held.pop(-move % len(held)))
        owned = [block for blocks in held for block in blocks]
        assert len(owned) == len(set(owned))
        assert pool.num_free + len(owned) == pool.capacity
        assert 0 not in owned
