"""A stack cut in two: what to_pp sends, from_pp rebuilds, and each sum runs once."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from layline.boundary import make_stages
from layline.boundary.planning.moves import batch_kinds
from layline.boundary.planning.walk import enters_partial
from layline.boundary.policy import ReductionPolicy
from layline.boundary.residual import batch
from layline.boundary.residual.stream import OwedOutput, StreamState
from layline.errors import StreamError
from layline.topology import Topology
from support.simulated_cases import Case, mesh_spec, with_policies
from support.stacks import STAGES
from support.toy_mesh import ToyRank, norm_of, on_ranks, reference

NAMES = ("attention", "ffn", "mixer", "mixer", "ffn", "attention", "tail ffn")
MESHES = [
    Topology(tp=2),
    Topology(tp=4, attn_dp=2),
    Topology(tp=2, attn_dp=2),
    Topology(tp=4, attn_cp=2),
    Topology(tp=4, attn_dp=2, dense_tp=1),
    Topology(tp=2, dense_tp=1),
]


class Cut:
    """One rank's stack made as two pipeline stages, which know of each other by declarations."""

    def __init__(self, rank: ToyRank, cut: int) -> None:
        items = [(STAGES[name], norm_of(stage)) for stage, name in enumerate(rank.names)]
        first, second = items[:cut], items[cut:]
        before, after = first[-1][0], second[0][0]
        self.rank = rank
        self.sender = make_stages(*first, following=after, mesh=rank.mesh)
        self.receiver = make_stages(*second, previous=before, terminal=True, mesh=rank.mesh)
        rank.stages = (*self.sender, *self.receiver)

    def send(self, partial: bool) -> dict[str, Any]:
        """Run the first part; what crosses."""
        hidden = self.rank.run(self.rank.start(partial=partial), last=len(self.sender))
        tensors = batch.to_pp(hidden, self.rank.batch)
        assert self.rank.batch.residual_stream is None
        assert all(isinstance(tensor, torch.Tensor) for tensor in tensors.values())
        return tensors

    def receive(self, tensors: dict[str, Any]) -> Any:
        """The handle with which the second part goes on, on a batch of its own."""
        old = self.rank.batch
        self.rank.batch = types.SimpleNamespace(residual_stream=None, kind=old.kind, rows=old.rows)
        return self.receiver[0].from_pp(tensors, self.rank.batch)


@pytest.mark.parametrize("cut", range(1, len(NAMES)))
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_cut_stack_equals_the_whole(mesh: Topology, cut: int) -> None:
    # boundary G22, G65, G77, G78, G79
    """At every edge; and not one collective more than without the cut but for moved residuals."""
    for spec in with_policies(mesh_spec(mesh)):
        if spec.policy not in (ReductionPolicy.AR, ReductionPolicy.RS_RSV):
            continue
        for kind in batch_kinds(spec):
            case = Case(spec, kind)
            wanted = reference(NAMES, case.step)
            partial = enters_partial(spec, kind)

            def on_rank(rank: ToyRank, wanted: Any = wanted, partial: bool = partial) -> None:
                rank.finish(rank.run(rank.start(partial=partial)))
                whole = sums(rank)
                rank.recorder.clear()
                pipeline = Cut(rank, cut)
                tensors = pipeline.send(partial)
                out = rank.finish(rank.run(pipeline.receive(tensors), first=cut))
                torch.testing.assert_close(
                    out, wanted.rows(wanted.result, rank.seat.own), rtol=2e-5, atol=2e-5
                )
                assert sums(rank) == whole

            on_ranks(spec, NAMES, case.step, on_rank)


def sums(rank: ToyRank) -> int:
    """How many reductions ran on this rank."""
    return sum(record.kind.value != "all-gather" for record in rank.recorder.records)


def test_what_crosses_as_a_sum_and_what_is_finished_first() -> None:  # boundary G77
    spec = mesh_spec(Topology(tp=2))
    case = Case(spec, batch_kinds(spec)[0])

    def on_rank(rank: ToyRank) -> None:
        kept = Cut(rank, 1)  # attention | ffn: a declared sum.
        tensors = kept.send(partial=False)
        assert sums(rank) == 0
        handle = kept.receive(tensors)
        assert isinstance(handle, OwedOutput)
        rank.run(handle, first=1, last=2)
        assert sums(rank) == 1

    on_ranks(spec, NAMES, case.step, on_rank)

    def finished(rank: ToyRank) -> None:
        done = Cut(rank, 2)  # ffn | mixer: a sum that was left for this batch only.
        tensors = done.send(partial=False)
        assert sums(rank) == 2
        handle = done.receive(tensors)
        assert isinstance(handle, torch.Tensor)
        rank.run(handle, first=2, last=3)
        assert sums(rank) == 2

    on_ranks(spec, NAMES, case.step, finished)


def test_completing_before_to_pp_doubles_a_declared_sum() -> None:  # boundary G78
    """What a model must not do; the guide says so, and this is what it would get."""
    spec = mesh_spec(Topology(tp=2))
    case = Case(spec, batch_kinds(spec)[0])

    def on_rank(rank: ToyRank) -> int:
        pipeline = Cut(rank, 1)
        hidden = rank.run(rank.start(), last=1)
        hidden = batch.complete_output(hidden, rank.batch)
        handle = pipeline.receive(batch.to_pp(hidden, rank.batch))
        rank.run(handle, first=1, last=2)
        return sums(rank)

    assert on_ranks(spec, NAMES, case.step, on_rank) == [2, 2]


def test_a_written_stream_crosses_without_a_residual() -> None:  # boundary G79
    spec = mesh_spec(Topology(tp=2))
    names = ("writing attention", "ffn", "writing ffn", "attention", "ffn")
    for cut in (1, 3):
        for kind in batch_kinds(spec):
            case = Case(spec, kind)
            wanted = reference(names, case.step)
            partial = enters_partial(spec, kind)

            def on_rank(
                rank: ToyRank, cut: int = cut, wanted: Any = wanted, partial: bool = partial
            ) -> None:
                pipeline = Cut(rank, cut)
                tensors = pipeline.send(partial)
                assert set(tensors) == {"hidden_states"}
                handle = pipeline.receive(tensors)
                assert rank.batch.residual_stream.state is StreamState.WRITTEN
                out = rank.finish(rank.run(handle, first=cut))
                torch.testing.assert_close(
                    out, wanted.rows(wanted.result, rank.seat.own), rtol=2e-5, atol=2e-5
                )

            on_ranks(spec, names, case.step, on_rank)


def test_refusals_at_a_cut() -> None:
    spec = mesh_spec(Topology(tp=2))
    case = Case(spec, batch_kinds(spec)[0])
    weighted = ("weighted attention", "ffn")

    def pending(rank: ToyRank) -> None:
        hidden = rank.run(rank.start(), last=1)
        with pytest.raises(NotImplementedError, match="to_pp has no path for a pending Weighted"):
            batch.to_pp(hidden, rank.batch)

    on_ranks(spec, weighted, case.step, pending)

    def unexpected(rank: ToyRank) -> None:
        x = rank.start()
        with pytest.raises(StreamError, match="from_pp needs a producer"):
            rank.stages[0].from_pp({"hidden_states": x}, rank.batch)
        (early,) = make_stages(
            (STAGES["ffn"], norm_of(0)), previous=STAGES["writing attention"], mesh=rank.mesh
        )
        with pytest.raises(StreamError, match="a residual arrived beside an output"):
            early.from_pp({"hidden_states": x, "residual": x}, rank.batch)

    on_ranks(spec, ("attention", "ffn"), case.step, unexpected)
