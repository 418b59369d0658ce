"""Speculation on a mesh: drafts on every rank, and a draft model with a policy of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from layline import LLM, SamplingParams
from layline.boundary.mesh import make_mesh
from layline.boundary.policy import ReductionPolicy
from layline.comm.groups import CollectiveKind
from layline.comm.recording import Recorder, record_groups
from layline.comm.simulated import run_ranks
from layline.config import EngineConfig
from layline.engine.balance import StepRules
from layline.engine.facts import open_model
from layline.engine.model import load_draft, load_part
from layline.engine.speculation.draft_facts import with_draft
from layline.engine.step import MeshStep, RankStep
from layline.layers.spans import SequenceSpan
from layline.topology import GroupName, Topology
from support.speculative import PROMPTS, Checkpoints
from support.tiny import save_tiny

GREEDY = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
DRAWN = [
    SamplingParams(temperature=0.4, seed=number, max_tokens=20, repetition_penalty=1.1, logprobs=1)
    for number in range(len(PROMPTS))
]
MESHES: dict[str, dict[str, Any]] = {
    "tp": {"tp": 2},
    "attention dp": {"tp": 2, "attn_dp": 2},
    "attention cp": {"tp": 2, "attn_cp": 2},
    "sequence parallel": {"tp": 2, "sequence_parallel": True},
}
SHAPE = {"num_attention_heads": 8, "num_key_value_heads": 2}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("ranks"), **SHAPE)


@pytest.fixture(scope="module")
def wanted(checkpoints: Checkpoints) -> list[list[int]]:
    return answers(checkpoints.llm("off"))


def answers(llm: LLM) -> list[list[int]]:
    greedy = llm.generate(PROMPTS, GREEDY)
    return [output.token_ids for output in [*greedy, *llm.generate(PROMPTS, DRAWN)]]


@pytest.mark.parametrize("mesh", MESHES)
def test_a_draft_model_on_every_mesh(
    mesh: str, checkpoints: Checkpoints, wanted: list[list[int]]
) -> None:
    flags = {**MESHES[mesh], **checkpoints.flags("same"), "prefill_tokens": 17}
    with LLM(checkpoints.target, threads=1, **flags) as llm:
        assert answers(llm) == wanted
        stats = llm.stats()
        assert 0 < stats.drafted == stats.accepted
        assert stats.blocks_held == 0


@pytest.mark.parametrize("kind", ["ngram", "near"])
def test_rejected_drafts_on_attention_dp(
    kind: str, checkpoints: Checkpoints, wanted: list[list[int]]
) -> None:
    flags = {**MESHES["attention dp"], **checkpoints.flags(kind)}
    # Bytes of a token: layers, keys and values, heads, their size, FP32; and those of the draft.
    slot = 3 * 2 * 2 * 6 * 4 * (2 if kind == "near" else 1)
    with LLM(
        checkpoints.target, threads=1, kv_memory=9 * 16 * slot, max_model_len=96, **flags
    ) as llm:
        assert answers(llm) == wanted
        stats = llm.stats()
        assert stats.blocks == 16
        assert 0 < stats.accepted < stats.drafted
        assert stats.preemptions > 0
        assert stats.blocks_held == 0


@dataclass(frozen=True)
class Ran:
    """What one rank did of a step of the model, and of the same step of its draft model."""

    policies: tuple[ReductionPolicy, ReductionPolicy]
    scattered: tuple[bool, bool]
    logits: tuple[torch.Tensor, torch.Tensor]


def run_both(engine: EngineConfig, topology: Topology) -> list[Ran]:
    """The same step on both models, on simulated ranks."""
    served, checkpoint = open_model(engine)
    checkpoint.close()
    parts = [
        RankStep(0, (SequenceSpan(0, 4, [1], 4),), (3 + dp, 40, 50, 60), (True,))
        for dp in range(topology.attn_dp)
    ]
    step = MeshStep(tuple(parts), StepRules.of(engine).rows(parts))

    def rank(here: Topology, groups: Any) -> Ran:
        recorder = Recorder()
        ends, compute = record_groups(groups, recorder)
        facts = served.facts.on_rank(here.rank)
        _, checkpoint = open_model(engine)
        device = torch.device("cpu")
        with torch.inference_mode():
            loaded = load_part(facts, checkpoint, make_mesh(facts.spec, ends, compute), device)
            checkpoint.close()
            load_draft(engine, loaded, ends, device)
            loaded.bind_cache(3)
            logits, scattered = [], []
            for model in (loaded, loaded.draft_model()):
                recorder.clear()
                logits.append(model.runner.run(step))
                scattered.append(
                    any(
                        one.kind is not CollectiveKind.ALL_REDUCE
                        and one.group is GroupName.TP
                        and one.kind
                        in (CollectiveKind.REDUCE_SCATTER, CollectiveKind.REDUCE_SCATTER_V)
                        for one in recorder.records
                    )
                )
        policies = (loaded.facts.spec.policy, loaded.draft_model().facts.spec.policy)
        return Ran(policies, (scattered[0], scattered[1]), (logits[0], logits[1]))

    return run_ranks(topology, rank)


@pytest.mark.parametrize(
    ("asked", "speculative", "policies"),
    [
        ("ar", "rs", ("ar", "rs")),
        ("rs", "ar", ("rs", "ar")),
        ("rs", None, ("rs", "rs")),
        ("auto", None, ("rs+rsv", "ar")),
        ("rs", "auto", ("rs", "ar")),
        ("auto", "rs+rsv", ("rs+rsv", "rs+rsv")),
    ],
)
def test_a_draft_model_reduces_as_its_own_policy_says(
    asked: str,
    speculative: str | None,
    policies: tuple[str, str],
    checkpoints: Checkpoints,
    tmp_path: Path,
) -> None:  # boundary G40
    """The draft is a Qwen3, whose auto is ar; the model is a Llama, whose auto is rs+rsv."""
    save_tiny(tmp_path, "Qwen3", **SHAPE)
    engine = EngineConfig(
        model=checkpoints.target,
        tp=2,
        attn_dp=2,
        boundary_reduction=asked,
        speculative="draft",
        speculative_model=str(tmp_path),
        speculative_boundary_reduction=speculative,
    )
    served, checkpoint = open_model(engine)
    checkpoint.close()
    draft = with_draft(engine, served).draft
    assert draft is not None
    assert (served.facts.spec.policy.value, draft.spec.policy.value) == policies
    runs = run_both(engine, engine.topology())
    for ran in runs:
        assert tuple(policy.value for policy in ran.policies) == policies
        # A policy that permits a scatter has one at each of its FFNs.
        assert ran.scattered == tuple("rs" in policy for policy in policies)
    alone = replace(engine, tp=1, attn_dp=1)
    one = run_both(alone, alone.topology())[0]
    for model in (0, 1):
        torch.testing.assert_close(runs[0].logits[model], one.logits[model], atol=2e-4, rtol=1e-4)
