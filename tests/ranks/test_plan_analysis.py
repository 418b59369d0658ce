"""What runs is what ``layline plan`` shows: kind, group, rows, bytes and order on every rank."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
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
from layline.engine.analysis import Analysis, RecordedStep, compare_steps, with_kernel_sizes
from layline.engine.balance import StepRules
from layline.engine.model import load_part
from layline.engine.planned import ModelPlan, open_plan
from layline.engine.step import MeshStep
from layline.topology import Topology
from layline.weights.opening import open_checkpoint
from support.mesh import TextSequence, hand_written_steps
from support.model import smollm2_path

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
    plan = with_kernel_sizes(open_plan(model, flags, "ordinary"))
    engine = EngineConfig(model=model, **flags)
    return compare_steps(plan, run(model, plan, engine))


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("policy", ["ar", "rs", "rs+rsv"])
def test_every_rank_runs_its_plan(folder: Path, mesh: dict[str, Any], policy: str) -> None:
    model = write(folder, "LlamaForCausalLM")
    for padding in ("max-len", "sum-len"):
        done = analysed(model, **mesh, boundary_reduction=policy, dp_padding=padding)
        assert done.comparison.differences == []
        assert sum(pair.executed.count for _, pair in done.comparison.totals()) > 20
        assert sum(done.kinds.values()) == 5


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


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"tp": 2, "attn_dp": 2}, {"tp": 2, "attn_cp": 2}])
def test_batch_invariant_ranks_run_their_plan(folder: Path, mesh: dict[str, Any]) -> None:
    model = write(folder, "LlamaForCausalLM", "bfloat16")
    assert analysed(model, **mesh, batch_invariant=True).comparison.differences == []


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
@pytest.mark.parametrize("mesh", [{"tp": 2}, {"tp": 4, "attn_cp": 2}], ids=str)
def test_quantised_keys_travel_as_planned(
    folder: Path, mesh: dict[str, Any], kv_dtype: str
) -> None:
    model = write(folder, "LlamaForCausalLM", "bfloat16")
    assert analysed(model, **mesh, kv_dtype=kv_dtype).comparison.differences == []


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

    def without_the_embedding(*arguments: Any, **options: Any) -> ComputeCollectives:
        return replace(whole(*arguments, **options), entry=())

    monkeypatch.setattr(planned, "compute_collectives", without_the_embedding)
    done = analysed(model, tp=2)
    assert len(done.comparison.differences) == 2 * 5, "every rank in every step"
    assert "ran all-reduce ATTN_TP" in done.comparison.differences[0]
    assert "in compute" in done.comparison.differences[0]


def test_another_policy_than_planned_turns_it_red(folder: Path) -> None:
    model = write(folder, "LlamaForCausalLM")
    flags = {"tp": 4, "attn_dp": 2}
    engine = EngineConfig(model=model, **flags)
    ran = run(model, open_plan(model, {**flags, "boundary_reduction": "rs"}, "ordinary"), engine)
    other = open_plan(model, {**flags, "boundary_reduction": "ar"}, "ordinary")
    done = compare_steps(with_kernel_sizes(other), ran)
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


@pytest.fixture
def gguf_writer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module that writes tiny GGUF files for the tests of their reader."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "unit" / "weights"))
    return importlib.import_module("tiny_gguf")


def tiny_model(writer: Any, folder: Path, encoding: str, vocabulary: int) -> str:
    """A one-layer GGUF file whose matrices, the tied head's too, are quantised."""
    rng = np.random.default_rng(1)
    arrays = writer.tiny_arrays()
    arrays["token_embd.weight"] = rng.normal(0, 0.1, (vocabulary, writer.HIDDEN)).astype(np.float32)
    encodings = {name: encoding for name, array in arrays.items() if array.ndim > 1}
    tokens = ["t", "1", "t1", *(f"t{number}" for number in range(2, vocabulary - 1))]
    extra = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * vocabulary,
        "tokenizer.ggml.merges": ["t 1"],
        "tokenizer.ggml.pre": "default",
    }
    path = folder / f"{encoding}-{vocabulary}.gguf"
    return str(writer.write_gguf(path, arrays, encodings=encodings, extra=extra))


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize(("encoding", "vocabulary"), [("Q4_0", 64), ("Q4_0", 40), ("Q8_0", 64)])
def test_the_printed_plan_of_quantised_weights_is_the_one_compared(
    gguf_writer: Any,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    encoding: str,
    vocabulary: int,
    kernels: str,
) -> None:
    # A head of int4 rows that are a multiple of 16 returns bfloat16 from torch, else FP32.
    monkeypatch.setenv("LAYLINE_CPU_KERNELS", kernels)
    model = tiny_model(gguf_writer, folder, encoding, vocabulary)
    assert main(["plan", model, "--tp", "2", "--analyze", "--json", "--threads", "2"]) == 0
    assert_head_agrees(json.loads(capsys.readouterr().out))


def test_the_printed_plan_of_smollm2_is_the_one_compared(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = smollm2_path()
    arguments = ["--tp", "3", "--analyze", "--json", "--threads", "3", "--max-model-len", "64"]
    assert main(["plan", model, *arguments]) == 0
    assert_head_agrees(json.loads(capsys.readouterr().out))


def assert_head_agrees(data: dict[str, Any]) -> None:
    """The bytes of the head's line are those that ran, for each rank and step."""
    assert data["analysis"]["agrees"] is True
    assert data["value_bytes"]["scores_assumed"] is False
    gather, fed = [
        step
        for name in ("head", "sampled ids")
        for line in data["lines"]
        if line["name"] == name
        for step in line["compute"]
    ]
    (ran,) = [
        total["executed"]
        for total in data["analysis"]["totals"]
        if total["in_compute"] and total["collective"] == "all-gather"
    ]
    # Every step scores one row, and all but the first are fed what the one before samples.
    ranks, steps = data["mesh"]["tp"], sum(data["analysis"]["steps"].values())
    assert ran["count"] == ranks * (2 * steps - 1)
    payload = steps * gather["payload_bytes"] + (steps - 1) * fed["payload_bytes"]
    assert ran["payload_bytes"] == ranks * payload


def test_without_a_run_the_bytes_of_a_packed_score_are_called_assumed(
    gguf_writer: Any, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_model(gguf_writer, folder, "Q8_0", 64)
    assert main(["plan", model, "--tp", "2"]) == 0
    assert "a score has 4 bytes, which is assumed" in " ".join(capsys.readouterr().out.split())
    plain = write(folder, "LlamaForCausalLM", "bfloat16")
    assert main(["plan", plain, "--tp", "2"]) == 0
    assert "a score has 2 bytes." in " ".join(capsys.readouterr().out.split())


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
        planned,
        "compute_collectives",
        lambda *given, **options: replace(whole(*given, **options), head=()),
    )
    model = write(folder, "LlamaForCausalLM")
    assert main(["plan", model, "--tp", "2", "--analyze", "--threads", "2"]) == 1
    out = capsys.readouterr().out
    assert "planned nothing, ran all-gather ATTN_TP" in out
    assert "analysis FAILED" in out
