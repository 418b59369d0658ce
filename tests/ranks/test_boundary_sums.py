"""Sums that compute runs against its contract are refused; faults in row movement are seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from layline.boundary import get_forward, ops
from layline.boundary.layout import BatchVariant
from layline.boundary.mesh import MeshSpec
from layline.boundary.policy import ReductionPolicy
from layline.boundary.rows import DpPadding, batch_kind
from layline.errors import StreamError
from layline.topology import GroupName, Topology
from support.simulated_cases import Case, mesh_spec
from support.toy_mesh import HIDDEN, ToyRank, embedding, on_ranks, reference

TP2 = Case(mesh_spec(Topology(tp=2)), batch_kind(BatchVariant.ORDINARY))
DP2 = Case(
    MeshSpec(topology=Topology(tp=2, attn_dp=2)),
    batch_kind(BatchVariant.ORDINARY, DpPadding.MAX_LEN),
)
LAYERS = ("attention", "ffn", "attention", "ffn")


def reduce(rank: ToyRank, x: torch.Tensor) -> torch.Tensor:
    summed: torch.Tensor = rank.mesh.compute_groups[GroupName.TP].all_reduce(x)
    return summed


def test_a_partial_attention_that_reduces_is_refused() -> None:  # boundary G22
    def on_rank(rank: ToyRank) -> None:
        attn = rank.stages[0]
        x = attn.prepare(rank.start(), rank.batch)
        y = reduce(rank, rank.compute(0, x))
        with pytest.raises(StreamError, match=r"ran 1 sums .* expected 0 .*reduce_results=False"):
            attn.finish(y, rank.batch)

    on_ranks(TP2.spec, LAYERS, TP2.step, on_rank)


def leave(rank: ToyRank, index: int, hidden: Any, compute: Callable[[torch.Tensor], Any]) -> Any:
    boundary = rank.stages[index]
    x = boundary.prepare(hidden, rank.batch)
    with boundary.exit(rank.batch) as output:
        flags = get_forward()
        assert output.skips_reduction is (flags.fuse_mlp_allreduce or flags.mlp_reduce_scatter)
        y = compute(x)
    return output, y


@pytest.mark.parametrize("case", [TP2, DP2], ids=["fuse", "scatter"])
def test_an_ffn_that_reduces_although_told_not_to_is_refused(case: Case) -> None:
    # boundary G22, G42
    def on_rank(rank: ToyRank) -> None:
        hidden = rank.run(rank.start(), last=1)
        output, y = leave(rank, 1, hidden, lambda x: reduce(rank, rank.compute(1, x)))
        assert output.skips_reduction
        with pytest.raises(StreamError, match=r"compute ran 1 sums .* expected 0 .*exit's flags"):
            output.finish(y)

    on_ranks(case.spec, LAYERS, case.step, on_rank)


def test_an_ffn_that_skips_although_not_told_to_is_refused() -> None:  # boundary G22, G49
    def on_rank(rank: ToyRank) -> None:
        hidden = rank.run(rank.start(), last=3)
        output, y = leave(rank, 3, hidden, torch.ones_like)
        assert not output.skips_reduction, "the stack ends here"
        with pytest.raises(StreamError, match=r"ran 0 sums .* expected 1: .* not complete"):
            output.finish(y)

    on_ranks(TP2.spec, LAYERS, TP2.step, on_rank)


@pytest.mark.parametrize(
    ("after", "told"), [("ffn", True), ("mixer", True), (None, False)], ids=str
)
def test_a_mixer_that_ignores_its_flags_is_refused(after: str | None, told: bool) -> None:
    # boundary G22, G53, G54
    names = ("ffn", "mixer") if after is None else ("ffn", "mixer", after)

    def on_rank(rank: ToyRank) -> None:
        hidden = rank.run(rank.start(), last=1)
        wrong = (lambda x: reduce(rank, torch.ones_like(x))) if told else torch.ones_like
        output, y = leave(rank, 1, hidden, wrong)
        assert output.skips_reduction is told
        with pytest.raises(StreamError, match="between prepare and finish"):
            output.finish(y)

    on_ranks(TP2.spec, names, TP2.step, on_rank)


def test_gathers_and_empty_outputs_are_no_sums() -> None:  # boundary G22
    """A compute may gather; one without rows may skip whatever it likes."""
    case = Case(TP2.spec, TP2.kind, "empty")

    def on_rank(rank: ToyRank) -> None:
        hidden = rank.run(rank.start(), last=3)
        output, y = leave(rank, 3, hidden, lambda x: x)
        rank.finish(output.finish(y))

    on_ranks(case.spec, LAYERS, case.step, on_rank)

    def gathering(rank: ToyRank) -> None:
        attn = rank.stages[0]
        x = attn.prepare(rank.start(), rank.batch)
        rank.mesh.compute_groups[GroupName.TP].all_gather(x)
        attn.finish(rank.compute(0, x), rank.batch)

    on_ranks(TP2.spec, LAYERS, TP2.step, gathering)


@pytest.mark.parametrize("shape", ["ragged", "lonely", "empty"])
def test_an_idle_rank_decides_as_its_peers(shape: str) -> None:  # boundary G44, G49, G50
    """By the tokens of all DP ranks; and nothing that happens later changes the decision."""
    spec = MeshSpec(topology=Topology(tp=4, attn_dp=4), policy=ReductionPolicy.AR)
    case = Case(spec, batch_kind(BatchVariant.ORDINARY, DpPadding.SUM_LEN), shape)

    def on_rank(rank: ToyRank) -> tuple[int, bool]:
        hidden = rank.run(rank.start(), last=1)
        boundary = rank.stages[1]
        x = boundary.prepare(hidden, rank.batch)
        paths = Counting(boundary._paths)
        boundary._paths = paths
        output = boundary.exit(rank.batch)
        decided = output.flags
        with output:
            y = rank.compute(1, x)
            # What a decision would look at.
            rank.batch.kind = batch_kind(BatchVariant.SEQUENCE_PARALLEL)
            rank.batch.rows = None
        rank.recorder.clear()
        handle = output.finish(y)
        assert output.flags == decided
        assert paths.looked_up == 1
        assert not rank.recorder.records, "an owed sum is left, not run"
        assert isinstance(handle, torch.Tensor) is (not decided.fuse_mlp_allreduce)
        return rank.seat.rows.own, decided.fuse_mlp_allreduce

    decisions = on_ranks(spec, LAYERS, case.step, on_rank)
    assert {deferred for _, deferred in decisions} == {shape != "empty"}
    assert any(own == 0 for own, _ in decisions), "no rank was idle"


class Counting(dict[Any, Any]):
    """Paths, and how often one was asked for."""

    looked_up = 0

    def get(self, key: Any, default: Any = None) -> Any:
        self.looked_up += 1
        return super().get(key, default)


def raise_with(told: bool) -> None:
    assert told, "the flag stands while compute runs"
    raise ZeroDivisionError


def test_a_failed_compute_restores_the_flags_on_every_rank() -> None:  # boundary G43
    def on_rank(rank: ToyRank) -> None:
        hidden = rank.run(rank.start(), last=1)
        boundary = rank.stages[1]
        boundary.prepare(hidden, rank.batch)
        output = boundary.exit(rank.batch)
        assert output.flags.fuse_mlp_allreduce
        with pytest.raises(ZeroDivisionError), output:
            raise_with(get_forward().fuse_mlp_allreduce)
        assert not get_forward().fuse_mlp_allreduce
        with pytest.raises(StreamError, match="this exit is failed"):
            output.finish(torch.zeros(3, HIDDEN))

    on_ranks(TP2.spec, LAYERS, TP2.step, on_rank)


def test_a_sum_that_stays_partial_must_be_announced() -> None:  # boundary G28
    """start(partial=True) has a path in an input-scattered batch only."""

    def on_rank(rank: ToyRank) -> None:
        hidden = rank.start(partial=True)
        with pytest.raises(StreamError, match="only an input-scattered batch"):
            rank.stages[0].prepare(hidden, rank.batch)

    on_ranks(TP2.spec, LAYERS, TP2.step, on_rank)


# Planted faults: the numeric tests would see each of them.

FAULTS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "a buffer that is not zeroed": (
        "_place",
        lambda make: lambda op, mesh: after(make(op, mesh), lambda y: y + 1.0),
    ),
    "padding that is not zeroed": (
        "pad_rows",
        lambda pad: (
            lambda x, rows: torch.cat([x, torch.full((rows - x.shape[0], x.shape[1]), 7.0)])
        ),
    ),
    "a residual that joins on every rank": ("_cast_to_residual", lambda _: ops._join),
    "a residual that joins nowhere": ("_join", lambda _: lambda transit: None),
    "a slot of another rank": (
        "_take_slot",
        lambda take: lambda transit: (take(transit), shift(transit))[0],
    ),
    "slices in another order": (
        "_slice",
        lambda make: lambda op, mesh: after(make(op, mesh), lambda y: y.flip(0)),
    ),
}


def after(change: Callable[..., Any], fault: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda x, rows: fault(change(x, rows))


def shift(transit: Any) -> None:
    transit.residual = transit.residual.flip(0)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_changes_the_result(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # boundary G23, G25
    name, make = FAULTS[fault]
    broken = make(getattr(ops, name))
    assert same_as_one_rank(), "without the fault"
    monkeypatch.setattr(ops, name, broken)
    for kind, function in list(ops._ROW_STEPS.items()):
        if function.__name__ == name:
            monkeypatch.setitem(ops._ROW_STEPS, kind, broken)
    assert not same_as_one_rank()


def same_as_one_rank() -> bool:
    """Whether all of a few meshes give the reference's numbers."""
    return all(
        _same(Case(MeshSpec(topology=mesh, policy=policy), batch_kind(variant, padding)))
        for mesh, policy, variant, padding in (
            (Topology(tp=4, attn_dp=2), ReductionPolicy.AR, BatchVariant.ORDINARY, SUM),
            (Topology(tp=4, attn_dp=2), ReductionPolicy.RS, BatchVariant.ORDINARY, MAX),
            (Topology(tp=2, attn_dp=2), ReductionPolicy.RS, BatchVariant.ORDINARY, MAX),
        )
    )


SUM, MAX = DpPadding.SUM_LEN, DpPadding.MAX_LEN


def _same(case: Case) -> bool:
    wanted = reference(LAYERS, case.step)
    assert wanted.result is not None

    def on_rank(rank: ToyRank) -> bool:
        out = rank.finish(rank.run(rank.start()))
        return torch.allclose(out, wanted.rows(wanted.result, rank.seat.own), rtol=2e-5, atol=2e-5)

    try:
        return all(on_ranks(case.spec, LAYERS, case.step, on_rank))
    except AssertionError:
        return False


def test_the_toy_sees_a_row_in_another_rows_place() -> None:
    """Rows carry something of their own, so that the numeric tests see any other order."""
    step = TP2.step
    wanted = reference(LAYERS, step)
    tokens = wanted.tokens
    assert len({tuple(row) for row in embedding(tokens).tolist()}) == len(tokens)
    assert wanted.result is not None
    assert not torch.allclose(wanted.result, wanted.result.flip(0))
