"""Every planned path on simulated ranks."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from layline.boundary.layout import BatchVariant
from layline.boundary.mesh import MeshSpec
from layline.boundary.planning.moves import batch_kinds
from layline.boundary.planning.walk import enters_partial
from layline.boundary.rows import batch_kind
from layline.topology import Topology
from support.simulated_cases import (
    SHAPES,
    Case,
    Planner,
    allowed,
    check_every_edge,
    distinct_cases,
    mesh_spec,
    run,
    sampled_cases,
    stacks_of,
)
from support.stacks import STAGES, every_edge


def test_the_stacks_hold_every_edge() -> None:
    names = list(STAGES)
    met = [pair for stack in every_edge(names, 6) for pair in itertools.pairwise(stack)]
    assert sorted(met) == sorted(itertools.product(names, repeat=2))


@pytest.mark.parametrize("ranks", range(1, 9))
def test_every_edge_on_every_mesh_of_up_to_eight_ranks(ranks: int) -> None:
    # boundary G13, G20, G22, G25, G26, G27, G28, G29, G30, G34, G38
    """Each sum once, each row where it is declared to be, on ragged and idle ranks.

    Equal ranks, one rank with a row, and none with any walk each kind of stage once.
    """
    names = ("attention", "mixer", "ffn", "tail ffn", "whole-input mixer", "early reading ffn")
    late = ("weighted attention", "transform ffn", "latent attention", "weighted ffn")
    cases = list(distinct_cases([ranks]))
    assert cases
    for case, planner in cases:
        check_every_edge(case, planner)
        for shape, stack in itertools.product(SHAPES, (names, late)):
            result = run(dataclasses.replace(case, shape=shape), planner, stack)
            assert (result.checked_rows > 0) is (shape != "empty")


def test_meshes_of_up_to_64_ranks() -> None:
    cases = sampled_cases([12, 16, 24, 32, 48, 64])
    assert {case.kind.variant for case in cases} == set(BatchVariant)
    for index, case in enumerate(cases):
        planner = Planner(case.spec)
        stacks = stacks_of(allowed(case.spec))
        result = run(case, planner, stacks[index % len(stacks)])
        assert (result.checked_rows > 0) is (case.shape != "empty")


def test_a_whole_value_may_enter_an_input_scattered_stack() -> None:
    spec = mesh_spec(Topology(tp=4))
    case = Case(spec, batch_kind(BatchVariant.INPUT_SCATTERED))
    planner = Planner(spec)
    assert enters_partial(spec, case.kind)
    for name in STAGES:
        whole = run(case, planner, (name, "ffn"), partial=False)
        assert whole.checked_rows
        part = run(case, planner, (name, "ffn"))
        assert len(part.collectives) == len(whole.collectives) + 1, "the embedding's sum"


def test_batch_kinds_of_a_mesh() -> None:  # boundary G18, G19
    """Sequence-parallel and input-scattered batches exist on plain tensor parallelism only."""
    found: set[BatchVariant] = set()
    for dp, cp, tp, dense in itertools.product((1, 2), (1, 2), (1, 2), (False, True)):
        size = dp * cp * tp
        mesh = Topology(tp=size, attn_dp=dp, attn_cp=cp, dense_tp=1 if dense else size)
        plain = (dp, cp) == (1, 1) and tp > 1 and not dense
        for name in ("sequence_parallel", "input_scattered"):
            if plain:
                kinds = batch_kinds(MeshSpec(topology=mesh, **{name: True}))  # type: ignore[arg-type]
                found |= {kind.variant for kind in kinds}
                continue
            with pytest.raises(ValueError, match=f"{name} needs plain tensor parallelism"):
                MeshSpec(topology=mesh, **{name: True})  # type: ignore[arg-type]
        kinds = batch_kinds(MeshSpec(topology=mesh))
        variants = {kind.variant for kind in kinds}
        assert (BatchVariant.CONTEXT_PARALLEL in variants) is (cp > 1)
    assert found >= {BatchVariant.SEQUENCE_PARALLEL, BatchVariant.INPUT_SCATTERED}
