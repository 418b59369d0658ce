"""8-bit keys and values divided over ranks: what one rank computes, every mesh computes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from layline.comm.groups import CollectiveKind
from layline.config import EngineConfig
from layline.engine.planned import open_plan
from layline.topology import GroupName
from support.mesh import MeshRun, TextSequence, hand_written_steps, run_on_mesh
from support.mesh_model import MeshModel

KV_DTYPES = pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
MESHES: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2},
    "tp4, replicated heads": {"tp": 4},
    "dp2": {"tp": 2, "attn_dp": 2},
    "cp2": {"tp": 2, "attn_cp": 2},
    "cp2 zigzag": {"tp": 2, "attn_cp": 2, "cp_layout": "zigzag"},
    "dp2 cp2 tp2": {"tp": 8, "attn_dp": 2, "attn_cp": 2},
}
# FP32 sums in another order, of the largest logit; 8-bit rounding itself moves logits by 0.01.
ORDER_OFF = 1e-4
KV_HEADS, HEAD_DIM = 2, 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> MeshModel:
    return MeshModel(tmp_path_factory.mktemp("llama"), "Llama")


Logits = dict[tuple[tuple[int, ...], int], torch.Tensor]


def run(
    model: MeshModel,
    kv_dtype: str,
    backend: str = "threads",
    sequences: list[TextSequence] | None = None,
    **mesh: Any,
) -> list[MeshRun]:
    engine = EngineConfig(model=model.path, dtype="float32", kv_dtype=kv_dtype, **mesh)
    attn_dp = mesh.get("attn_dp", 1)
    steps = hand_written_steps(sequences or model.sequences(attn_dp), attn_dp)
    return run_on_mesh(engine, steps, backend)


def by_row(model: MeshModel, runs: list[MeshRun]) -> list[Logits]:
    """Each rank's logits by token ids and position."""
    ids = {tuple(one.blocks): one.ids for one in model.sequences(2)}
    found = []
    for each in runs:
        rows = [row for step in each.rows for row in step]
        logits = [row for step in each.logits for row in step]
        found.append(
            {
                (ids[blocks], position): row
                for (blocks, position), row in zip(rows, logits, strict=True)
            }
        )
    return found


def alone(model: MeshModel, kv_dtype: str) -> Logits:
    """What one rank computes for all sequences, two at a time."""
    first, second, third = (replace(one, attn_dp=0) for one in model.sequences(2))
    pairs = ([first, second], [third, second])
    found = [by_row(model, run(model, kv_dtype, sequences=pair)) for pair in pairs]
    return {key: row for (logits,) in found for key, row in logits.items()}


@KV_DTYPES
@pytest.mark.parametrize("mesh", MESHES)
def test_every_mesh_equals_one_rank(model: MeshModel, kv_dtype: str, mesh: str) -> None:
    wanted = alone(model, kv_dtype)
    compared = rounded = 0
    for rank in by_row(model, run(model, kv_dtype, **MESHES[mesh])):
        for key in rank.keys() & wanted.keys():
            scale = float(wanted[key].abs().max())
            assert float((rank[key] - wanted[key]).abs().max()) < ORDER_OFF * scale
            ids, position = key
            exact = model.logits[model.ids.index(ids), position]
            rounded += float((wanted[key] - exact).abs().max()) > 10 * ORDER_OFF * scale
            compared += 1
    assert compared > 8
    assert rounded > compared / 2, "keys and values are not rounded"


@KV_DTYPES
def test_context_ranks_exchange_what_is_cached(model: MeshModel, kv_dtype: str) -> None:
    mesh = MESHES["cp2"]
    (plan,) = [
        one
        for one in open_plan(
            model.path, {**mesh, "kv_dtype": kv_dtype}, "context-parallel"
        ).collectives()
        if one.group is GroupName.ATTN_CP and one.kind is CollectiveKind.ALL_GATHER
    ][:1]
    assert plan.columns == 2 * KV_HEADS * (HEAD_DIM + 2)
    gathers = [
        record
        for record in run(model, kv_dtype, **mesh)[0].records
        if record.group is GroupName.ATTN_CP
        and record.kind is CollectiveKind.ALL_GATHER
        and record.in_compute
    ]
    assert gathers
    for record in gathers:
        assert record.columns == plan.columns
        assert record.payload_bytes == record.rows * plan.columns, "a byte for each column"


def test_real_processes(model: MeshModel) -> None:
    simulated = run(model, "fp8", **MESHES["cp2"])
    real = run(model, "fp8", "gloo", **MESHES["cp2"])
    for thread, process in zip(simulated, real, strict=True):
        assert thread.records == process.records
        assert thread.records
        for one, other in zip(thread.logits, process.logits, strict=True):
            assert float((one - other).abs().max()) < ORDER_OFF * float(other.abs().max())
