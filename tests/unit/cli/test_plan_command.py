"""``layline plan``: what it prints, reads and refuses, and what turns its checks red."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from layline.boundary.mesh import make_mesh
from layline.boundary.planning import simulated_steps
from layline.boundary.planning.records import OpKind
from layline.config import EngineConfig
from layline.engine import room
from layline.engine.facts import resolve
from layline.engine.planned import ModelPlan, open_plan
from layline.errors import UsageError
from layline.topology import GroupName, Topology
from layline.weights.opening import open_checkpoint

SHAPE: dict[str, Any] = {
    "vocab_size": 103,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "dtype": "float32",
    "sliding_window": None,
}
LLAMA = "LlamaForCausalLM"
FAMILIES = (LLAMA, "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
# Attention with biases and an untied head, and a tied one.
VARIATIONS: tuple[dict[str, Any], ...] = (
    {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
    {"tie_word_embeddings": True},
)
MESHES: tuple[dict[str, Any], ...] = (
    {},
    {"tp": 2},
    {"tp": 4, "attn_dp": 2},
    {"tp": 2, "attn_dp": 2},
    {"tp": 4, "attn_cp": 2},
    {"tp": 8, "attn_dp": 2, "attn_cp": 2},
    {"tp": 4, "dense_tp": 1},
    {"tp": 4, "sequence_parallel": True, "input_scattered": True},
    {"tp": 4, "attn_dp": 2, "boundary_reduction": "ar"},
)


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., str]:
    """Writes a folder that holds a config.json and nothing else; gives its name as a MODEL."""

    def write(architecture: str = LLAMA, **changes: Any) -> str:
        config = {**SHAPE, "architectures": [architecture], **changes}
        (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return f"config:{tmp_path}"

    return write


def test_the_table_of_an_attention_dp_mesh(layline: Any, folder: Any) -> None:
    done = layline("plan", folder("Qwen3ForCausalLM"), "--tp", "8", "--attn-dp", "4")
    assert (done.status, done.err) == (0, "")
    out = done.out
    assert "Qwen3ForCausalLM  3 layers  float32  tp 8 = attention DP 4 x TP 2" in out
    assert "policy ar (auto: the table's choice for Qwen3ForCausalLM)" in out
    assert "variant ordinary, max-len" in out
    assert "also planned: --dp-padding sum-len" in out
    into_ffn = next(line for line in out.splitlines() if line.startswith("attn -> ffn"))
    assert " ".join(into_ffn.split()) == "attn -> ffn x3 A -> F ATTN_TP - residual joins the sum A"
    assert "compute: embedding" in out
    assert "compute: head" in out
    assert "policy ar permits no reduce-scatter" in out
    assert "memory of a rank: weights" in out
    assert max(map(len, out.splitlines())) <= 140


def test_json_is_one_object_with_every_part(layline: Any, folder: Any) -> None:
    done = layline("plan", folder(), "--tp", "4", "--attn-dp", "2", "--json", "--simulate")
    assert (done.status, done.err, done.out.count("\n")) == (0, "", 1)
    data = json.loads(done.out)
    assert data["mesh"] == {"tp": 4, "attn_dp": 2, "attn_cp": 1, "attn_tp": 2, "dense_tp": 4}
    by_name = {line["name"]: line for line in data["lines"] if line["kind"] == "boundary"}
    assert {name: line["times"] for name, line in by_name.items()} == {
        "embed -> attn": 1,
        "attn -> ffn": 3,
        "ffn -> attn": 2,
        "ffn -> norm": 1,
    }
    gather = by_name["attn -> ffn"]["prepare"][2]
    # 64 values of 4 bytes; each of four ranks sends three quarters.
    assert gather["operation"] == "all-gather TP -> F"
    assert (gather["payload_bytes"], gather["wire_bytes"]) == (256.0, 192.0)
    assert data["simulation"]["passed"] is True
    assert data["simulation"]["rows"] > 0
    decode, prefill = data["steps"]
    assert (decode["tokens_per_attn_dp_rank"], prefill["tokens_per_attn_dp_rank"]) == (1, 512)
    for total in prefill["collectives"]:
        assert total["count"] > 0
        assert total["payload_bytes"] > total["count"]


def test_totals_of_a_step_count_what_the_lines_hold(folder: Any) -> None:
    plan = open_plan(folder(), {"tp": 4, "attn_dp": 2, "boundary_reduction": "ar"}, "ordinary")
    by_hand: dict[tuple[str, bool], int] = {}
    for line, times in plan.distinct.items():
        for one in line.collectives:
            key = (one.group.name, one.in_compute)
            by_hand[key] = by_hand.get(key, 0) + times
    # Sampled ids, the embedding and the head; a scatter and a gather into each FFN; two sums back,
    # and the last one in compute.
    assert by_hand == {
        ("ATTN_TP", True): 3,
        ("ATTN_TP", False): 3,
        ("TP", False): 3 + 2,
        ("TP", True): 1,
    }


def test_sampled_ids_are_exchanged_where_steps_overlap(folder: Any) -> None:
    """From the rank that draws to the others of its attention DP rank."""

    def lines(variant: str = "ordinary", **flags: Any) -> list[str]:
        plan = open_plan(folder(), flags, variant)
        found = [line for line in plan.lines if line.name == "sampled ids"]
        return [str(one.group.name) for line in found for one in line.collectives]

    assert lines(tp=4, attn_cp=2) == ["ATTN_TP", "ATTN_CP"]
    assert lines(tp=4, attn_cp=4) == ["ATTN_CP"]
    assert lines(tp=2, input_scattered=True, variant="input-scattered") == ["ATTN_TP"]
    assert lines(tp=4, attn_dp=4) == lines() == []
    assert lines(tp=4, overlap=False) == []
    # Prompts are known.
    assert lines(tp=4, attn_cp=2, variant="context-parallel") == []


READ = """
import sys
opened = []
sys.addaudithook(lambda name, arguments: opened.append(str(arguments[0])) if name == "open" else 0)
from layline.cli.main import main
status = main({arguments!r})
print("torch" in sys.modules, "numpy" in sys.modules, file=sys.stderr)
print(*sorted({{name for name in opened if name.startswith({folder!r})}}), file=sys.stderr)
sys.exit(status)
"""


def test_any_size_needs_the_configuration_alone(folder: Any, tmp_path: Path) -> None:
    model = folder(
        num_hidden_layers=100,
        hidden_size=16384,
        intermediate_size=65536,
        num_attention_heads=128,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=150000,
    )
    # Whatever else is there would not be a checkpoint.
    for name in ("model.safetensors", "tokenizer.json", "model.safetensors.index.json"):
        (tmp_path / name).write_text("not one", encoding="utf-8")
    arguments = ["plan", model, "--tp", "512", "--attn-dp", "8", "--dtype", "bfloat16"]
    code = READ.format(arguments=arguments, folder=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == ["False False", str(tmp_path / "config.json")]
    assert "100 layers" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--variant", "ordinry"], "ordinary, context-parallel, input-scattered, sequence-paral"),
        (["--variant", "sequence-parallel"], "needs --sequence-parallel (bound: ordinary)"),
        (["--variant", "input-scattered", "--tp", "2"], "needs --input-scattered"),
        (["--variant", "context-parallel", "--tp", "2"], "needs --attn-cp above 1"),
        (["--tp", "3"], "expected attention TP 1, 2, 4 or 8"),
        (["--tp", "2", "--ep", "2"], "needs experts"),
        (["--tp", "4", "--attn-dp", "3"], "does not divide"),
        (["--boundary-reduction", "rsx"], "is not one of auto, ar, rs, rsv, rs+rsv"),
        (["--sequence-parallel"], "--sequence-parallel"),
        (["--drawn", "x.svg"], "unknown option '--drawn'"),
    ],
)
def test_mistakes_are_one_line(layline: Any, folder: Any, arguments: list[str], words: str) -> None:
    done = layline("plan", folder(), *arguments)
    assert (done.status, done.out, done.err.count("\n")) == (2, "", 1)
    assert words in done.err


def test_degrees_that_do_not_divide_name_those_that_do(layline: Any, folder: Any) -> None:
    # SmolLM2's heads.
    model = folder(num_attention_heads=9, num_key_value_heads=3, hidden_size=72)
    done = layline("plan", model, "--tp", "2")
    assert done.status == 2
    assert "1, 3 or 9" in done.err


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_simulation_passes_on_every_kind_of_mesh(layline: Any, folder: Any, mesh: Any) -> None:
    done = layline("plan", folder(), "--simulate", *as_flags(mesh))
    assert done.status == 0
    assert "simulation passed" in done.out


def as_flags(mesh: dict[str, Any]) -> list[str]:
    flags = []
    for name, value in mesh.items():
        flags.append(f"--{name.replace('_', '-')}")
        flags += [] if value is True else [str(value)]
    return flags


def test_a_fault_in_the_paths_turns_the_simulation_red(
    layline: Any, folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(simulated_steps.LOCAL_STEPS, OpKind.JOIN, lambda state, op, memo: None)
    arguments = ("plan", folder(), "--tp", "4", "--attn-dp", "2", "--simulate")
    done = layline(*arguments)
    assert done.status == 1
    assert "simulation FAILED: input of stage 1 (ffn): rank 0" in done.out
    done = layline(*arguments, "--json")
    assert done.status == 1
    assert json.loads(done.out)["simulation"]["passed"] is False


@pytest.mark.parametrize(
    ("mesh", "variant", "shown"),
    [
        ({"tp": 4, "attn_cp": 2}, "context-parallel", ["compute: attn", "all-gather ATTN_CP"]),
        ({"tp": 4, "sequence_parallel": True}, "sequence-parallel", ["reduce-scatter TP"]),
        ({"tp": 4, "input_scattered": True}, "input-scattered", ["residual slice joins the sum"]),
    ],
)
def test_a_variant_has_its_own_table(
    layline: Any, folder: Any, mesh: Any, variant: str, shown: list[str]
) -> None:
    model = folder()
    done = layline("plan", model, "--variant", variant, *as_flags(mesh))
    assert done.status == 0
    for words in (f"variant {variant}", "also planned: --variant ordinary", *shown):
        assert words in done.out
    ordinary = layline("plan", model, *as_flags(mesh))
    assert f"also planned: --variant {variant}" in ordinary.out
    assert "variant ordinary" in ordinary.out


@pytest.mark.parametrize("device_bytes", [None, 1 << 40, 64 << 20, 1 << 20])
@pytest.mark.parametrize("max_running", [1, 16, 100_000])
@pytest.mark.parametrize("kv_memory", [None, 1 << 20, 100 << 20])
def test_cache_bytes_are_those_that_the_engine_allocates(
    monkeypatch: pytest.MonkeyPatch,
    kv_memory: int | None,
    max_running: int,
    device_bytes: int | None,
) -> None:
    import torch

    from layline.engine import kv

    engine = EngineConfig(kv_memory=kv_memory, max_running=max_running)
    given = room.Room("cpu", device_bytes, kv_memory, max_running)
    if device_bytes is None:
        given = room.room_for(engine, Topology(tp=2))
    else:
        monkeypatch.setattr(kv, "_available", lambda _: int(device_bytes * kv.CPU_SHARE))
    planned = given.cache(1000, 300, 0)
    asked = kv.Room(1000, 300, torch.device("cpu"), 2)
    if planned.holds_longest:
        assert planned.num_bytes == kv.num_blocks(engine, asked) * kv.BLOCK_SIZE * 1000
    else:
        with pytest.raises(UsageError, match="room for one sequence"):
            kv.num_blocks(engine, asked)
    assert (room.CPU_SHARE, room.CUDA_SHARE) == (kv.CPU_SHARE, kv.CUDA_SHARE)


@pytest.mark.parametrize(
    ("memory", "flags", "words", "fits"),
    [
        (1 << 40, [], "fits, a rank has 512.0 GiB of cpu memory here", True),
        (1 << 19, [], "does not fit, a rank has 256 KiB of cpu memory here", False),
        (1 << 40, ["--kv-memory", "1K"], "does not fit, one sequence of max-model-len 256", False),
    ],
)
def test_memory_of_a_rank_has_a_verdict(
    layline: Any,
    folder: Any,
    monkeypatch: pytest.MonkeyPatch,
    memory: int,
    flags: list[str],
    words: str,
    fits: bool,
) -> None:
    monkeypatch.setattr(room, "cpu_bytes", lambda: memory)
    arguments = ("plan", folder(), "--tp", "2", *flags)
    assert words in " ".join(layline(*arguments).out.split())
    found = json.loads(layline(*arguments, "--json").out)["memory_per_rank"]
    assert found["fits"] is fits
    assert found["total_bytes"] == found["weights_bytes"] + found["cache_bytes"]


@pytest.mark.parametrize(
    ("said", "ranks", "found"),
    [("143771\n81559\n", 1, 143771 << 20), ("143771\n81559\n", 2, 81559 << 20), ("1\n", 2, None),
     ("[N/A]\n", 1, None)],
)  # fmt: skip
def test_memory_of_gpus_is_what_their_driver_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: str, ranks: int, found: int | None
) -> None:
    script = tmp_path / "nvidia-smi"
    script.write_text(f"#!/bin/sh\nprintf '{said}'\n", encoding="utf-8")
    script.chmod(0o755)
    monkeypatch.setattr(room, "QUERY", (str(script),))
    assert room.cuda_bytes(ranks) == found


def test_memory_of_gpus_is_unknown_without_their_driver(
    layline: Any, folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "QUERY", ("/nonexistent/nvidia-smi",))
    done = layline("plan", folder(), "--device", "cuda")
    assert "memory of the cuda device unknown" in " ".join(done.out.split())


def test_a_quantised_sum_shows_both_of_its_forms(layline: Any, folder: Any) -> None:
    model = folder()
    arguments = ("plan", model, "--tp", "2", "--quantised-all-reduce")
    out = layline(*arguments).out
    rows = [" ".join(line.split()) for line in out.splitlines()]
    # 64 values of 4 bytes; two ranks' rows of 64 bytes and a scale.
    assert "in prefill: all-gather of int8 136 68" in rows
    assert any(row.startswith("ffn -> attn x2 F TP - all-reduce TP 256 256") for row in rows)
    steps = json.loads(layline(*arguments, "--json").out)["steps"]
    plain = json.loads(layline(*arguments[:-1], "--json").out)["steps"]
    wire = [
        [sum(total["wire_bytes"] for total in step["collectives"]) for step in each]
        for each in (steps, plain)
    ]
    assert wire[0][0] == wire[1][0], "decoding"
    assert wire[0][1] < wire[1][1], "prefill"


def test_one_process_of_torchruns_prints(
    layline: Any, folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    printed = []
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", rank)
        done = layline("plan", folder(), "--tp", "2")
        assert (done.status, done.err) == (0, "")
        printed.append("LlamaForCausalLM" in done.out)
    assert printed == [True, False]


# The plan is the model's.


class Nobody:
    """A group that a model can be built on, and that nothing can be sent through."""

    def __init__(self, name: GroupName, topology: Topology) -> None:
        self.name = name
        self.ranks = topology.group(name)
        self.rank = topology.index_in(name)
        self.size = len(self.ranks)


def built(model: str, mesh: dict[str, Any], rank: int) -> Any:
    """The rank's part of the model, loaded."""
    import torch

    from layline.engine.model import load_part

    engine = EngineConfig(model=model, **mesh)
    checkpoint = open_checkpoint(model)
    facts = resolve(engine, checkpoint).on_rank(rank)
    topology = facts.spec.topology
    groups = {name: Nobody(name, topology) for name in GroupName}
    return load_part(facts, checkpoint, make_mesh(facts.spec, groups), torch.device("cpu"))  # type: ignore[arg-type]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("architecture", FAMILIES)
def test_the_model_has_the_plans_that_are_printed(
    folder: Any, architecture: str, mesh: dict[str, Any]
) -> None:
    model = folder(architecture)
    plan: ModelPlan = open_plan(model, mesh, "ordinary")
    last = plan.spec.topology.tp - 1
    for rank in {0, last}:
        decoder = built(model, mesh, rank).runner.model
        stages = [
            boundary.plan
            for layer in decoder.layers
            for boundary in (layer.attn_boundary, layer.ffn_boundary)
        ]
        assert len(stages) == 6
        assert tuple(stages) == plan.stages
    other = open_plan(model, {"tp": 2, "attn_cp": 2}, "ordinary")
    assert other.stages != plan.stages, "equality sees a difference"


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("variation", VARIATIONS, ids=("biased", "tied"))
def test_memory_is_what_a_rank_holds(
    folder: Any, architecture: str, mesh: dict[str, Any], variation: dict[str, Any]
) -> None:
    model = folder(architecture, **variation)
    loaded = built(model, mesh, 0)
    decoder = loaded.runner.model
    planned = open_plan(model, mesh, "ordinary").footprint
    vectors = 0
    for layer in decoder.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for each in (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj):
            linear = getattr(each, "linear", each)
            vectors += 0 if linear.bias is None else linear.bias.numel()
        vectors += 2 * SHAPE["hidden_size"]
        vectors += 2 * SHAPE["head_dim"] if attention.q_norm is not None else 0
    vectors += SHAPE["hidden_size"]
    assert planned.weights == loaded.weight_bytes + 4 * vectors
    loaded.bind_cache(2)
    assert planned.kv_per_token == loaded.cache_bytes // 32


def test_memory_of_a_rank_counts_a_draft_model(layline: Any, folder: Any) -> None:
    model, draft = folder("LlamaForCausalLM"), folder("Qwen3ForCausalLM")
    flags = ("--speculative", "draft", "--speculative-model", draft)
    text = " ".join(layline("plan", model, "--tp", "2", *flags).out.split())
    assert "draft model: Qwen3ForCausalLM, " in text
    assert "policy ar (auto: the table's choice for Qwen3ForCausalLM)" in text
    found = [
        json.loads(layline("plan", *arguments, "--tp", "2", "--json").out)
        for arguments in ((model,), (draft,), (model, *flags))
    ]
    alone, beside, both = (each["memory_per_rank"] for each in found)
    for name in ("weights_bytes", "kv_bytes_per_token"):
        assert both[name] == alone[name] + beside[name]
    assert found[0]["draft_model"] is None
    # Steps do not overlap where somebody guesses, so no ids are exchanged.
    lines = [line for line in found[0]["lines"] if line["name"] != "sampled ids"]
    assert lines == found[2]["lines"] != found[0]["lines"]
    asked = layline("plan", model, *flags, "--speculative-boundary-reduction", "rs", "--json")
    assert json.loads(asked.out)["draft_model"]["policy"] == {"name": "rs", "reason": "asked for"}


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8", "fp8"])
def test_memory_of_cached_keys_counts_their_scales(folder: Any, kv_dtype: str) -> None:
    model = folder("LlamaForCausalLM")
    flags = {"tp": 2, "kv_dtype": kv_dtype}
    loaded = built(model, flags, 0)
    loaded.bind_cache(2)
    held = sum(layer.self_attn.cache.nbytes for layer in loaded.runner.model.layers)
    assert open_plan(model, flags, "ordinary").footprint.kv_per_token == held // 32
    assert loaded.cache_bytes == held
    size = SHAPE["head_dim"]
    each = 2 * size if kv_dtype == "bfloat16" else size + 2
    heads = loaded.runner.model.shards.num_kv_heads
    assert held == 32 * len(loaded.runner.model.layers) * 2 * heads * each
