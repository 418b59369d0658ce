"""Ranks as threads: the values, and every mistake found when it is made."""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from layline.comm.groups import Groups
from layline.comm.simulated import SimulatedWorld, run_ranks
from layline.errors import CollectiveError, StreamError
from layline.topology import GroupName, Topology

TP = GroupName.TP


def normal(seed: int, rows: int, columns: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator).to(dtype)


def sum_in_order(parts: list[torch.Tensor]) -> torch.Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "topology", [Topology(tp=5), Topology(tp=8, attn_dp=2, attn_cp=2, ep=4, pp=2)], ids=str
)
def test_every_group_has_its_own_ranks_values(topology: Topology, dtype: torch.dtype) -> None:
    def run(here: Topology, groups: Groups) -> dict[GroupName, list[torch.Tensor]]:
        results = {}
        for name, group in groups.items():
            x = normal(here.rank, 2 * group.size, 3, dtype)
            counts = [2 * index + (index == 0) for index in range(group.size)]
            uneven = normal(here.rank, sum(counts), 3, dtype)
            results[name] = [
                group.all_reduce(x.clone()),
                group.all_gather(x),
                group.reduce_scatter(x),
                group.reduce_scatter_v(uneven, counts),
            ]
        return results

    results = run_ranks(topology, run)
    for rank, by_name in enumerate(results):
        here = topology.at(rank)
        assert set(by_name) == {name for name in GroupName if topology.size(name) > 1}
        for name, (reduced, gathered, scattered, scattered_v) in by_name.items():
            ranks = here.group(name)
            inputs = [normal(peer, 2 * len(ranks), 3, dtype) for peer in ranks]
            counts = [2 * index + (index == 0) for index in range(len(ranks))]
            uneven = [normal(peer, sum(counts), 3, dtype) for peer in ranks]
            index = here.index_in(name)
            assert torch.equal(reduced, sum_in_order(inputs))
            assert torch.equal(gathered, torch.cat(inputs))
            assert torch.equal(scattered, sum_in_order(inputs)[2 * index : 2 * index + 2])
            assert torch.equal(scattered_v, torch.split(sum_in_order(uneven), counts)[index])


@settings(max_examples=40, deadline=None, database=None)
@given(counts=st.lists(st.integers(0, 7), min_size=2, max_size=6), columns=st.integers(1, 3))
def test_uneven_rows_reach_their_rank_and_padding_stays_behind(
    counts: list[int], columns: int
) -> None:
    def run(here: Topology, groups: Groups) -> torch.Tensor:
        mine = groups[TP].reduce_scatter_v(normal(here.rank, sum(counts), columns), counts)
        assert mine.shape == (counts[here.rank], columns)
        slot = torch.full((max(counts) + 1, columns), float("nan"))
        slot[: len(mine)] = mine
        slots = groups[TP].all_gather(slot).view(len(counts), -1, columns)
        return torch.cat([slots[index, :count] for index, count in enumerate(counts)])

    inputs = [normal(rank, sum(counts), columns) for rank in range(len(counts))]
    for result in run_ranks(Topology(tp=len(counts)), run):
        assert torch.equal(result, sum_in_order(inputs))


def test_a_poisoned_row_stays_in_its_row() -> None:
    def run(here: Topology, groups: Groups) -> torch.Tensor:
        x = torch.ones(4, 2)
        x[here.rank] = float("nan")
        return groups[TP].reduce_scatter_v(x, [1, 1, 2])

    first, second, third = run_ranks(Topology(tp=3), run)
    assert first.isnan().all()
    assert second.isnan().all()
    assert third[0].isnan().all()
    assert torch.equal(third[1], torch.full((2,), 3.0))


def test_zero_rows_and_strided_rows() -> None:
    def run(here: Topology, groups: Groups) -> list[tuple[int, ...]]:
        group, empty = groups[TP], torch.empty(0, 4)
        columns = normal(here.rank, 4, 6).t()
        assert not columns.is_contiguous()
        expected = normal(0, 4, 6).t() + normal(1, 4, 6).t()
        assert torch.equal(group.reduce_scatter(columns), expected.chunk(2)[here.rank])
        assert torch.equal(group.all_reduce(columns), expected)
        results = [group.all_reduce(empty), group.all_gather(empty), group.reduce_scatter(empty)]
        return [tuple(x.shape) for x in [*results, group.reduce_scatter_v(empty, [0, 0])]]

    assert run_ranks(Topology(tp=2), run) == [[(0, 4)] * 4] * 2


def test_results_share_no_memory_and_inputs_of_all_reduce_are_spent() -> None:
    def run(here: Topology, groups: Groups) -> tuple[torch.Tensor, list[torch.Tensor]]:
        group = groups[TP]
        spent, kept = torch.ones(2, 2), torch.ones(2, 2)
        results = [group.all_reduce(spent), group.all_gather(kept), group.reduce_scatter(kept)]
        assert spent.isnan().all()
        assert torch.equal(kept, torch.ones(2, 2))
        # Whoever writes its own result must not reach another's.
        for result in results:
            result.fill_(here.rank)
        group.all_gather(kept)
        return kept, results

    ranks = run_ranks(Topology(tp=2), run)
    for rank, (_, results) in enumerate(ranks):
        for result in results:
            assert torch.equal(result, torch.full_like(result, rank))
    memory = {x.untyped_storage().data_ptr() for kept, results in ranks for x in (kept, *results)}
    assert len(memory) == 8


def test_inputs_can_be_kept() -> None:
    def run(here: Topology, groups: Groups) -> float:
        x = torch.ones(1, 1)
        groups[TP].all_reduce(x)
        return float(x)

    assert run_ranks(Topology(tp=2), run, spend_inputs=False) == [1.0, 1.0]


def failure(topology: Topology, function: Callable[[Topology, Groups], Any], **options: Any) -> str:
    """What the ranks' CollectiveError says: not that of the timeout, unless it is asked for."""
    with pytest.raises(CollectiveError) as caught:
        run_ranks(topology, function, **options)
    assert ("still run" in str(caught.value)) == ("timeout_s" in options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def until(groups: Groups, words: str) -> None:
    """Hold a rank back until the world says ``words`` of the ranks, or has failed."""
    world = groups[TP]._world  # type: ignore[attr-defined]
    while world.failure is None and words not in world.where():
        time.sleep(0.002)


def keep_running(groups: Groups) -> None:
    until(groups, "no rank is ever here")


def test_another_kind_is_named_with_both_ranks() -> None:
    # boundary G21
    def run(here: Topology, groups: Groups) -> None:
        x = torch.ones(4, 8)
        groups[TP].all_reduce(x.clone())
        if here.rank == 0:
            groups[TP].all_reduce(x)
        elif here.rank == 1:
            until(groups, "rank 0: waiting at TP #1")
            groups[TP].all_gather(x)
        else:
            keep_running(groups)

    assert failure(Topology(tp=4), run) == (
        "rank 1 calls all-gather of [4, 8] float32 on TP (#1) while rank 0 calls all-reduce of "
        "[4, 8] float32; rank 0: waiting at TP #1 all-reduce of [4, 8] float32; "
        "ranks 1, 2, 3: running"
    )


@pytest.mark.parametrize(
    ("brought", "words"),
    [
        (lambda: torch.ones(3, 2), "[3, 2] float32"),
        (lambda: torch.ones(0, 2), "[0, 2] float32"),
        (lambda: torch.ones(2, 3), "[2, 3] float32"),
        (lambda: torch.ones(2, 2, dtype=torch.bfloat16), "[2, 2] bfloat16"),
    ],
)
def test_another_shape_or_dtype_is_named(brought: Callable[[], torch.Tensor], words: str) -> None:
    def run(here: Topology, groups: Groups) -> None:
        groups[TP].all_gather(brought() if here.rank == 1 else torch.ones(2, 2))

    text = failure(Topology(tp=2), run)
    assert f"all-gather of {words}" in text
    assert "all-gather of [2, 2] float32" in text


def test_other_counts_are_named() -> None:
    def run(here: Topology, groups: Groups) -> None:
        if here.rank == 1:
            until(groups, "rank 0: waiting")
        groups[TP].reduce_scatter_v(torch.ones(4, 2), [[1, 3], [3, 1]][here.rank])

    assert failure(Topology(tp=2), run).startswith(
        "rank 1 calls reduce-scatter-v of [4, 2] float32 with counts [3, 1] on TP (#0) while "
        "rank 0 calls reduce-scatter-v of [4, 2] float32 with counts [1, 3]; "
    )


def test_groups_in_another_order_are_a_deadlock() -> None:
    # boundary G21
    topology = Topology(tp=4, attn_dp=2)

    def run(here: Topology, groups: Groups) -> None:
        first, second = TP, GroupName.ATTN_TP
        if here.rank == 3:
            first, second = second, first
        groups[first].all_reduce(torch.ones(1, 2))
        groups[second].all_reduce(torch.ones(1, 2))

    text = failure(topology, run)
    assert text == (
        "deadlock: every rank waits; ranks 0, 1, 2: waiting at TP #0 all-reduce of [1, 2] float32; "
        "rank 3: waiting at attention TP #0 all-reduce of [1, 2] float32"
    )


@pytest.mark.parametrize("finishes_first", [True, False])
def test_a_rank_that_finishes_leaves_nobody_waiting(finishes_first: bool) -> None:
    def run(here: Topology, groups: Groups) -> None:
        if here.rank == 3:
            keep_running(groups)
        elif here.rank == 2:
            until(groups, "" if finishes_first else "ranks 0, 1: waiting")
        else:
            until(groups, "rank 2: finished" if finishes_first else "")
            groups[TP].all_reduce(torch.ones(1, 2))

    text = failure(Topology(tp=4), run)
    assert text.startswith("deadlock: rank 2 has finished and others wait for it; rank")
    assert "waiting at TP #0 all-reduce of [1, 2] float32" in text
    assert "3: running" in text
    assert "rank 2: finished" in text


def test_one_rank_more_calls_than_the_others_is_found() -> None:
    def run(here: Topology, groups: Groups) -> None:
        for _ in range(3 + (here.rank == 1)):
            groups[TP].all_gather(torch.ones(1, 1))

    text = failure(Topology(tp=3), run)
    assert "rank 1: waiting at TP #3 all-gather of [1, 1] float32" in text


def test_an_exception_ends_the_other_ranks_and_keeps_its_type() -> None:
    seen: dict[int, BaseException] = {}

    def run(here: Topology, groups: Groups) -> None:
        if here.rank == 1:
            until(groups, "ranks 0, 2: waiting")
            raise StreamError("planted")
        try:
            groups[TP].all_reduce(torch.ones(1, 1))
        except CollectiveError as error:
            seen[here.rank] = error
            raise

    with pytest.raises(StreamError, match="planted") as caught:
        run_ranks(Topology(tp=3), run)
    assert caught.value.__notes__ == ["on simulated rank 1 of 3"]
    assert sorted(seen) == [0, 2]
    for error in seen.values():
        assert str(error) == "rank 1 failed: StreamError: planted"
        assert error.__cause__ is caught.value


def test_a_rank_that_runs_for_ever_is_named() -> None:
    over = threading.Event()

    def run(here: Topology, groups: Groups) -> None:
        if here.rank == 1:
            over.wait(5.0)
        else:
            groups[TP].all_reduce(torch.ones(1, 1))

    text = failure(Topology(tp=2), run, timeout_s=0.3)
    over.set()
    assert text == (
        "ranks still run after 0.3 s: rank 0: waiting at TP #0 all-reduce of [1, 1] float32; "
        "rank 1: running"
    )


def test_what_one_rank_can_see_alone_is_refused() -> None:
    def refused(attempt: Callable[[Any], Any]) -> str:
        return failure(Topology(tp=2), lambda here, groups: attempt(groups[TP]))

    assert refused(lambda group: group.reduce_scatter(torch.ones(3, 1))) == (
        "reduce-scatter on TP: 3 rows do not divide over 2 ranks; expected a multiple such as 4"
    )
    assert "counts [1, 1] do not fit" in refused(
        lambda group: group.reduce_scatter_v(torch.ones(3, 1), [1, 1])
    )
    assert "expected [rows, columns]" in refused(lambda group: group.all_gather(torch.ones(3)))
    assert "int64 is not summed" in refused(
        lambda group: group.all_reduce(torch.ones(2, 2, dtype=torch.int64))
    )


def test_a_failed_world_and_a_wrong_size_are_refused() -> None:
    world = SimulatedWorld(2)
    with pytest.raises(CollectiveError, match="the topology has 4 ranks; the world has 2"):
        world.groups(Topology(tp=4))
    world.fail(1, LookupError("planted"))
    group = world.groups(Topology(tp=2))[TP]
    with pytest.raises(CollectiveError, match="rank 1 failed: LookupError: planted"):
        group.all_reduce(torch.ones(1, 1))


def test_each_rank_has_a_context_of_its_own() -> None:
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=-1)
    variable.set(7)

    def run(here: Topology, groups: Groups) -> tuple[int, int]:
        before = variable.get()
        variable.set(here.rank)
        groups[TP].all_gather(torch.ones(1, 1))
        return before, variable.get()

    assert run_ranks(Topology(tp=3), run) == [(7, 0), (7, 1), (7, 2)]
    assert variable.get() == 7


def test_sixty_four_ranks() -> None:
    topology = Topology(tp=64, attn_dp=4, attn_cp=2, ep=8)

    def run(here: Topology, groups: Groups) -> float:
        total = torch.full((1, 4), float(here.rank))
        for _ in range(5):
            total = groups[TP].all_reduce(total) / 64
            for name in (GroupName.ATTN_TP, GroupName.ATTN_CP, GroupName.ATTN_DP):
                total = groups[name].all_reduce(total) / groups[name].size
        return float(total[0, 0])

    assert run_ranks(topology, run) == [31.5] * 64
