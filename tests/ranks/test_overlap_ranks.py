"""Overlapped steps on several ranks: who has the sampled ids, and that answers stay the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from layline import LLM, SamplingParams
from layline.boundary.mesh import MeshSpec, make_mesh
from layline.comm.recording import Recorder, record_groups
from layline.comm.simulated import run_ranks
from layline.engine.input_ids import InputIds
from layline.topology import GroupName, Topology
from support.tiny import save_tiny

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
DRAWN = SamplingParams(temperature=1.1, seed=3, max_tokens=24, ignore_eos=True)
BASE = [5 + 7 * n % 150 for n in range(37)]
PROMPTS = [BASE, BASE[:32], [*BASE[:20], 9, 9, 9], [3], [44, 2, 8, 100, 17, 61], BASE, BASE[:17]]


@pytest.mark.parametrize(
    "topology",
    [
        Topology(tp=1),
        Topology(tp=3),
        Topology(tp=2, attn_dp=2),
        Topology(tp=2, attn_cp=2),
        Topology(tp=8, attn_dp=2, attn_cp=2),
    ],
    ids=str,
)
def test_every_rank_is_fed_what_the_first_of_its_attention_drew(topology: Topology) -> None:
    def rank(here: Topology, groups: Any) -> tuple[list[list[int]], int]:
        recorder = Recorder()
        mesh = make_mesh(MeshSpec(topology=here), *record_groups(groups, recorder))
        ids = InputIds(CPU, mesh)
        at = here.coordinates
        drawn = None
        if at.attn_tp == at.attn_cp == 0:
            drawn = torch.tensor([10, 11, 12, -1]) + 100 * at.attn_dp
            drawn[3] = -1
        # A plan is one DP rank's: here the second has other references, or none.
        plans = [[5, -3, -1, 7, -4], [8, 9]] if at.attn_dp == 0 else [[-2], [1, -1]]
        return [ids.of(plan, drawn).tolist() for plan in plans], len(recorder.records)

    for index, (found, exchanges) in enumerate(run_ranks(topology, rank)):
        here = topology.at(index)
        first = here.coordinates.attn_dp == 0
        # A row without a token has no id to look up; what it feeds is of no use.
        assert found == ([[5, 12, 10, 7, 0], [8, 9]] if first else [[111], [1, 110]])
        groups = sum(here.size(name) > 1 for name in (GroupName.ATTN_TP, GroupName.ATTN_CP))
        assert exchanges == groups * (1 if first else 2), "ids that are known need no exchange"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny(path, "Llama", max_position_embeddings=96)
    return path


@pytest.mark.parametrize(
    "mesh",
    [
        {"tp": 2},
        {"tp": 2, "attn_dp": 2},
        {"tp": 2, "attn_cp": 2},
        {"tp": 2, "sequence_parallel": True},
    ],
    ids=str,
)
def test_answers_are_those_without_overlap(directory: Path, mesh: dict[str, Any]) -> None:
    alone = LLM(str(directory), threads=1)
    texts = [output.text for output in alone.generate(PROMPTS, GREEDY)]
    params = [
        replace(GREEDY, stop=(texts[0][5:8],)),
        DRAWN,
        replace(GREEDY, repetition_penalty=1.4, presence_penalty=0.5),
        replace(DRAWN, seed=8, frequency_penalty=0.8, logprobs=2),
        replace(GREEDY, stop=(texts[4][-2:],), include_stop_in_output=True),
        GREEDY,
        replace(GREEDY, max_tokens=1),
    ]
    wanted = alone.generate(PROMPTS, params)
    # Room for few, so that some lose their place while their token is under way.
    heads = 1 if mesh["tp"] > mesh.get("attn_dp", 1) * mesh.get("attn_cp", 1) else 2
    memory = 9 * 16 * 3 * 2 * heads * 8 * 4
    for overlap in (None, False):
        flags = {**mesh, "overlap": overlap, "kv_memory": memory, "prefill_tokens": 13}
        with LLM(str(directory), threads=1, **flags) as llm:
            found = llm.generate(PROMPTS, params)
            assert (llm._engine.num_ahead > 20) == (overlap is None)
            assert llm._engine.stats().preemptions > 0
            assert llm._engine.stats().blocks_held == 0
            assert not llm._engine.has_work
        for ours, theirs in zip(found, wanted, strict=True):
            assert ours.token_ids == theirs.token_ids
            assert ours.text == theirs.text
            assert ours.finish_reason == theirs.finish_reason
