"""The transition table against a simulator of its own: ordered rows and who has added to each."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import pytest

from layline.boundary.layout import Layout, TokenAxis
from layline.boundary.planning.table import AXES, TRANSITIONS, Transition, transport
from layline.errors import DeclarationError

SIZES = {TokenAxis.ATTN_DP: 2, TokenAxis.ATTN_CP: 3, TokenAxis.ATTN_TP_SCATTER: 2}
TOKENS = 24
LAYOUTS = [
    Layout(frozenset(axes)) for count in range(4) for axes in itertools.combinations(AXES, count)
]
OWED = [layout.sharded for layout in LAYOUTS]

Rank = tuple[int, int, int]
Row = tuple[int, Counter[Rank]]
State = dict[Rank, list[Row]]
Steps = Sequence[tuple[Transition, TokenAxis]]
RANKS: list[Rank] = [
    (dp, cp, tp) for dp, cp, tp in itertools.product(*(range(SIZES[axis]) for axis in AXES))
]


def tokens_of(rank: Rank, layout: Layout) -> range:
    """The consecutive tokens a rank holds: divided by DP, each part by CP, each of those by TP."""
    tokens = range(TOKENS)
    for axis, index in zip(AXES, rank, strict=True):
        if axis in layout.sharded:
            size = len(tokens) // SIZES[axis]
            tokens = tokens[index * size : (index + 1) * size]
    return tokens


def contributor(rank: Rank, owed: Iterable[TokenAxis]) -> Rank:
    """Which part of a sum the rank holds: its place along the axes that the sum is over."""
    dp, cp, tp = (index if axis in owed else 0 for axis, index in zip(AXES, rank, strict=True))
    return dp, cp, tp


def start(before: Layout, owed: frozenset[TokenAxis]) -> State:
    return {
        rank: [(token, Counter([contributor(rank, owed)])) for token in tokens_of(rank, before)]
        for rank in RANKS
    }


def wanted(after: Layout, owed: frozenset[TokenAxis]) -> State:
    everyone = Counter({contributor(rank, owed): 1 for rank in RANKS})
    return {rank: [(token, everyone) for token in tokens_of(rank, after)] for rank in RANKS}


def peers(rank: Rank, axis: TokenAxis) -> list[Rank]:
    place = AXES.index(axis)
    return [
        (*rank[:place], index, *rank[place + 1 :])  # type: ignore[misc]
        for index in range(SIZES[axis])
    ]


def cut(members: list[list[Row]], index: int) -> list[Row]:
    size = len(members[index]) // len(members)
    return members[index][index * size : (index + 1) * size]


def join(members: list[list[Row]], index: int) -> list[Row]:
    return [row for rows in members for row in rows]


def add(members: list[list[Row]], index: int) -> list[Row]:
    total: list[Row] = []
    for column in zip(*members, strict=True):
        tokens = {token for token, _ in column}
        assert len(tokens) == 1, f"rows of different tokens {tokens} are added"
        total.append((tokens.pop(), sum((who for _, who in column), Counter())))
    return total


def add_and_cut(members: list[list[Row]], index: int) -> list[Row]:
    return cut([add(members, index)] * len(members), index)


STEPS: dict[Transition, Callable[[list[list[Row]], int], list[Row]]] = {
    Transition.SLICE: cut,
    Transition.ALL_GATHER: join,
    Transition.ALL_REDUCE: add,
    Transition.REDUCE_SCATTER: add_and_cut,
}


def walk(state: State, steps: Steps) -> State:
    for transition, axis in steps:
        place = AXES.index(axis)
        state = {
            rank: STEPS[transition]([state[peer] for peer in peers(rank, axis)], rank[place])
            for rank in RANKS
        }
    return state


def possible() -> list[tuple[Layout, Layout, frozenset[TokenAxis]]]:
    return [
        (before, after, owed)
        for before, after, owed in itertools.product(LAYOUTS, LAYOUTS, OWED)
        if not owed & before.sharded
    ]


def test_every_transport_lands_each_row_and_completes_each_sum() -> None:
    checked = 0
    for before, after, owed in possible():
        steps = transport(before, after, owed)
        end = walk(start(before, owed), steps)
        assert end == wanted(after, owed), f"[{before}] to [{after}] owing {owed}: {steps}"
        checked += bool(steps)
    assert checked == len(possible()) - len(LAYOUTS), "only a move to where rows are is free"


def test_a_sum_over_ranks_with_different_rows_is_refused() -> None:  # boundary G13
    refused = 0
    for before, after, owed in itertools.product(LAYOUTS, LAYOUTS, OWED):
        if owed & before.sharded:
            refused += 1
            with pytest.raises(DeclarationError, match="no transport completes a sum over"):
                transport(before, after, owed)
    assert refused == 512 - len(possible())


def test_the_table_is_total() -> None:
    assert set(TRANSITIONS) == set(itertools.product((False, True), repeat=3))
    impossible = {key for key, step in TRANSITIONS.items() if step is Transition.UNSUPPORTED}
    assert impossible == {(True, True, True), (True, True, False)}


@pytest.mark.parametrize("fault", ["reversed", "dropped", "doubled", "another axis"])
def test_the_simulator_sees_faults(fault: str) -> None:
    """Every transport of two or more collectives, damaged, ends elsewhere or in a failure."""
    damaged = 0
    for before, after, owed in possible():
        steps = list(transport(before, after, owed))
        if len(steps) < 2:
            continue
        sums = [step for step in steps if step[0] is Transition.ALL_REDUCE]
        if fault == "reversed":
            gathers = [step for step in steps if step[0] is Transition.ALL_GATHER]
            if len(gathers) < 2:
                continue
            steps = gathers[::-1] + steps[len(gathers) :]
        elif fault == "dropped":
            steps = steps[:-1]
        elif fault == "doubled":
            if not sums:
                continue
            steps.append(sums[0])
        else:
            other = next(axis for axis in AXES if axis is not steps[0][1])
            steps[0] = (steps[0][0], other)
        damaged += 1
        try:
            end = walk(start(before, owed), steps)
        except (AssertionError, ValueError):
            continue
        assert end != wanted(after, owed), f"[{before}] to [{after}] owing {owed}: {steps}"
    assert damaged > 5
