"""Captures and access to the stream on a mesh: the right rows, each sum once, the output as it was.

Residuals are compared with those of the stack by hand, before each stage.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from layline.boundary import StageKind
from layline.boundary.layout import BatchVariant, Layout
from layline.boundary.mesh import CpRows
from layline.boundary.planning.moves import batch_kinds
from layline.boundary.planning.walk import enters_partial
from layline.boundary.policy import ReductionPolicy
from layline.boundary.residual import batch
from layline.boundary.residual.stream import OwedOutput, StreamState
from layline.boundary.rows import batch_kind
from layline.errors import StreamError
from layline.topology import Topology
from support.simulated_cases import Case, mesh_spec, with_policies
from support.toy_mesh import HIDDEN, Reference, Token, ToyRank, extra, on_ranks, reference

LAYERS = ("attention", "ffn", "attention", "ffn")
MESHES = [
    Topology(tp=2),
    Topology(tp=4, attn_dp=2),
    Topology(tp=2, attn_dp=2),
    Topology(tp=2, attn_cp=2),
    Topology(tp=8, attn_dp=2, attn_cp=2),
    Topology(tp=2, dense_tp=1),
    Topology(tp=4, attn_dp=2, dense_tp=1),
]


def name_of(mesh: Topology) -> str:
    dense = "" if mesh.dense_tp == mesh.tp else " dense 1"
    return f"{mesh.attn_dp}x{mesh.attn_cp}x{mesh.attn_tp}{dense}"


def cases_on(mesh: Topology) -> Iterator[Case]:
    for spec in with_policies(mesh_spec(mesh)):
        if spec.policy in (ReductionPolicy.AR, ReductionPolicy.RS_RSV):
            for kind in batch_kinds(spec):
                yield Case(spec, kind)


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-5)


class Collector:
    """An auxiliary-output collector: it copies what it is not given for good."""

    def __init__(self) -> None:
        self.values: list[torch.Tensor] = []
        self.owned: list[bool] = []
        self.storages: list[int] = []

    def capture(self, value: torch.Tensor, *, owned: bool = False) -> None:
        self.owned.append(owned)
        self.storages.append(value.untyped_storage().data_ptr())
        self.values.append(value if owned else value.clone())


def check_rows(
    found: torch.Tensor, wanted: Reference, stage: int, tokens: list[Token | None]
) -> None:
    """``found`` is the residual before ``stage`` on the rows of these tokens."""
    assert found.shape == (len(tokens), HIDDEN)
    real = [row for row, token in enumerate(tokens) if token is not None]
    expected = wanted.rows(wanted.residuals[stage], [t for t in tokens if t is not None])
    close(found[real], expected)


def producer_rows(rank: ToyRank, stage: int) -> Layout:
    """The rows that the stage before hands on; at the stack's entry attention's."""
    if stage == 0:
        return rank.ground.attention
    return rank.stages[stage - 1].plan.path(rank.batch.kind).decl.output.handoff


def run_stages(
    rank: ToyRank, prepare: Callable[[int, Any], torch.Tensor], partial: bool
) -> torch.Tensor:
    """The whole stack, each input made by ``prepare(stage, handle)``."""
    hidden: Any = rank.start(partial=partial)
    for stage in range(len(rank.names)):
        hidden = rank.leave(stage, prepare(stage, hidden))
    return rank.finish(hidden)


def unfused(rank: ToyRank) -> Callable[[int, Any], torch.Tensor]:
    """Completes an attention's pending output before preparing its input."""

    def prepare(stage: int, hidden: Any) -> torch.Tensor:
        boundary = rank.stages[stage]
        if boundary.declaration.kind is StageKind.ATTN:
            hidden = batch.complete_output(hidden, rank.batch)
        x: torch.Tensor = boundary.prepare(hidden, rank.batch)
        return x

    return prepare


@pytest.mark.parametrize("names", [LAYERS, ("attention", "mixer", "ffn", "mixer")], ids=str)
@pytest.mark.parametrize("mesh", MESHES, ids=name_of)
def test_captures_on_the_producers_and_on_the_computes_rows(
    mesh: Topology, names: tuple[str, ...]
) -> None:  # boundary G22, G73, G74, G75, G76
    """Every attention's input: the residual so far, and the output bit by bit as without it."""
    for case in cases_on(mesh):
        wanted = reference(names, case.step)
        partial = enters_partial(case.spec, case.kind)

        def on_rank(rank: ToyRank, wanted: Any = wanted, partial: bool = partial) -> None:
            collectors: dict[int, tuple[Collector, Collector]] = {}

            def capturing(stage: int, hidden: Any) -> torch.Tensor:
                boundary = rank.stages[stage]
                if boundary.declaration.kind is not StageKind.ATTN:
                    plain: torch.Tensor = boundary.prepare(hidden, rank.batch)
                    return plain
                near, far = collectors[stage] = Collector(), Collector()
                x: torch.Tensor = boundary.prepare(
                    hidden,
                    rank.batch,
                    capture_output=near.capture,
                    captured_last_layer_outputs=far,
                )
                return x

            out = run_stages(rank, capturing, partial)
            again = run_stages(rank, unfused(rank), partial)
            assert torch.equal(out, again), "a capture changed the output"
            for stage, (near, far) in collectors.items():
                compute = rank.stages[stage].plan.path(rank.batch.kind).decl.input.layout
                here = rank.seat.on(producer_rows(rank, stage), rank.ground)
                there = rank.seat.on(compute, rank.ground)
                (value,) = near.values
                check_rows(value, wanted, stage, here)
                (value,) = far.values
                check_rows(value, wanted, stage, there)
                assert far.owned == [False]

        on_ranks(case.spec, names, case.step, on_rank)


def test_who_owns_a_capture() -> None:  # boundary G75
    """Storage that nothing else writes: gathered, summed for the capture, or certified."""
    plain = Case(mesh_spec(Topology(tp=2)), batch_kind(BatchVariant.ORDINARY))
    scattered = Case(mesh_spec(Topology(tp=2)), batch_kind(BatchVariant.INPUT_SCATTERED))
    for case, names, stage, wanted in (
        (plain, ("ffn", "attention", "ffn"), 1, True),  # The FFN's read certifies it.
        (plain, ("ffn", "attention"), 1, False),  # No stage follows here.
        (plain, ("ffn", "attention", "writing read ffn"), 1, False),
        (scattered, ("ffn", "attention"), 1, True),  # Gathered.
        (plain, ("attention", "ffn"), 0, False),  # The input itself.
    ):

        def on_rank(
            rank: ToyRank, stage: int = stage, wanted: bool = wanted, case: Case = case
        ) -> None:
            collector = Collector()
            hidden = rank.run(rank.start(), last=stage)
            rank.stages[stage].prepare(hidden, rank.batch, capture_output=collector.capture)
            assert collector.owned == [wanted]
            held = rank.batch.residual_stream.residual.untyped_storage().data_ptr()
            if wanted and case is plain:
                assert collector.storages == [held], "adopted without a copy"

        on_ranks(case.spec, names, case.step, on_rank)


def test_captures_survive_a_norm_that_writes_into_the_residual() -> None:  # boundary G75
    case = Case(mesh_spec(Topology(tp=2)), batch_kind(BatchVariant.ORDINARY))
    names = ("ffn", "attention", "writing read ffn")
    wanted = reference(names, case.step)

    def on_rank(rank: ToyRank) -> None:
        collector = Collector()
        hidden = rank.run(rank.start(), last=1)
        x = rank.stages[1].prepare(hidden, rank.batch, capture_output=collector.capture)
        hidden = rank.leave(1, x)
        rank.stages[2].prepare(hidden, rank.batch)
        check_rows(collector.values[0], wanted, 1, list(rank.seat.own))

    on_ranks(case.spec, names, case.step, on_rank)


def test_a_capture_of_a_partial_embedding_is_its_sum() -> None:  # boundary G22, G73
    case = Case(mesh_spec(Topology(tp=4)), batch_kind(BatchVariant.INPUT_SCATTERED))
    wanted = reference(LAYERS, case.step)

    def on_rank(rank: ToyRank) -> None:
        collector = Collector()
        hidden = rank.start(partial=True)
        x = rank.stages[0].prepare(hidden, rank.batch, capture_output=collector.capture)
        check_rows(collector.values[0], wanted, 0, list(rank.seat.own))
        assert collector.owned == [True]
        out = rank.finish(rank.run(rank.leave(0, x), first=1))
        assert wanted.result is not None
        close(out, wanted.rows(wanted.result, rank.seat.own))

    on_ranks(case.spec, LAYERS, case.step, on_rank)


@pytest.mark.parametrize("mesh", MESHES, ids=name_of)
def test_a_post_residual_addition_is_captured_without(mesh: Topology) -> None:
    # boundary G70, G73, G75
    """The capture is owned and shows the sum before the addition; the stack goes on with it."""
    names = ("attention", "ffn", "attention", "attention", "ffn")
    for case in cases_on(mesh):
        wanted = reference(names, case.step)
        with_extra = reference(names, case.step, extras=(1, 2))
        partial = enters_partial(case.spec, case.kind)

        def on_rank(
            rank: ToyRank,
            wanted: Any = wanted,
            with_extra: Any = with_extra,
            partial: bool = partial,
        ) -> None:
            hidden: Any = rank.run(rank.start(partial=partial), last=2)
            for stage in (2, 3):
                collector = Collector()
                tokens = rank.seat.on(producer_rows(rank, stage), rank.ground)
                addition = torch.zeros(len(tokens), HIDDEN)
                real = [row for row, token in enumerate(tokens) if token is not None]
                addition[real] = extra(stage - 1, [t for t in tokens if t is not None])
                x = rank.stages[stage].prepare(
                    hidden,
                    rank.batch,
                    capture_output=collector.capture,
                    post_residual_addition=addition,
                )
                assert collector.owned == [True]
                if stage == 2:
                    check_rows(collector.values[0], wanted, stage, tokens)
                hidden = rank.leave(stage, x)
            out = rank.finish(rank.run(hidden, first=4))
            assert with_extra.result is not None
            close(out, with_extra.rows(with_extra.result, rank.seat.own))

        on_ranks(case.spec, names, case.step, on_rank)


def test_an_addition_of_other_rows_is_refused() -> None:
    case = Case(mesh_spec(Topology(tp=2)), batch_kind(BatchVariant.ORDINARY))

    def on_rank(rank: ToyRank) -> None:
        hidden = rank.run(rank.start(), last=2)
        one = torch.zeros(1, HIDDEN)
        with pytest.raises(StreamError, match=r"shape \[1, 8\]; expected \[3, 8\]"):
            rank.stages[2].prepare(hidden, rank.batch, post_residual_addition=one)

    on_ranks(case.spec, LAYERS, case.step, on_rank)

    def weighted(rank: ToyRank) -> None:
        hidden = rank.run(rank.start(), last=1)
        with pytest.raises(NotImplementedError, match="requires a plain residual update"):
            rank.stages[1].prepare(hidden, rank.batch, post_residual_addition=torch.zeros(3, 8))

    on_ranks(case.spec, ("weighted ffn", "attention"), case.step, weighted)


@pytest.mark.parametrize("mesh", MESHES, ids=name_of)
def test_capture_output_keeps_its_convention(mesh: Topology) -> None:  # boundary G22, G66, G67
    """A dynamic sum is finished on the output itself, a declared one on a copy."""
    for case in cases_on(mesh):
        wanted = reference(LAYERS, case.step)
        partial = enters_partial(case.spec, case.kind)

        def on_rank(rank: ToyRank, wanted: Any = wanted, partial: bool = partial) -> None:
            hidden: Any = rank.start(partial=partial)
            for stage in range(len(LAYERS)):
                hidden = rank.run(hidden, first=stage, last=stage + 1)
                boundary, before = rank.stages[stage], hidden
                stream = rank.batch.residual_stream
                if stream.state is StreamState.WRITTEN:
                    continue
                owed, rows = stream.contribution.owed, stream.contribution.rows
                hidden, shown = boundary.capture_output(hidden, rank.batch)
                check_rows(shown, wanted, stage + 1, rank.seat.on(rows, rank.ground))
                shown.fill_(float("nan"))
                assert stream.state is StreamState.PENDING
                if owed is None or owed.declared:
                    assert hidden is before
                    assert stream.contribution.owed is owed
                else:
                    assert isinstance(hidden, torch.Tensor)
                    assert isinstance(before, OwedOutput)
            out = rank.finish(hidden)
            assert wanted.result is not None
            close(out, wanted.rows(wanted.result, rank.seat.own))

        on_ranks(case.spec, LAYERS, case.step, on_rank)


@pytest.mark.parametrize("mesh", MESHES, ids=name_of)
@pytest.mark.parametrize("stage", [0, 1])
def test_extra_contributions_are_added_once(mesh: Topology, stage: int) -> None:  # boundary G70
    """After the sum, on the output's rows; the update stays pending."""
    for case in cases_on(mesh):
        wanted = reference(LAYERS, case.step, extras=(stage,))
        partial = enters_partial(case.spec, case.kind)

        def on_rank(rank: ToyRank, wanted: Any = wanted, partial: bool = partial) -> None:
            hidden = rank.run(rank.start(partial=partial), last=stage + 1)
            rows = rank.batch.residual_stream.contribution.rows
            tokens = rank.seat.on(rows, rank.ground)
            real = [row for row, token in enumerate(tokens) if token is not None]
            more = torch.zeros(len(tokens), HIDDEN)
            more[real] = extra(stage, [t for t in tokens if t is not None])
            hidden = batch.add_to_output(hidden, rank.batch, more)
            assert rank.batch.residual_stream.state is StreamState.PENDING
            out = rank.finish(rank.run(hidden, first=stage + 1))
            assert wanted.result is not None
            close(out, wanted.rows(wanted.result, rank.seat.own))

        on_ranks(case.spec, LAYERS, case.step, on_rank)


@pytest.mark.parametrize("mesh", MESHES, ids=name_of)
def test_fold_and_go_on(mesh: Topology) -> None:  # boundary G22, G61, G69
    """Between any two stages, wherever output and residual are; the next stage only reads."""
    for case in cases_on(mesh):
        wanted = reference(LAYERS, case.step)
        partial = enters_partial(case.spec, case.kind)

        def on_rank(rank: ToyRank, wanted: Any = wanted, partial: bool = partial) -> None:
            for stage in (1, 2, 3):
                hidden = rank.run(rank.start(partial=partial), last=stage)
                rows = rank.batch.residual_stream.contribution.rows
                folded = batch.fold(hidden, rank.batch)
                check_rows(folded, wanted, stage, rank.seat.on(rows, rank.ground))
                assert rank.batch.residual_stream.state is StreamState.WRITTEN
                folded = batch.written(folded, rank.batch)
                out = rank.finish(rank.run(folded, first=stage))
                assert wanted.result is not None
                close(out, wanted.rows(wanted.result, rank.seat.own))
            for leave in (rank.finish, lambda folded: batch.take_output(folded, rank.batch)):
                hidden = rank.run(rank.start(partial=partial))
                out = leave(batch.fold(hidden, rank.batch))
                ends = wanted.result if leave == rank.finish else wanted.residuals[-1]
                assert ends is not None
                close(out, wanted.rows(ends, rank.seat.own))
                assert rank.batch.residual_stream is None

        on_ranks(case.spec, LAYERS, case.step, on_rank)


@pytest.mark.parametrize("names", [LAYERS, ("ffn", "attention"), ("ffn", "mixer")], ids=str)
@pytest.mark.parametrize("mesh", MESHES, ids=name_of)
def test_the_final_norms_capture(mesh: Topology, names: tuple[str, ...]) -> None:  # boundary G72
    """Borrowed, and what the norm's own kernel made of output and residual."""
    for case in cases_on(mesh):
        wanted = reference(names, case.step)
        partial = enters_partial(case.spec, case.kind)

        def on_rank(rank: ToyRank, wanted: Any = wanted, partial: bool = partial) -> None:
            collector = Collector()
            hidden = rank.run(rank.start(partial=partial))
            norm = Recording()
            rank.finish_with(hidden, norm, capture_output=collector.capture)
            assert collector.owned == [False]
            assert len(norm.residuals) == (1 if collector.values[0].shape[0] else 0)
            for made in norm.residuals:
                torch.testing.assert_close(
                    collector.values[0], made, rtol=0, atol=0, equal_nan=True
                )
            sliced = rank.ground.variant is BatchVariant.SEQUENCE_PARALLEL
            tokens = rank.seat.sliced if sliced else list(rank.seat.own)
            check_rows(collector.values[0], wanted, len(names), tokens)

        on_ranks(case.spec, names, case.step, on_rank)


class Recording:
    """A norm that keeps the residuals it made or was given."""

    def __init__(self) -> None:
        self.residuals: list[torch.Tensor] = []

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.residuals.append(x)
        return x

    def add_norm(self, output: torch.Tensor, residual: torch.Tensor) -> Any:
        self.residuals.append(output + residual)
        return self.residuals[-1], self.residuals[-1]


def test_equal_shards_of_a_prompt_that_does_not_divide() -> None:  # boundary G26
    """Five tokens over two CP ranks, the last shard short: capture, fold and final norm."""
    spec = dataclasses.replace(mesh_spec(Topology(tp=2, attn_cp=2)), cp_rows=CpRows.EQUAL)
    case = Case(spec, batch_kind(BatchVariant.CONTEXT_PARALLEL))
    step = dataclasses.replace(case.step, counts=((3, 2),))
    wanted = reference(LAYERS, step)

    def on_rank(rank: ToyRank) -> None:
        out = rank.finish(rank.run(rank.start()))
        assert wanted.result is not None
        close(out, wanted.rows(wanted.result, rank.seat.own))
        kinds = [record.kind.value for record in rank.recorder.records]
        assert kinds == ["all-gather", "reduce-scatter"] * 2

    on_ranks(spec, LAYERS, step, on_rank)
