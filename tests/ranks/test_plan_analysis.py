"""What runs is what ``layline plan`` shows: kind, group, rows, bytes and order on every rank."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from layline.boundary.mesh import make_mesh
from layline.boundary.planning.show import ComputeCollectives
from layline.cli.main import main
from layline.comm.groups import CollectiveRecord
from layline.comm.recording import Recorder, record_groups
from layline.comm.simulated import run_ranks
from layline.config import EngineConfig
from layline.engine import planned
from layline.engine.analysis import Analysis, RecordedStep, compare_steps, kernel_sizes
from layline.engine.balance import StepRules
from layline.engine.model import load_part
from layline.engine.planned import ModelPlan, open_plan
from layline.engine.step import MeshStep
from layline.topology import Topology
from layline.weights.opening import open_checkpoint
from support.mesh import TextSequence, hand_written_steps

CONFIG = {
    "vocab_size": 103,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
MESHES: tuple[dict[str, Any], ...] = (
    {"tp": 2},
    {"tp": 4, "attn_dp": 4},
    {"tp": 4, "attn_dp": 2},
    {"tp": 4, "attn_cp": 2},
    {"tp": 4, "attn_cp": 4},
    {"tp": 4, "attn_dp": 2, "attn_cp": 2},
    {"tp": 8, "attn_dp": 2, "attn_cp": 2},
    {"tp": 4, "dense_tp": 1},
    {"tp": 4, "attn_dp": 2, "dense_tp": 1},
    {"tp": 4, "sequence_parallel": True},
    {"tp": 2, "input_scattered": True},
    {"tp": 2, "quantised_all_reduce": True},
)
LENGTH = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("analysed")


def write(folder: Path, architecture: str, dtype: str = "float32") -> str:
    config = {**CONFIG, "architectures": [architecture], "dtype": dtype}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return f"config:{folder}"


def run(model: str, plan: ModelPlan, engine: EngineConfig) -> list[RecordedStep]:
    """Hand-written steps on simulated ranks: mixed phases, ragged and idle ranks."""
    dp = engine.attn_dp
    homes = [0, *range(dp)]
    sequences = [
        TextSequence(tuple(range(3 + i, 3 + i + LENGTH)), home, 1 + 4 * i)
        for i, home in enumerate(homes)
    ]
    rules = StepRules.of(engine)
    steps = [
        MeshStep(tuple(parts), rules.rows(parts)) for parts in hand_written_steps(sequences, dp)
    ]

    def walk(here: Topology, groups: Any) -> list[list[CollectiveRecord]]:
        recorder = Recorder()
        facts = plan.facts.on_rank(here.rank)
        mesh = make_mesh(facts.spec, *record_groups(groups, recorder))
        found = []
        with torch.inference_mode():
            loaded = load_part(facts, open_checkpoint(model), mesh, torch.device("cpu"))
            loaded.bind_cache(1 + 4 * (1 + len(sequences)))
            for step in steps:
                loaded.runner.run(step)
                found.append(list(recorder.records))
                recorder.clear()
        return found

    by_rank = run_ranks(plan.spec.topology, walk)
    return [
        RecordedStep(step, [records[index] for records in by_rank])
        for index, step in enumerate(steps)
    ]


def analysed(model: str, **flags: Any) -> Analysis:
    plan = open_plan(model, flags, "ordinary")
    engine = EngineConfig(model=model, **flags)
    return compare_steps(plan, run(model, plan, engine), kernel_sizes(plan.facts, engine))


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("policy", ["ar", "rs", "rs+rsv"])
def test_every_rank_runs_its_plan(folder: Path, mesh: dict[str, Any], policy: str) -> None:
    model = write(folder, "LlamaForCausalLM")
    for padding in ("max-len", "sum-len"):
        done = analysed(model, **mesh, boundary_reduction=policy, dp_padding=padding)
        assert done.comparison.differences == []
        assert sum(pair.executed.count for _, pair in done.comparison.totals()) > 20
        assert sum(done.kinds.values()) == 4


@pytest.mark.parametrize("family", ["Mistral", "Qwen2", "Qwen3"])
def test_every_family_runs_its_plan(folder: Path, family: str) -> None:
    model = write(folder, f"{family}ForCausalLM")
    assert analysed(model, tp=4, attn_dp=2).comparison.agrees


@pytest.mark.parametrize(
    "mesh", [mesh for mesh in MESHES if "quantised_all_reduce" not in mesh], ids=str
)
def test_values_have_the_planned_types(folder: Path, mesh: dict[str, Any]) -> None:
    model = write(folder, "LlamaForCausalLM", "bfloat16")
    assert analysed(model, **mesh).comparison.differences == []


def test_variants_were_among_them(folder: Path) -> None:
    model = write(folder, "LlamaForCausalLM")
    for mesh, variant in (
        ({"tp": 4, "attn_cp": 2}, "context-parallel"),
        ({"tp": 4, "sequence_parallel": True}, "sequence-parallel"),
        ({"tp": 4, "input_scattered": True}, "input-scattered"),
    ):
        kinds = analysed(model, **mesh).kinds
        assert kinds[variant] > 0
        assert kinds["ordinary"] > 0


def test_a_collective_that_is_not_planned_turns_it_red(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write(folder, "LlamaForCausalLM")
    whole = planned.compute_collectives

    def without_the_embedding(*arguments: Any) -> ComputeCollectives:
        return replace(whole(*arguments), entry=())

    monkeypatch.setattr(planned, "compute_collectives", without_the_embedding)
    done = analysed(model, tp=2)
    assert len(done.comparison.differences) == 2 * 4, "every rank in every step"
    assert "ran all-reduce ATTN_TP" in done.comparison.differences[0]
    assert "in compute" in done.comparison.differences[0]


def test_another_policy_than_planned_turns_it_red(folder: Path) -> None:
    model = write(folder, "LlamaForCausalLM")
    flags = {"tp": 4, "attn_dp": 2}
    engine = EngineConfig(model=model, **flags)
    ran = run(model, open_plan(model, {**flags, "boundary_reduction": "rs"}, "ordinary"), engine)
    other = open_plan(model, {**flags, "boundary_reduction": "ar"}, "ordinary")
    done = compare_steps(other, ran, kernel_sizes(other.facts, engine))
    assert not done.comparison.agrees
    assert "planned all-reduce TP" in done.comparison.differences[0]
    assert "ran reduce-scatter TP" in done.comparison.differences[0]


def test_analyze_runs_real_workers(folder: Path) -> None:
    model = write(folder, "LlamaForCausalLM")
    arguments = ["plan", model, "--tp", "2", "--attn-dp", "2", "--analyze", "--threads", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "layline", *arguments, "--json"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    analysis = json.loads(done.stdout)["analysis"]
    assert analysis["agrees"] is True
    assert analysis["differences"] == []
    assert list(analysis["steps"]) == ["ordinary, MAX_LEN"]
    assert {total["collective"] for total in analysis["totals"]} >= {"all-gather"}
    for total in analysis["totals"]:
        assert total["planned"]["count"] == total["executed"]["count"] > 0
        assert total["executed"]["seconds"] > 0


def test_analyze_of_one_rank_has_nothing_to_compare(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", write(folder, "LlamaForCausalLM"), "--analyze"]) == 0
    assert "analysis passed" in capsys.readouterr().out


def test_analyze_exits_1_where_plan_and_run_differ(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = planned.compute_collectives
    monkeypatch.setattr(
        planned, "compute_collectives", lambda *given: replace(whole(*given), head=())
    )
    model = write(folder, "LlamaForCausalLM")
    assert main(["plan", model, "--tp", "2", "--analyze", "--threads", "2"]) == 1
    out = capsys.readouterr().out
    assert "planned nothing, ran all-gather ATTN_TP" in out
    assert "analysis FAILED" in out
