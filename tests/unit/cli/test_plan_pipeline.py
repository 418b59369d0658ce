"""``layline plan`` with pipeline stages: what it prints, draws and refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from layline.config import EngineConfig
from layline.engine import pipeline_plan, room
from layline.engine.pipeline_plan import PipelinePlan, plan_pipeline
from layline.engine.planned import open_plan
from layline.engine.stage_program import ModelStage
from layline.errors import PlacementError
from layline.pipeline.cuts import PartCost, StackCost
from layline.pipeline.loops import Loops

SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "dtype": "float32",
    "tie_word_embeddings": True,
}
# By hand: q, k, v, o; gate, up, down; two norms.
LAYER = 16 * 16 + 2 * 16 * 8 + 16 * 16 + 3 * 16 * 24 + 2 * 16
TABLE = 100 * 16
# Keys and values of a layer and token in FP32: two heads of four values each.
CACHED = 2 * 2 * 4 * 4
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Writes a config.json; gives the folder as a MODEL. The machine has a GiB."""
    monkeypatch.setattr(room, "cpu_bytes", lambda: 1 << 30)

    def write(**changes: Any) -> str:
        text = json.dumps({**SHAPE, **changes})
        (tmp_path / "config.json").write_text(text, encoding="utf-8")
        return f"config:{tmp_path}"

    return write


def planned(model: str, measured: StackCost | None = None, **flags: Any) -> PipelinePlan:
    engine = EngineConfig(model=model, **flags)
    found = plan_pipeline(open_plan(model, flags, "ordinary"), engine, {}, print, measured)
    assert found is not None
    return found


def as_json(layline: Any, *arguments: str) -> dict[str, Any]:
    done = layline("plan", *arguments, "--json")
    assert (done.status, done.err, done.out.count("\n")) == (0, "", 1)
    data: dict[str, Any] = json.loads(done.out)
    return data


def test_the_text_has_stages_cuts_costs_and_schedules(layline: Any, folder: Any) -> None:
    done = layline("plan", folder(), "--pp-stages", "3")
    assert (done.status, done.err) == (0, "")
    rows = [" ".join(line.split()) for line in done.out.splitlines()]
    assert "LlamaForCausalLM 6 layers float32 tp 1, 3 pipeline stages" in rows
    assert "pipeline of 3 stages, fence 0 2 4 6 (even cuts)" in rows
    assert any(row.startswith("0 0-1 (2) cpu:0 embedding ") for row in rows)
    assert any(row.startswith("1 2-3 (2) cpu:1 - ") for row in rows)
    assert any(row.startswith("2 4-5 (2) cpu:2 norm, head ") for row in rows)
    assert "before layer 2 0 -> 1 peer copy hidden_states, pending every row float32 64" in rows
    assert "residual every row float32 64" in rows
    assert "layers 0 to 5, each" in done.out
    assert "decode: 3 microbatches, 3 steps: bubbles are " in done.out
    assert "memory of a rank" not in done.out, "stages have a memory each"
    assert max(map(len, done.out.splitlines())) <= 140


def test_one_stage_is_the_plan_of_before(layline: Any, folder: Any) -> None:  # pipeline G1
    model = folder()
    alone = layline("plan", model).out
    assert layline("plan", model, "--pp-stages", "1").out == alone
    assert "pipeline" not in alone
    assert as_json(layline, model)["pipeline"] is None
    staged = layline("plan", model, "--pp-stages", "2").out
    table = alone.split("\n\n")[1]
    assert table in staged, "boundaries between stages of layers are the same"
    over = layline("plan", model, "--pp-stages", "2", "--pp-processes", "2").out
    assert table in over
    assert "between processes" in over


def test_memory_of_each_stage_by_hand(layline: Any, folder: Any) -> None:
    arguments = ("--pp-stages", "2", "--pp-splits", "4", "--max-running", "3")
    data = as_json(layline, folder(), *arguments)
    pipeline = data["pipeline"]
    first, second = pipeline["per_stage"]
    assert (first["layers"], second["layers"]) == ([0, 4], [4, 6])
    # Tied, and on both ends.
    assert first["weights_bytes"] == 4 * (4 * LAYER + TABLE)
    assert second["weights_bytes"] == 4 * (2 * LAYER + TABLE + 16)
    # Three sequences of 512 tokens and one block of 16.
    assert pipeline["cached_tokens"] == 3 * 512 + 16
    assert first["kv_bytes"] == 4 * CACHED * pipeline["cached_tokens"]
    assert second["kv_bytes"] == 2 * CACHED * pipeline["cached_tokens"]
    # Two slots for a prefill of 2048 tokens, with two tensors of 16 FP32 values a token.
    assert (first["slots_bytes"], second["slots_bytes"]) == (0, 2 * 2048 * 2 * 16 * 4)
    assert first["device_bytes"] == (1 << 30) // 2
    assert pipeline["fits"] is True
    whole = data["memory_per_rank"]
    assert whole["slots_bytes"] == second["slots_bytes"]
    assert whole["total_bytes"] == first["total_bytes"] + second["total_bytes"]
    untied = as_json(layline, folder(tie_word_embeddings=False), *arguments)["pipeline"]
    assert untied["per_stage"] == pipeline["per_stage"]


def test_stages_share_devices_and_processes(layline: Any, folder: Any) -> None:
    flags = ("--pp-stages", "4", "--pp-devices", "0,0,1,1")
    done = layline("plan", folder(), *flags)
    assert "Stages share a device: they take turns, and deferred decode and the chunk" in " ".join(
        done.out.split()
    )
    assert "one at a time" in done.out
    stages = as_json(layline, folder(), *flags)["pipeline"]["per_stage"]
    assert {stage["device_bytes"] for stage in stages} == {(1 << 30) // 2}
    data = as_json(layline, folder(), *flags, "--pp-processes", "2")
    assert [stage["process"] for stage in data["pipeline"]["per_stage"]] == [0, 0, 1, 1]
    assert [cut["transport"] for cut in data["pipeline"]["cuts"]] == [
        "local copy",
        "between processes",
        "local copy",
    ]
    assert data["memory_per_rank"]["total_bytes"] == max(
        sum(stage["total_bytes"] for stage in data["pipeline"]["per_stage"][start : start + 2])
        for start in (0, 2)
    )


@pytest.mark.parametrize(
    ("mesh", "variant", "partial", "finished"),
    [
        (("--tp", "2"), "ordinary", None, ["all-reduce TP"]),
        (("--tp", "2", "--input-scattered", "--boundary-reduction", "rs"), "input-scattered",
         "TP", []),
    ],
)  # fmt: skip
def test_a_partial_sum_is_marked(
    layline: Any, folder: Any, mesh: tuple[str, ...], variant: str, partial: str | None,
    finished: list[str],
) -> None:  # fmt: skip
    arguments = (folder(), *mesh, "--variant", variant, "--pp-stages", "2")
    (cut,) = as_json(layline, *arguments)["pipeline"]["cuts"]
    assert cut["state"] == "pending"
    hidden, residual = cut["tensors"]
    assert (hidden["name"], residual["name"]) == ("hidden_states", "residual")
    assert (hidden["partial"], residual["partial"]) == (partial, None)
    assert hidden["bytes_per_token"] == 64
    assert residual["bytes_per_token"] == 64
    assert cut["bytes_per_token"] == 128
    assert cut["finished_before"] == finished
    text = layline("plan", *arguments).out
    assert ("partial over TP" in text) is (partial is not None)
    assert ("Finished by the sender: all-reduce TP." in text) is bool(finished)


def test_auto_cuts_give_the_stage_with_the_head_fewer_layers(layline: Any, folder: Any) -> None:
    model = folder(vocab_size=20000)
    even = as_json(layline, model, "--pp-stages", "2")["pipeline"]
    auto = as_json(layline, model, "--pp-stages", "2", "--pp-splits", "auto")["pipeline"]
    assert (even["fence"], even["cuts_from"]) == ([0, 3, 6], "even")
    assert auto["cuts_from"] == "auto"
    assert auto["fence"][1] > 3
    assert auto["costs"]["slowest_stage"] < auto["costs"]["slowest_stage_of_even_cuts"]
    assert auto["costs"]["slowest_stage_of_even_cuts"] == even["costs"]["slowest_stage"]
    text = layline("plan", model, "--pp-stages", "2", "--pp-splits", "auto").out
    assert "auto: the least slowest stage that fits" in text
    assert "that of even cuts" in text
    given = as_json(layline, model, "--pp-stages", "2", "--pp-splits", "1")["pipeline"]
    assert (given["fence"], given["cuts_from"]) == ([0, 1, 6], "given")


def test_measured_costs_take_the_estimates_place(folder: Any) -> None:
    layers = tuple(PartCost(cost=cost) for cost in (9.0, 1.0, 1.0, 1.0, 1.0, 5.0))
    measured = StackCost(layers=layers, unit="s", source="measured")
    found = planned(folder(), measured, pp_stages=2, pp_splits="auto")
    assert found.fence == (0, 1, 6)
    assert [share.time for share in found.shares] == [9.0, 9.0]


def test_auto_cuts_that_do_not_fit(
    layline: Any, folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = folder()
    monkeypatch.setattr(room, "cpu_bytes", lambda: 1 << 20)
    done = layline("plan", model, "--pp-stages", "2", "--pp-splits", "auto")
    assert (done.status, done.out, done.err.count("\n")) == (2, "", 1)
    assert "no cuts into 2 stages fit" in done.err
    assert "more devices, or a lower --max-model-len than now" in done.err
    shown = layline("plan", model, "--pp-stages", "2")
    assert shown.status == 0, "cuts that are given are shown, with the verdict"
    assert "does not fit" in shown.out
    assert as_json(layline, model, "--pp-stages", "2")["memory_per_rank"]["fits"] is False


def test_memory_of_gpus_by_their_ordinals(folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("layline.engine.pipeline_memory.cuda_sizes", lambda: [8 << 30, 2 << 30])
    flags: dict[str, Any] = {"device": "cuda", "pp_stages": 3}
    found = planned(folder(), pp_devices=(1, 0, 5), **flags).memory
    assert [stage.device_bytes for stage in found.stages] == [2 << 30, 8 << 30, None]
    assert found.fits is None
    shared = planned(folder(), **flags)
    assert shared.placement.devices == (0, 0, 0), "on CUDA all are on the first"
    first = shared.memory.stages[0]
    assert first.on_device == sum(stage.total for stage in shared.memory.stages)


def test_doors_count_for_a_plan(layline: Any, folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = folder()
    monkeypatch.setenv("LAYLINE_PP_STAGES", "3")
    monkeypatch.setenv("LAYLINE_PP_SPLITS", "1,2")
    assert as_json(layline, model)["pipeline"]["fence"] == [0, 1, 2, 6]
    assert as_json(layline, model, "--pp-splits", "3,4")["pipeline"]["fence"] == [0, 3, 4, 6]
    assert as_json(layline, model, "--pp-stages", "1")["pipeline"] is None
    monkeypatch.setenv("LAYLINE_PP_STAGES", "7")
    done = layline("plan", model)
    assert done.status == 0
    assert done.err == (
        "layline: LAYLINE_PP_STAGES 7 is more than the model's 6 layers; expected 2 to 6; the "
        "pipeline stays off\n"
    )
    assert "pipeline" not in done.out
    monkeypatch.setenv("LAYLINE_PP_STAGES", "2")
    monkeypatch.setenv("LAYLINE_PP_SPLITS", "")
    monkeypatch.setenv("LAYLINE_PP_DEVICES", "0")
    refused = layline("plan", model)
    assert (refused.status, refused.out) == (2, "")
    assert "LAYLINE_PP_DEVICES '0' is not a list of device numbers" in refused.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--pp-stages", "7"], ["--pp-stages 7", "6 layers", "expected 1 to 6", "is 6"]),
        (["--pp-stages", "2", "--pp-splits", "6"], ["--pp-splits 6", "from 1 to 5", "is 3"]),
        (["--pp-stages", "3", "--pp-splits", "2"], ["makes 2 stages", "--pp-stages is 3"]),
        (["--pp-splits", "2"], ["--pp-splits 2 needs more than one", "expected --pp-stages 2"]),
        (["--pp-devices", "0,1"], ["--pp-devices 0,1 needs more", "expected --pp-stages 2"]),
        (["--pp-processes", "2"], ["--pp-processes 2 needs more than one stage"]),
        (["--pp-stages", "2", "--pp-devices", "0,1,2"], ["names 3 devices", "expected 2"]),
        (["--draw", "a.svg"], ["there is one stage", "--pp-stages of at least 2"]),
        (["--pp-stages", "2", "--draw", "/no/such/a.svg"], ["'/no/such/a.svg'", "No such file"]),
        (["--pp-stages", "2", "--tp", "2", "--analyze"], ["--tp 2 cannot be analysed with 2"]),
        (
            ["--pp-stages", "2", "--pp-processes", "2", "--analyze"],
            ["--pp-processes 2 cannot be analysed", "--pp-processes 1, or --pp-stages 1"],
        ),
    ],
)
def test_a_pipeline_that_cannot_be(
    layline: Any, folder: Any, arguments: list[str], words: list[str]
) -> None:
    done = layline("plan", folder(), *arguments)
    assert (done.status, done.out, done.err.count("\n")) == (2, "", 1)
    for word in words:
        assert word in done.err


def test_analyze_runs_the_stages(
    layline: Any, folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[int] = []
    microbatch = Loops.microbatch

    def counted(self: Any, *given: Any, **options: Any) -> Any:
        ran.append(len(self.runtime.stages))
        return microbatch(self, *given, **options)

    monkeypatch.setattr(Loops, "microbatch", counted)
    data = as_json(layline, folder(), "--pp-stages", "3", "--analyze", "--max-model-len", "64")
    analysis = data["analysis"]
    assert (analysis["agrees"], analysis["differences"]) == (True, [])
    steps = sum(analysis["steps"].values())
    assert ran == [3] * steps
    # A prompt of 16 tokens, and one for each step after it: two FP32 tensors of 16 values a token.
    crossed = (16 + steps - 1) * 2 * 16 * 4
    assert analysis["cuts"] == [
        {"layer": layer, "crossings": steps, "planned_bytes": crossed, "bytes": crossed}
        for layer in (2, 4)
    ]
    text = layline("plan", folder(), "--pp-stages", "3", "--analyze").out
    assert "cut before layer 2: 4 crossings, 0.002 MiB planned at most, 0.002 MiB ran" in text
    assert "analysis passed: every collective and every cut as planned, in order" in text


@pytest.mark.parametrize("wrong", ["a tensor less", "twice the bytes", "a cut more"])
def test_analyze_exits_1_where_a_cut_is_not_as_planned(
    layline: Any, folder: Any, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    cuts, size = pipeline_plan.plan_cuts, pipeline_plan.crossing_size
    if wrong == "a tensor less":

        def fewer(*given: Any) -> Any:
            return [replace(each, tensors=each.tensors[:1]) for each in cuts(*given)]

        monkeypatch.setattr(pipeline_plan, "plan_cuts", fewer)
        words = ["planned hidden_states of 16 rows (1024 bytes), ran hidden_states of 16 rows"]
    elif wrong == "twice the bytes":
        monkeypatch.setattr(pipeline_plan, "crossing_size", lambda *given: 2 * size(*given))
        words = ["planned hidden_states of 16 rows (2048 bytes)", "residual of 16 rows (1024"]
    else:
        run = ModelStage._run

        def silent(self: Any, step: Any, entering: Any) -> Any:
            found = run(self, step, entering)
            step.crossed.pop(1, None)
            return found

        monkeypatch.setattr(ModelStage, "_run", silent)
        words = ["step 0: 2 cuts are planned, 1 were crossed"]
    done = layline("plan", folder(), "--pp-stages", "3", "--analyze")
    text = " ".join(done.out.split())
    assert done.status == 1
    assert "analysis FAILED" in text
    assert all(word in text for word in words)


def bars(root: ElementTree.Element) -> list[ElementTree.Element]:
    return [each for each in root.iter(f"{SVG}rect") if each.get("class") == "bar"]


def test_the_drawing_has_every_bar_and_bubble(layline: Any, folder: Any, tmp_path: Path) -> None:
    path = tmp_path / "schedule.svg"
    arguments = ("plan", folder(), "--pp-stages", "3", "--draw", str(path))
    done = layline(*arguments)
    assert (done.status, done.err) == (0, "")
    assert f"schedule drawn in {path}" in done.out
    text = path.read_text(encoding="utf-8")
    root = ElementTree.fromstring(text)
    assert root.tag == f"{SVG}svg"
    assert "http" not in text.replace("http://www.w3.org/2000/svg", ""), "nothing is fetched"
    data = as_json(layline, *arguments[1:])["pipeline"]
    assert data["drawing"] == str(path)
    decode, prime = data["schedules"]
    # Three steps of three microbatches on three stages; four chunks of 512 tokens.
    assert len(decode["work"]) == 27
    assert len(prime["work"]) == 3 * 4
    drawn = bars(root)
    assert len(drawn) == 39
    left, right = 190, 1080 - 24
    for rect, work in zip(drawn, sorted_work(decode) + sorted_work(prime), strict=True):
        x, width = float(rect.get("x", "")), float(rect.get("width", ""))
        assert x == pytest.approx(left + (right - left) * work["start"], abs=0.02)
        assert width == pytest.approx((right - left) * (work["stop"] - work["start"]), abs=0.5)
    idle = [each for each in root.iter(f"{SVG}rect") if each.get("fill") == "url(#bubble)"]
    legends = 2
    assert len(idle) - legends == gaps(decode) + gaps(prime)
    words = " ".join(each.text or "" for each in root.iter(f"{SVG}text"))
    for part in ("stage 2 on cpu:2", "layers 4 to 5", "microbatch 2", "chunk 3", "stage idle"):
        assert part in words
    assert f"bubbles: {decode['bubble']:.1%} of the stages' time" in words
    assert f"{decode['bubble_in_the_long_run']:.1%} in the long run" in words


def sorted_work(schedule: dict[str, Any]) -> list[dict[str, Any]]:
    return sorted(schedule["work"], key=lambda each: (each["stage"], each["start"]))


def gaps(schedule: dict[str, Any]) -> int:
    """How often a stage is idle between 0 and 1."""
    found = 0
    for stage in range(3):
        free = 0.0
        for work in sorted_work(schedule):
            if work["stage"] == stage:
                found += work["start"] > free + 1e-12
                free = work["stop"]
        found += free < 1 - 1e-12
    return found


def test_doors_shape_the_schedule(
    layline: Any, folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = folder()
    monkeypatch.setenv("LAYLINE_PRIME_CHUNK", "200")
    monkeypatch.setenv("LAYLINE_PRIME_PIPE", "0")
    monkeypatch.setenv("LAYLINE_BATCH_PP", "0")
    decode, prime = as_json(layline, model, "--pp-stages", "2")["pipeline"]["schedules"]
    assert decode["title"] == "decode: 1 microbatch, 3 steps"
    assert prime["title"] == "prime: 512 tokens in 3 chunks, one at a time"
    assert [work["item"] for work in sorted_work(prime)][:3] == ["200", "200", "112"]
    assert prime["bubble"] == pytest.approx(0.5)


def test_a_plan_of_stages_needs_no_torch(folder: Any) -> None:
    code = (
        "import sys\n"
        "from layline.cli.main import main\n"
        f"status = main(['plan', {folder()!r}, '--pp-stages', '3', '--pp-splits', 'auto'])\n"
        "sys.exit(status or ('torch' in sys.modules and 9))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_devices_out_of_reach_are_not_a_plans_business(folder: Any) -> None:
    """A plan may be for another machine; a wrong number of devices is wrong on any."""
    flags: dict[str, Any] = {"device": "cuda", "pp_stages": 2}
    assert planned(folder(), pp_devices=(6, 7), **flags).placement.devices == (6, 7)
    engine = EngineConfig(model=folder(), device="cuda", pp_devices=(6, 7))
    plan = open_plan(engine.model, {}, "ordinary")
    with pytest.raises(PlacementError, match="names 2 devices for 3"):
        plan_pipeline(plan, engine, {"LAYLINE_PP_STAGES": "3"}, print)


@pytest.mark.parametrize("mesh", [{}, {"tp": 2}, {"tp": 4, "attn_dp": 2}], ids=str)
@pytest.mark.parametrize("kv_dtype", ["auto", "bfloat16", "int8"])
def test_stages_together_hold_what_a_rank_does(
    folder: Any, mesh: dict[str, int], kv_dtype: str
) -> None:
    """All keys and values, and all weights with one table more where it is tied."""
    for tied in (False, True):
        model = folder(tie_word_embeddings=tied)
        found = planned(model, pp_stages=4, pp_splits=(1, 2, 5), kv_dtype=kv_dtype, **mesh)
        stages, whole = found.memory.stages, found.model.footprint
        table = 4 * TABLE // found.model.spec.topology.attn_tp
        assert sum(stage.weights for stage in stages) == whole.weights + (table if tied else 0)
        tokens = found.memory.cached_tokens
        assert sum(stage.kv for stage in stages) == whole.kv_per_token * tokens
