"""The engine over pipeline stages on CUDA devices: answers as on one stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from layline import LLM, SamplingParams
from support.pipelined import count, watched
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


def answers(
    folder: Path, params: SamplingParams, requests: int = 9, **flags: Any
) -> tuple[list[list[int]], int, int]:
    """Ids of requests of uneven lengths, the steps that were split, and the tokens fed unread."""
    prompts = [[3 + (7 * i + j) % 150 for j in range(5 + 9 * i)] for i in range(requests)]
    with LLM(str(folder), device="cuda", dtype="float32", **flags) as llm:
        watch = watched(llm)
        found = [list(each.token_ids) for each in llm.generate(prompts, params)]
        assert not flags or watch.most == min(requests + 1, 3)
        return found, count(llm, "batch_splits") if flags else 0, watch.fed


@pytest.mark.parametrize("devices", DEVICES, ids=str)
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True),
        SamplingParams(temperature=0.9, seed=5, top_k=20, max_tokens=16, ignore_eos=True),
        SamplingParams(temperature=0.0, repetition_penalty=1.3, max_tokens=16, ignore_eos=True),
    ],
    ids=["greedy", "seeded", "history"],
)
@pytest.mark.parametrize("requests", [1, 9])
def test_answers_are_those_of_one_stage(
    folder: Path, devices: list[int], params: SamplingParams, requests: int
) -> None:
    """Ids go from the last stage's device to the first's: the host plans a step before it reads."""
    alone, _, _ = answers(folder, params, requests)
    staged, splits, fed = answers(folder, params, requests, pp_stages=2, pp_devices=devices)
    assert staged == alone
    assert splits >= 16
    assert fed > 8 * requests
