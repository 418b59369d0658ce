"""Whole models on simulated ranks: every row's logits equal transformers', whatever the mesh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from layline.config import EngineConfig
from support.mesh import MeshRun, hand_written_steps, poisoned_memory, run_on_mesh
from support.mesh_model import MeshModel, check_rows

MESHES = {
    "1x1x2": {"tp": 2},
    "1x1x4": {"tp": 4},
    "2x1x1": {"tp": 2, "attn_dp": 2},
    "2x1x2": {"tp": 4, "attn_dp": 2},
    "4x1x1": {"tp": 4, "attn_dp": 4},
    "1x2x1": {"tp": 2, "attn_cp": 2},
    "1x2x2": {"tp": 4, "attn_cp": 2},
    "2x2x1": {"tp": 4, "attn_dp": 2, "attn_cp": 2},
    "2x2x2": {"tp": 8, "attn_dp": 2, "attn_cp": 2},
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> MeshModel:
    return MeshModel(tmp_path_factory.mktemp("llama"), "Llama")


def run(
    model: MeshModel,
    mesh: dict[str, int],
    backend: str = "threads",
    spec: dict[str, Any] | None = None,
    **options: Any,
) -> list[MeshRun]:
    engine = EngineConfig(model=model.path, dtype="float32", **mesh, **options)
    attn_dp = mesh.get("attn_dp", 1)
    sequences = model.sequences(attn_dp)
    steps = hand_written_steps(sequences, attn_dp)
    runs = run_on_mesh(engine, steps, backend, **(spec or {}))
    check_rows(model, runs, sequences)
    return runs


def test_memory_is_poisoned() -> None:
    with poisoned_memory():
        assert torch.empty(8).isnan().all()
        assert torch.ones(2).new_empty(3).isnan().all()


@pytest.mark.parametrize("policy", ["ar", "rs", "rsv", "rs+rsv"])
@pytest.mark.parametrize("padding", ["max-len", "sum-len"])
@pytest.mark.parametrize("mesh", MESHES)
def test_every_mesh_equals_transformers(
    llama: MeshModel, mesh: str, padding: str, policy: str
) -> None:  # boundary G20
    run(llama, MESHES[mesh], dp_padding=padding, boundary_reduction=policy)


@pytest.mark.parametrize("mesh", ["1x1x2", "2x1x1", "2x1x2", "1x2x1", "2x2x1"])
def test_local_ffns(llama: MeshModel, mesh: str) -> None:  # boundary G30
    for padding in ("max-len", "sum-len"):
        run(llama, {**MESHES[mesh], "dense_tp": 1}, dp_padding=padding)


@pytest.mark.parametrize("policy", ["ar", "rs"])
@pytest.mark.parametrize("tp", [2, 4])
def test_divided_rows(llama: MeshModel, tp: int, policy: str) -> None:  # boundary G19, G28, G29
    run(llama, {"tp": tp}, sequence_parallel=True, boundary_reduction=policy)
    run(llama, {"tp": tp}, input_scattered=True, boundary_reduction=policy)


@pytest.mark.parametrize("mesh", ["1x2x1", "1x2x2", "2x2x1"])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_context_layouts(llama: MeshModel, mesh: str, layout: str) -> None:  # boundary G25, G27
    run(llama, MESHES[mesh], cp_layout=layout)


FAMILIES = {
    "mistral-window": ("Mistral", {"sliding_window": 5}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "llama-tied-biases": (
        "Llama",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "llama-mqa": ("Llama", {"num_key_value_heads": 1}),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(tmp_path: Path, family: str) -> None:
    name, changes = FAMILIES[family]
    model = MeshModel(tmp_path, name, **changes)
    for mesh in ("1x1x4", "2x1x2", "1x2x2"):
        run(model, MESHES[mesh])


@pytest.mark.parametrize("mesh", ["1x1x2", "2x1x1", "1x2x1", "2x1x2"])
def test_real_processes(llama: MeshModel, mesh: str) -> None:  # boundary G20, G21
    simulated = run(llama, MESHES[mesh])
    real = run(llama, MESHES[mesh], backend="gloo")
    for thread, process in zip(simulated, real, strict=True):
        assert thread.records == process.records
        assert thread.records
