from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layline.engine.blocks import BlockPool
from layline.engine.prefix import PrefixCache, block_key, root_key


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


def chain(count: int, salt: str = "", first: int = 0) -> list[bytes]:
    keys = [root_key(salt)]
    for number in range(count):
        keys.append(block_key(keys[-1], [first + number, 7]))
    return keys[1:]


def filled(pool: BlockPool, keys: list[bytes]) -> list[int]:
    """Blocks taken for a sequence, whose contents are then known."""
    blocks = pool.take(len(keys))
    assert blocks is not None
    assert pool.prefix is not None
    for key, block in zip(keys, blocks, strict=True):
        pool.prefix.keep(key, block)
    return blocks


def test_keys_depend_on_all_tokens_from_the_salt_on() -> None:
    root = root_key("")
    assert block_key(root, [1, 2]) == block_key(root, (1, 2))
    others = [
        block_key(root, [2, 1]),
        block_key(root, [1, 2, 0]),
        block_key(root, [1]),
        block_key(root_key("a"), [1, 2]),
        block_key(block_key(root, [1, 2]), [1, 2]),
        block_key(root, [1 << 32, 2]),
    ]
    assert len({block_key(root, [1, 2]), *others}) == len(others) + 1


def test_known_blocks_stay_until_they_are_needed() -> None:
    pool = BlockPool(6, PrefixCache())
    assert pool.prefix is not None
    keys = chain(3)
    blocks = filled(pool, keys)
    pool.give_back(blocks)
    assert (pool.num_free, pool.num_idle, pool.num_available, pool.num_held) == (2, 3, 5, 0)
    assert pool.prefix.match([*keys[:2], b"other"]) == blocks[:2]
    assert pool.prefix.match([b"other", *keys]) == []
    pool.share(blocks[:2])
    assert (pool.num_idle, pool.num_held) == (1, 2)
    pool.share(blocks[:1])
    assert [pool.holders(block) for block in blocks] == [2, 1, 0]
    assert pool.take(4) is None
    assert pool.take(3) == [3, 4, 5]
    assert pool.prefix.match(keys) == blocks[:2], "what is held is never given up"
    pool.give_back(blocks[:2])
    pool.give_back(blocks[:1])
    with pytest.raises(ValueError, match="block 1 is given back but not held"):
        pool.give_back(blocks[:1])
    assert (pool.num_free, pool.num_idle, pool.num_held) == (0, 2, 3)


def test_the_longest_unused_ends_go_first() -> None:
    pool = BlockPool(61, PrefixCache())
    assert pool.prefix is not None
    old, new = chain(30), chain(30, "new")
    for keys in (old, new):
        pool.give_back(filled(pool, keys))
    pool.share(pool.prefix.match(old[:5]))
    pool.give_back(pool.prefix.match(old[:5]))
    assert pool.take(1) is not None
    # Several at a time, from the end of the sequence that was not used.
    assert (pool.prefix.count(old), pool.prefix.count(new)) == (14, 30)
    assert pool.take(30) is not None
    assert (pool.prefix.count(old), pool.prefix.count(new)) == (5, 23)


def test_the_first_block_of_a_key_stays_it() -> None:
    pool = BlockPool(6, PrefixCache())
    assert pool.prefix is not None
    keys = chain(2)
    first, second = filled(pool, keys), filled(pool, keys)
    assert pool.prefix.match(keys) == first
    pool.give_back(second)
    pool.give_back(first)
    assert (pool.num_free, pool.num_idle, len(pool.prefix)) == (3, 2, 2)
