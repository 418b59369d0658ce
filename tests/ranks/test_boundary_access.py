"""Captures and access to the stream on a mesh: the right rows, each sum once, the output as it was.

Residuals are compared with those of the stack by hand, before each stage.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from layline.boundary.layout import BatchVariant
from layline.boundary.mesh import CpRows
from layline.boundary.planning.walk import enters_partial
from layline.boundary.residual import batch
from layline.boundary.residual.stream import OwedOutput, StreamState
from layline.boundary.rows import batch_kind
from layline.topology import Topology
from support.simulated_cases import Case, mesh_spec
from support.toy_access import (
    LAYERS,
    MESHES,
    cases_on,
    check_rows,
    close,
    name_of,
)
from support.toy_mesh import HIDDEN, ToyRank, extra, on_ranks, reference


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
