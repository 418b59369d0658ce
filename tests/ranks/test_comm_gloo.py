"""Groups over gloo, on real processes: the simulated ranks' values, and every refusal seen."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import distributed

from layline.comm.groups import Groups
from layline.comm.simulated import run_ranks
from layline.comm.wires import DIRECT_BYTES
from layline.comm.world import FileStore, backend_for, make_groups, open_world
from layline.errors import CollectiveError
from layline.topology import GroupName, Topology
from support.ranks import Settings, run_outcomes, run_processes

THREE = Topology(tp=3)
TWO = Topology(tp=2)
SOCKET_TABLES = [Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6")]


def normal(seed: int, rows: int, columns: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator).to(dtype)


def every_collective(topology: Topology, groups: Groups) -> dict[str, torch.Tensor]:
    """One rank's results of each collective on each group, by a readable name."""
    results = {}
    for name, group in groups.items():
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            label = f"{name.value} {dtype} "
            rows = 2 * group.size
            x = normal(topology.rank, rows, 5, dtype)
            results[label + "all-reduce"] = group.all_reduce(x.clone())
            results[label + "all-gather"] = group.all_gather(x)
            results[label + "reduce-scatter"] = group.reduce_scatter(x)
            counts = [0] * (group.size - 1) + [rows]
            results[label + "reduce-scatter-v"] = group.reduce_scatter_v(x, counts)
        for dtype in (torch.int64, torch.int16, torch.uint8, torch.bool, torch.float8_e4m3fn):
            x = normal(topology.rank, 3, 4).mul(4).abs().to(dtype)
            results[f"{name.value} {dtype} all-gather"] = group.all_gather(x)
        columns = normal(topology.rank, 6, 2 * group.size).t()[::2]
        assert not columns.is_contiguous()
        results[f"{name.value} strided all-gather"] = group.all_gather(columns)
        results[f"{name.value} strided reduce-scatter"] = group.reduce_scatter(columns)
        results[f"{name.value} strided all-reduce"] = group.all_reduce(columns)
        empty = torch.empty(0, 4)
        no_columns = torch.empty(3, 0)
        results[f"{name.value} no columns all-gather"] = group.all_gather(no_columns)
        results[f"{name.value} empty all-reduce"] = group.all_reduce(empty)
        results[f"{name.value} empty all-gather"] = group.all_gather(empty)
        results[f"{name.value} empty reduce-scatter"] = group.reduce_scatter(empty)
        results[f"{name.value} empty reduce-scatter-v"] = group.reduce_scatter_v(
            empty, [0] * group.size
        )
    return results


@pytest.mark.parametrize(
    "topology",
    [THREE, Topology(tp=4, attn_dp=2, ep=2), Topology(tp=2, pp=2)],
    ids=["T3", "D2xT2", "T2xPP2"],
)
def test_gloo_gives_the_simulated_ranks_values(topology: Topology) -> None:
    # boundary G21
    real = run_processes(topology, every_collective)
    for rank, simulated in enumerate(run_ranks(topology, every_collective)):
        assert list(real[rank]) == list(simulated)
        for label, value in simulated.items():
            assert real[rank][label].dtype == value.dtype, label
            # Bit by bit: both add in group order.
            assert torch.equal(real[rank][label].float(), value.float()), (rank, label)


def large_sums(topology: Topology, groups: Groups, rows: int) -> torch.Tensor:
    return groups[GroupName.TP].all_reduce(normal(topology.rank, rows, 64))


def test_large_sums_are_equal_on_all_ranks_and_near_the_simulated() -> None:
    rows = DIRECT_BYTES // (4 * 64)
    real = run_processes(THREE, large_sums, rows)
    simulated = run_ranks(THREE, lambda topology, groups: large_sums(topology, groups, rows))
    assert torch.equal(real[0], real[1])
    assert torch.equal(real[0], real[2])
    torch.testing.assert_close(real[0], simulated[0], rtol=0, atol=4e-6)


def uneven_sums(
    topology: Topology, groups: Groups, cases: list[list[int]]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """For each case the reduce-scatter-v and, from it, this rank's rows padded and gathered."""
    group, results = groups[GroupName.TP], []
    for seed, counts in enumerate(cases):
        x = normal(1000 * seed + topology.rank, sum(counts), 3)
        mine = group.reduce_scatter_v(x, counts)
        slot = torch.full((max(counts) + 1, 3), float("nan"))
        slot[: len(mine)] = mine
        joined = group.all_gather(slot).view(group.size, -1, 3)
        results.append((mine, torch.cat([joined[i, :n] for i, n in enumerate(counts)])))
    return results


def uneven_cases(number: int) -> list[list[int]]:
    """Row counts for three ranks, as hypothesis finds them: zeros, ties and lone ranks included."""
    cases: list[list[int]] = []

    @settings(max_examples=number, database=None, derandomize=True)
    @given(st.lists(st.integers(0, 9), min_size=3, max_size=3))
    def collect(counts: list[int]) -> None:
        cases.append(counts)

    collect()
    return cases


def test_uneven_rows_reach_their_rank_and_padding_stays_behind() -> None:
    cases = uneven_cases(60)
    assert any(0 in counts and sum(counts) for counts in cases)
    real = run_processes(THREE, uneven_sums, cases)
    for case, counts in enumerate(cases):
        inputs = [normal(1000 * case + rank, sum(counts), 3) for rank in range(3)]
        total = inputs[0] + inputs[1] + inputs[2]
        shares = torch.split(total, counts)
        for rank in range(3):
            mine, joined = real[rank][case]
            assert torch.equal(mine, shares[rank]), (rank, counts)
            assert torch.equal(joined, total), (rank, counts)


def call(group: Any, kind: str, rows: int, columns: int = 4, dtype: str = "float32") -> Any:
    x = torch.ones(rows, columns, dtype=getattr(torch, dtype))
    counts = [[rows] + [0] * (group.size - 1)] if kind == "reduce_scatter_v" else []
    return getattr(group, kind)(x, *counts)


def mismatched(topology: Topology, groups: Groups, calls: list[tuple[Any, ...]]) -> str:
    with pytest.raises(CollectiveError) as caught:
        call(groups[GroupName.TP], *calls[topology.rank])
    return str(caught.value)


MISMATCHES = {
    "kind": (("all_reduce", 2), ("all_gather", 2)),
    "rows": (("all_reduce", 2), ("all_reduce", 3)),
    "one rank empty": (("all_gather", 0), ("all_gather", 1)),
    "columns": (("all_gather", 2, 4), ("all_gather", 2, 5)),
    "dtype": (("reduce_scatter", 2, 4, "float16"), ("reduce_scatter", 2, 4, "bfloat16")),
}


def all_mismatches(topology: Topology, groups: Groups) -> dict[str, str]:
    return {label: mismatched(topology, groups, list(calls)) for label, calls in MISMATCHES.items()}


def test_a_mismatch_fails_on_every_rank_and_says_who_brought_what() -> None:
    # boundary G21
    texts = run_processes(TWO, all_mismatches)
    for rank in range(2):
        assert texts[rank]["kind"].startswith(
            f"{('all-reduce', 'all-gather')[rank]} #0 on TP, rank {rank}: the ranks disagree: "
        )
        for text in texts[rank].values():
            assert "rank 0 brings" in text
            assert "rank 1 brings" in text
    assert "rank 0 brings #1 TP all-reduce of [2, 4] float32" in texts[0]["rows"]
    assert "rank 1 brings #1 TP all-reduce of [3, 4] float32" in texts[0]["rows"]
    assert "rank 0 brings #2 TP all-gather of [0, 4] float32" in texts[1]["one rank empty"]
    assert "rank 1 brings #3 TP all-gather of [2, 5] float32" in texts[1]["columns"]
    assert "rank 0 brings #4 TP reduce-scatter of [2, 4] float16" in texts[0]["dtype"]


def other_mismatches(topology: Topology, groups: Groups) -> list[str]:
    texts = []
    counts = [[1, 3], [3, 1]][topology.rank]
    with pytest.raises(CollectiveError) as caught:
        groups[GroupName.TP].reduce_scatter_v(torch.ones(4, 2), counts)
    texts.append(str(caught.value))
    # Two names of one process group.
    name = [GroupName.TP, GroupName.ATTN_TP][topology.rank]
    with pytest.raises(CollectiveError) as caught:
        groups[name].all_reduce(torch.ones(4, 2))
    texts.append(str(caught.value))
    # The agreement itself leaves the group usable.
    assert groups[GroupName.TP].all_reduce(torch.ones(1, 1)).item() == 2
    return texts


def test_counts_and_names_are_part_of_the_agreement() -> None:
    first, second = run_processes(TWO, other_mismatches)[0]
    assert "rank 0 brings #0 TP reduce-scatter-v of [4, 2] float32 with counts [1, 3]" in first
    assert "rank 1 brings #0 TP reduce-scatter-v of [4, 2] float32 with counts [3, 1]" in first
    assert "rank 0 brings #1 TP all-reduce of [4, 2] float32" in second
    assert "rank 1 brings #1 attention TP all-reduce of [4, 2] float32" in second


def exchanges(topology: Topology, groups: Groups) -> tuple[list[int], str, int]:
    """Exchanges that each call costs, a mismatch in the first calls, and a sum afterwards."""
    limited = make_groups(topology, torch.device("cpu"), verified_calls=3)[GroupName.TP]
    sent: list[int] = []

    def counted(function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            sent.append(1)
            return function(*arguments, **options)

        return call

    costs, words, total = [], "", 0
    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_reduce", "all_to_all_single"):
            patch.setattr(distributed, name, counted(getattr(distributed, name)))
        for number in range(6):
            sent.clear()
            if number == 2:
                with pytest.raises(CollectiveError) as caught:
                    limited.all_reduce(torch.ones(1 + topology.rank, 1))
                words = str(caught.value)
            else:
                total = int(limited.all_reduce(torch.ones(1, 1)).item())
            costs.append(len(sent))
        sent.clear()
        groups[GroupName.TP].all_reduce(torch.ones(1, 1))
        assert len(sent) == 2, "without a limit every call is compared"
    return costs, words, total


def test_only_the_first_calls_of_a_group_are_compared() -> None:
    for costs, words, total in run_processes(TWO, exchanges):
        assert costs == [2, 2, 1, 1, 1, 1], "the third is refused after its comparison"
        assert "#2 on TP" in words
        assert "rank 1 brings #2 TP all-reduce of [2, 1] float32" in words
        assert total == 2


def short_messages(topology: Topology, groups: Groups) -> tuple[int, ...]:
    """Each rank believes that it owns two rows of three, so each sends one where two are due."""
    counts = [[2, 1], [1, 2]][topology.rank]
    return tuple(groups[GroupName.TP].reduce_scatter_v(torch.ones(3, 2), counts).shape)


def test_unverified_gloo_passes_short_messages() -> None:
    # What the agreement is for; were it on, this would raise (counts are part of it).
    shapes = run_processes(TWO, short_messages, settings=Settings(verified=False))
    assert shapes == [(2, 2), (2, 2)]


def lost_peer(topology: Topology, groups: Groups, how: str) -> str:
    group = groups[GroupName.TP]
    group.all_reduce(torch.ones(1, 1))
    if topology.rank == 1:
        if how == "dies":
            os._exit(7)
        time.sleep(2.5)
        return ""
    with pytest.raises(CollectiveError) as caught:
        group.all_gather(torch.ones(2, 2))
    return str(caught.value)


@pytest.mark.parametrize(
    ("how", "verified", "exit_code"),
    [("dies", True, 7), ("dies", False, 7), ("stops answering", True, 0)],
)
def test_a_lost_peer_is_named_with_the_collective(how: str, exit_code: int, verified: bool) -> None:
    outcomes = run_outcomes(
        TWO, lost_peer, how, settings=Settings(verified=verified, group_timeout_s=1.5)
    )
    assert outcomes[1].exit_code == exit_code
    text = outcomes[0].value
    assert text.startswith(
        "all-gather #1 on TP, rank 0: ranks [0, 1] did not finish it together (timeout 1.5 s): "
    )
    assert "\n" not in text
    assert "pair.cc" not in text
    assert ("Timed out" in text) == (how == "stops answering")


def local_refusals(topology: Topology, groups: Groups) -> dict[str, str]:
    group, texts = groups[GroupName.TP], {}
    refused = {
        "rows": lambda: group.reduce_scatter(torch.ones(5, 2)),
        "counts": lambda: group.reduce_scatter_v(torch.ones(5, 2), [2, 2]),
        "count of counts": lambda: group.reduce_scatter_v(torch.ones(5, 2), [5]),
        "negative": lambda: group.reduce_scatter_v(torch.ones(5, 2), [6, -1]),
        "dimensions": lambda: group.all_gather(torch.ones(5)),
        "integers": lambda: group.all_reduce(torch.ones(2, 2, dtype=torch.int64)),
        "float8": lambda: group.all_reduce(torch.ones(2, 2).to(torch.float8_e5m2)),
        "complex": lambda: group.all_gather(torch.ones(2, 2, dtype=torch.complex64)),
        "device": lambda: group.all_reduce(torch.ones(2, 2, device="meta")),
    }
    for label, attempt in refused.items():
        # One rank alone: nothing may have been sent.
        if topology.rank == 0:
            with pytest.raises(CollectiveError) as caught:
                attempt()
            texts[label] = str(caught.value)
    assert group.all_reduce(torch.ones(1, 1)).item() == 2
    return texts


def test_what_one_rank_can_see_alone_is_refused_before_anything_is_sent() -> None:
    texts = run_processes(TWO, local_refusals)[0]
    assert texts == {
        "rows": "reduce-scatter on TP: 5 rows do not divide over 2 ranks; "
        "expected a multiple such as 6",
        "counts": "reduce-scatter-v on TP: counts [2, 2] do not fit; "
        "expected 2 counts of at least 0 that add up to 5 rows",
        "count of counts": "reduce-scatter-v on TP: counts [5] do not fit; "
        "expected 2 counts of at least 0 that add up to 5 rows",
        "negative": "reduce-scatter-v on TP: counts [6, -1] do not fit; "
        "expected 2 counts of at least 0 that add up to 5 rows",
        "dimensions": "all-gather on TP: a tensor of shape [5]; expected [rows, columns]",
        "integers": "all-reduce on TP: int64 is not summed; "
        "expected float32, float64, bfloat16 or float16",
        "float8": "all-reduce on TP: float8_e5m2 is not summed; "
        "expected float32, float64, bfloat16 or float16",
        "complex": "all-gather on TP: dtype complex64 is not sent; expected one of float32, "
        "bfloat16, float16, float64, float8_e4m3fn, float8_e5m2, int64, int32, int16, int8, "
        "uint8, bool",
        "device": "all-reduce on TP: a tensor on meta; expected cpu",
    }


def inference_values(topology: Topology, groups: Groups) -> list[float]:
    group, values = groups[GroupName.TP], []
    with torch.inference_mode():
        made_inside = torch.ones(2, 2)
        values.append(group.all_reduce(made_inside.clone()).sum().item())
        values.append(group.reduce_scatter(made_inside).sum().item())
    values.append(group.all_gather(made_inside).sum().item())
    leaf = torch.ones(2, 2, requires_grad=True)
    result = group.all_reduce(leaf)
    assert not result.requires_grad
    values.append(result.sum().item())
    return values


def test_inference_mode_and_gradients_do_not_matter() -> None:
    assert run_processes(TWO, inference_values) == [[8.0, 4.0, 8.0, 8.0]] * 2
    assert run_ranks(TWO, inference_values) == [[8.0, 4.0, 8.0, 8.0]] * 2


def alone_with_nothing(topology: Topology, groups: Groups) -> list[tuple[int, ...]]:
    group, empty = groups[GroupName.TP], torch.empty(0, 4)
    if topology.rank == 1:
        return []
    results = [group.all_reduce(empty), group.all_gather(empty), group.reduce_scatter(empty)]
    return [tuple(x.shape) for x in [*results, group.reduce_scatter_v(empty, [0, 0])]]


def test_zero_rows_send_nothing() -> None:
    # Rank 1 takes no part, and rank 0 does not notice.
    shapes = run_processes(TWO, alone_with_nothing, settings=Settings(verified=False))
    assert shapes == [[(0, 4)] * 4, []]


def made_groups(topology: Topology, groups: Groups) -> list[tuple[list[int], str | None]]:
    """The process groups that are made for a topology, and the interface they are told."""
    made: list[tuple[list[int], str | None]] = []

    def watched(ranks: list[int], **options: Any) -> Any:
        made.append((ranks, os.environ.get("GLOO_SOCKET_IFNAME")))
        return new_group(ranks, **options)

    new_group = distributed.new_group
    before = dict(os.environ)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "new_group", watched)
        again = make_groups(topology, torch.device("cpu"))
    assert os.environ == before
    assert set(again) == set(groups)
    return made


def test_every_rank_makes_each_group_once_and_on_the_loopback_interface() -> None:
    topology = Topology(tp=4, attn_dp=2)
    in_order = [[0, 1, 2, 3], [0, 2], [1, 3], [0, 1], [2, 3]]
    made = run_processes(topology, made_groups)
    for groups in made:
        assert [ranks for ranks, _ in groups] == in_order
        assert {interface for _, interface in groups} <= {"lo", "lo0"}


def other_world(topology: Topology, groups: Groups) -> str:
    with pytest.raises(CollectiveError) as caught:
        make_groups(Topology(tp=4, rank=topology.rank), torch.device("cpu"))
    with pytest.raises(CollectiveError, match="device meta has no collectives"):
        backend_for(torch.device("meta"))
    return str(caught.value)


def test_a_world_of_another_size_is_refused() -> None:
    first, second = run_processes(TWO, other_world)
    assert first == "this is rank 0 of 2; the topology says rank 0 of 4"
    assert second == "this is rank 1 of 2; the topology says rank 1 of 4"


def test_a_rank_that_finds_nobody_says_so(tmp_path: Path) -> None:
    store = FileStore(str(tmp_path / "meeting"), 2)
    with pytest.raises(CollectiveError) as caught:
        open_world(TWO, store, torch.device("cpu"), timeout_s=0.5)
    assert str(caught.value).startswith("rank 0 of 2 could not join the others (timeout 0.5 s): ")
    assert "\n" not in str(caught.value)
    assert not distributed.is_initialized()


def listening_addresses() -> set[str]:
    """Local addresses that this process's own sockets listen on."""
    inodes = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(str(link.readlink()).removeprefix("socket:[").removesuffix("]"))
    found = set()
    for table in SOCKET_TABLES:
        for line in table.read_text(encoding="ascii").splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.add(fields[1].partition(":")[0])
    return found


def addresses(topology: Topology, groups: Groups) -> set[str]:
    return listening_addresses()


@pytest.mark.skipif(not SOCKET_TABLES[0].exists(), reason="reads Linux's /proc")
def test_only_the_loopback_interface_is_listened_on() -> None:
    loopback = "0100007F"
    with socket.create_server(("127.0.0.1", 0)):
        assert listening_addresses() == {loopback}
    assert set().union(*run_processes(TWO, addresses)) <= {loopback}


def never_ends(topology: Topology, groups: Groups) -> None:
    while topology.rank == 1:
        time.sleep(0.05)


def test_the_helper_kills_ranks_that_do_not_end() -> None:
    outcomes = run_outcomes(TWO, never_ends, timeout_s=1.0)
    assert outcomes[1].exit_code == -9
    with pytest.raises(AssertionError, match=r"rank 1 .*no answer"):
        run_processes(TWO, never_ends, timeout_s=1.0)


def raises_on_one(topology: Topology, groups: Groups) -> None:
    if topology.rank == 1:
        raise LookupError("planted")


def test_the_helper_shows_a_ranks_traceback() -> None:
    with pytest.raises(AssertionError, match=r"rank 1 (?s:.*)LookupError: planted"):
        run_processes(TWO, raises_on_one)


def test_ranks_are_processes_of_their_own() -> None:
    outcomes = run_processes(TWO, process_ids)
    assert len({os.getpid(), *outcomes}) == 3


def process_ids(topology: Topology, groups: Groups) -> int:
    return os.getpid()
