"""Captures on a mesh: the right rows, each sum once, the output as it was.

Residuals are compared with those of the stack by hand, before each stage.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from layline.boundary import StageKind
from layline.boundary.layout import BatchVariant
from layline.boundary.planning.walk import enters_partial
from layline.boundary.residual import batch
from layline.boundary.rows import batch_kind
from layline.errors import StreamError
from layline.topology import Topology
from support.simulated_cases import Case, mesh_spec
from support.toy_access import (
    LAYERS,
    MESHES,
    Collector,
    cases_on,
    check_rows,
    close,
    name_of,
    producer_rows,
)
from support.toy_mesh import HIDDEN, ToyRank, extra, on_ranks, reference


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
