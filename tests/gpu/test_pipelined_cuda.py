"""The engine over pipeline stages on CUDA devices: answers as on one stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from layline import LLM, SamplingParams
from support.pipelined import count
from support.tiny import save_tiny

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")
DEVICES = [
    pytest.param([0, 0]),
    pytest.param([0, 1], marks=needs_two),
    pytest.param([1, 0], marks=needs_two),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny(path, "Llama", num_hidden_layers=4, max_position_embeddings=256)
    return path


def answers(folder: Path, params: SamplingParams, **flags: Any) -> tuple[list[list[int]], int]:
    """Ids of nine requests of uneven lengths, and how many steps were split."""
    prompts = [[3 + (7 * i + j) % 150 for j in range(5 + 9 * i)] for i in range(9)]
    with LLM(str(folder), device="cuda", dtype="float32", **flags) as llm:
        found = [list(each.token_ids) for each in llm.generate(prompts, params)]
        return found, count(llm, "batch_splits") if flags else 0


@pytest.mark.parametrize("devices", DEVICES, ids=str)
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True),
        SamplingParams(temperature=0.9, seed=5, top_k=20, max_tokens=16, ignore_eos=True),
    ],
    ids=["greedy", "seeded"],
)
def test_answers_are_those_of_one_stage(
    folder: Path, devices: list[int], params: SamplingParams
) -> None:
    alone, _ = answers(folder, params)
    staged, splits = answers(folder, params, pp_stages=2, pp_devices=devices)
    assert staged == alone
    assert splits > 16
