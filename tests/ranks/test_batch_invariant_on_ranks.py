"""``batch_invariant`` on two ranks: the same bits for a row in steps of quite another make."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from layline.config import EngineConfig
from layline.engine.step import IDLE, RankStep
from layline.layers.invariance import same_bits
from layline.layers.spans import Phase
from support.mesh import TextSequence, hand_written_steps, rank_step, run_on_mesh
from support.mesh_model import MeshModel, check_rows

MESHES: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2},
    "tp2, whole ffns": {"tp": 2, "dense_tp": 1},
    "dp2": {"tp": 2, "attn_dp": 2},
    "dp2, sum-len": {"tp": 2, "attn_dp": 2, "dp_padding": "sum-len", "boundary_reduction": "rsv"},
    "cp2": {"tp": 2, "attn_cp": 2},
    "cp2, zigzag": {"tp": 2, "attn_cp": 2, "cp_layout": "zigzag"},
}
Rows = dict[tuple[tuple[int, ...], int], torch.Tensor]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> MeshModel:
    return MeshModel(tmp_path_factory.mktemp("llama"), "Llama")


def one_by_one(sequences: list[TextSequence], attn_dp: int) -> list[list[RankStep]]:
    """Each sequence alone: all of the first in one step, the others' beginning and then decodes."""
    steps = []
    for number, one in enumerate(sequences):
        length = len(one.ids)
        counts = [length] if number == 0 else [5] + [1] * (length - 5)
        start = 0
        for count in counts:
            phase = Phase.DECODE if start else Phase.PREFILL
            step = [IDLE] * attn_dp
            step[one.attn_dp] = rank_step(phase, [(one, start, count)])
            steps.append(step)
            start += count
    return steps


def computed(
    model: MeshModel, mesh: dict[str, Any], steps: list[list[RankStep]], invariant: bool
) -> list[Rows]:
    """Each rank's logits by sequence and position."""
    engine = EngineConfig(
        model=model.path, dtype="float32", threads=1, batch_invariant=invariant, **mesh
    )
    runs = run_on_mesh(engine, steps)
    check_rows(model, runs, model.sequences(mesh.get("attn_dp", 1)))
    return [
        {
            row: logits
            for rows, scores in zip(run.rows, run.logits, strict=True)
            for row, logits in zip(rows, scores, strict=True)
        }
        for run in runs
    ]


def differing(model: MeshModel, mesh: dict[str, Any], invariant: bool) -> tuple[int, int]:
    """Rows whose bits are not the same both ways, and rows."""
    attn_dp = mesh.get("attn_dp", 1)
    sequences = model.sequences(attn_dp)
    together = computed(model, mesh, hand_written_steps(sequences, attn_dp), invariant)
    alone: Rows = {}
    for rank in computed(model, mesh, one_by_one(sequences, attn_dp), invariant):
        for row, logits in rank.items():
            assert not invariant or same_bits(alone.setdefault(row, logits), logits)
            alone[row] = logits
    pairs = [(rank[row], alone[row]) for rank in together for row in rank]
    return sum(not same_bits(one, other) for one, other in pairs), len(pairs)


@pytest.mark.parametrize("mesh", MESHES)
def test_rows_are_the_same_in_other_steps(model: MeshModel, mesh: str) -> None:
    wrong, rows = differing(model, MESHES[mesh], invariant=True)
    assert rows > 16
    assert wrong == 0


def test_processes_compute_the_bits_of_simulated_ranks(model: MeshModel) -> None:
    engine = EngineConfig(model=model.path, dtype="float32", threads=1, batch_invariant=True, tp=2)
    steps = hand_written_steps(model.sequences(1), 1)
    found = [run_on_mesh(engine, steps, backend) for backend in ("threads", "gloo")]
    for thread, process in zip(*found, strict=True):
        for one, other in zip(thread.logits, process.logits, strict=True):
            assert same_bits(one, other)


@pytest.mark.parametrize("mesh", ["tp2", "dp2", "cp2"])
def test_without_it_they_are_not(model: MeshModel, mesh: str) -> None:
    wrong, _ = differing(model, MESHES[mesh], invariant=False)
    assert wrong > 0
