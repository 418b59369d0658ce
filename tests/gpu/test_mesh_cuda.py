"""Tensor parallelism and attention DP on a pair of GPUs over NCCL."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from layline.config import EngineConfig
from support.mesh import hand_written_steps, run_on_mesh
from support.mesh_model import MeshModel, check_rows
from support.model import smollm2_path

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices"),
]
MESHES = {"tp2": {"tp": 2}, "dp2": {"tp": 2, "attn_dp": 2}, "cp2": {"tp": 2, "attn_cp": 2}}


@pytest.mark.parametrize("policy", ["ar", "rs+rsv"])
@pytest.mark.parametrize("mesh", MESHES)
def test_two_gpus_equal_transformers(tmp_path: Path, mesh: str, policy: str) -> None:
    """In float32, every row of ragged and idle steps."""  # boundary G20
    model = MeshModel(tmp_path, "Llama")
    for padding in ("max-len", "sum-len"):
        engine = EngineConfig(
            model=model.path,
            device="cuda",
            dtype="float32",
            boundary_reduction=policy,
            dp_padding=padding,
            **MESHES[mesh],
        )
        sequences = model.sequences(engine.attn_dp)
        steps = hand_written_steps(sequences, engine.attn_dp)
        runs = run_on_mesh(engine, steps, "nccl")
        check_rows(model, runs, sequences)
        assert all(run.records for run in runs)


def test_the_real_model_answers_on_two_gpus() -> None:
    """Attention DP 2, which SmolLM2's nine heads allow, continues as one GPU does."""
    command = [sys.executable, "-m", "layline", "generate", "--model", smollm2_path()]
    command += ["--device", "cuda", "--dtype", "float32", "--json", "--max-tokens", "24"]
    answers = []
    for flags in ([], ["--tp", "2", "--attn-dp", "2"]):
        done = subprocess.run(
            [*command, *flags, "The capital of France is"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        answers.append(json.loads(done.stdout))
    assert answers[0]["token_ids"] == answers[1]["token_ids"]
    assert len(answers[0]["token_ids"]) == 24
