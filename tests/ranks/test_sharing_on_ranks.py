"""Shared blocks, growing tables and preemption on ranks in other processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from layline import LLM, SamplingParams
from layline.engine.scheduler import BLOCK_SIZE
from support.tiny import save_tiny

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
BASE = [5 + 7 * n % 150 for n in range(37)]
PROMPTS = [BASE, BASE[:32], [*BASE[:20], 9, 9, 9], [3], [44, 2, 8, 100, 17, 61], BASE, BASE[:17]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny(path, "Llama", max_position_embeddings=96)
    return path


@pytest.mark.parametrize(
    "mesh",
    [{"tp": 2}, {"tp": 2, "attn_dp": 2}, {"tp": 2, "attn_cp": 2}],
    ids="-".join,
)
def test_answers_do_not_change_with_shared_and_lost_blocks(
    directory: Path, mesh: dict[str, Any]
) -> None:
    alone = LLM(str(directory), threads=1, prefix_cache=False)
    wanted = [output.token_ids for output in alone.generate(PROMPTS, GREEDY)]
    blocks = 8 if "attn_dp" in mesh else 12
    # Bytes of a token: layers, keys and values, this rank's heads, their size, FP32.
    slot = 3 * 2 * (1 if mesh == {"tp": 2} else 2) * 8 * 4
    memory = (blocks + 1) * BLOCK_SIZE * slot
    with LLM(str(directory), threads=1, kv_memory=memory, prefill_tokens=13, **mesh) as llm:
        for _ in range(2):
            assert [output.token_ids for output in llm.generate(PROMPTS, GREEDY)] == wanted
        stats = llm._engine.stats()
        assert stats.blocks == blocks * mesh.get("attn_dp", 1)
        assert stats.blocks_held == 0
        assert stats.preemptions > 0
        assert stats.prefix_hits > 0
