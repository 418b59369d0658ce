"""Gates on tiny checkpoints: green where all is right, and red by every canary."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from layline.config import EngineConfig
from layline.engine.stage_program import StagedStep
from layline.gates import run
from layline.gates.arms import ArmOptions
from layline.gates.canaries import CANARIES, Canary
from layline.gates.canary_run import CanaryOutcome, run_canary
from layline.gates.run import Outcome, run_scenario, run_way
from layline.gates.scenarios import Scenario
from layline.gates.session import GateSession, open_gate
from layline.pipeline.payload import Payload
from layline.pipeline.stages import StageProgram
from support.tiny import save_tiny

LAYERS = 8
CONTEXT = 256


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("llama"), "Llama")


def saved(path: Path, family: str, **changes: Any) -> Path:
    sizes = {"num_hidden_layers": LAYERS, "max_position_embeddings": CONTEXT}
    save_tiny(path, family, **{**sizes, **changes})
    return path


@contextmanager
def gate_of(folder: Path, **flags: Any) -> Iterator[GateSession]:
    threads = {"threads": 2, **flags}
    with open_gate(EngineConfig(model=str(folder), **threads), lambda _: None) as session:
        yield session


def outcomes(session: GateSession, loop: str = "all") -> list[Outcome]:
    found: list[Outcome] = []
    for scenario in session.make.of(loop):
        run_scenario(session.model, scenario, session.doors, found.append)
    return found


def reds(found: list[Outcome]) -> list[tuple[str, str, list[str]]]:
    """Of what is red, why."""
    return [(each.scenario, each.way, each.reasons) for each in found if not each.is_green]


@pytest.mark.parametrize("num_stages", [2, 3, 4, 8])
def test_stages_compute_what_one_stage_does_in_every_loop(folder: Path, num_stages: int) -> None:
    # pipeline G37, G39, G41, G44, G45, G46, G53, G56
    with gate_of(folder, pp_stages=num_stages) as session:
        found = outcomes(session)
    assert not reds(found)
    assert {each.scenario for each in found} >= {"eager", "batch of 8", "prime of 2 prompts"}


@pytest.mark.parametrize(
    ("family", "changes", "flags"),
    [
        ("Llama", {}, {"pp_stages": 3, "pp_splits": [1, 6]}),
        ("Llama", {"tie_word_embeddings": True}, {"pp_stages": 2, "dtype": "bfloat16"}),
        ("Mistral", {"sliding_window": 8}, {"pp_stages": 2, "pp_devices": [1, 0]}),
        ("Qwen2", {}, {"pp_stages": 4, "kv_dtype": "int8"}),
        ("Qwen3", {}, {"pp_stages": 2, "batch_invariant": True}),
        ("Qwen3", {}, {"pp_stages": 3, "kv_dtype": "fp8", "pp_devices": [2, 0, 1]}),
    ],
    ids=["uneven", "tied", "window", "int8", "invariant", "fp8"],
)
def test_families_cuts_placements_and_types(
    tmp_path: Path, family: str, changes: dict[str, Any], flags: dict[str, Any]
) -> None:
    # pipeline G40
    with gate_of(saved(tmp_path, family, **changes), **flags) as session:
        assert not reds(outcomes(session))


def test_stages_on_one_device_refuse_what_would_overlap(folder: Path) -> None:
    # pipeline G38
    with gate_of(folder, pp_stages=2, pp_devices=[0, 0]) as session:
        found = outcomes(session)
    assert not reds(found)
    refused = {(each.scenario, each.way) for each in found if each.verdict == "refused"}
    assert refused == {
        *[(f"deferred, window {window}", "split") for window in (1, 2, 3, 4)],
        ("prime of 8 chunks", "split"),
        ("prime of 2 prompts", "split"),
    }


def test_an_overlap_that_should_be_refused_and_is_not_is_red(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("layline.pipeline.loops.refuse_deferred", lambda *_, **__: None)
    with gate_of(folder, pp_stages=2, pp_devices=[0, 0]) as session:
        scenario = session.make.deferred(2)
        (outcome,) = run_scenario(session.model, scenario, session.doors, lambda _: None)
    assert "what must be refused here was not refused" in outcome.reasons


def test_a_shut_door_is_red(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate looks at what runs with the doors as they are."""
    monkeypatch.delenv("LAYLINE_PP_BIND")
    monkeypatch.setenv("LAYLINE_BATCH_PP", "0")
    with gate_of(folder, pp_stages=2) as session:
        found = outcomes(session, "batch")
        assert session.configuration["doors"] == {"LAYLINE_BATCH_PP": "0"}
        assert "LAYLINE_BATCH_PP=0" in session.headline()
    assert [each.verdict for each in found] == ["RED"] * 3
    assert "refused: batched decode has no stage split" in found[0].reasons[0]


@pytest.mark.parametrize("devices", [None, [0, 0]], ids=["two", "one"])
def test_weights_that_stay_on_the_primary_are_read_remotely_and_counted(
    folder: Path, monkeypatch: pytest.MonkeyPatch, devices: list[int] | None
) -> None:
    # pipeline G56
    monkeypatch.setenv("LAYLINE_PP_SHARD", "0")
    with gate_of(folder, pp_stages=2, pp_devices=devices) as session:
        assert not reds(found := outcomes(session, "batch"))
        assert {each.counters["remote_reads"] > 0 for each in found} == {devices is None}
        scenario, expected = scenario_and_reference(session)
        own = ArmOptions(homes=lambda homes: [replace(h, weights=h.scratch) for h in homes])
        way = scenario.ways[0]
        sharded = run_way(session.model, scenario, way, session.doors, expected, own)
    if devices is None:
        assert "counter remote_reads has not moved" in sharded.problems
        assert "the weights of stage 0 is on cpu:0; expected cpu:1" in sharded.problems


class OffByOneBit:
    """A stage whose result has one other bit."""

    def __init__(self, program: StageProgram) -> None:
        self.program = program

    def room(self, step: StagedStep) -> int:
        return self.program.room(step)

    def prepare(self, step: StagedStep) -> None:
        self.program.prepare(step)

    def run(self, step: StagedStep, entering: Payload | None) -> Any:
        found = self.program.run(step, entering)
        if isinstance(found, torch.Tensor):
            found.view(torch.int32)[-1, 5] ^= 1
        return found


def scenario_and_reference(session: GateSession) -> tuple[Scenario, list[torch.Tensor]]:
    scenario = session.make.eager(2)
    session.model.fresh_caches(scenario.num_blocks)
    return scenario, run.one_stage(session.model, scenario)


def test_one_bit_of_one_value_is_found_and_named(folder: Path) -> None:
    with gate_of(folder, pp_stages=2) as session:
        scenario, expected = scenario_and_reference(session)
        options = ArmOptions(
            homes=lambda homes: [replace(h, program=OffByOneBit(h.program)) for h in homes]
        )
        way = scenario.ways[0]
        outcome = run_way(session.model, scenario, way, session.doors, expected, options)
    assert outcome.difference is not None
    assert (outcome.difference.step, outcome.difference.index) == (0, (0, 5))
    assert outcome.difference.differing == 1
    assert outcome.difference.found != outcome.difference.expected
    assert "value [0, 5]" in outcome.reasons[0]


@pytest.mark.parametrize("in_walk", [True, False])
def test_a_red_split_is_told_from_wrong_weights(
    folder: Path, monkeypatch: pytest.MonkeyPatch, in_walk: bool
) -> None:
    with gate_of(folder, pp_stages=2) as session:
        scenario = session.make.eager(2)
        if in_walk:
            walk = run.opened

            def broken(model: Any, doors: Any, options: ArmOptions) -> Any:
                if doors.streams:
                    options = replace(options, homes=lambda h: [_bit(h[0]), *map(_bit, h[1:])])
                return walk(model, doors, options)

            monkeypatch.setattr(run, "opened", broken)
        else:
            norm = session.model.stages[1].runner.model.norm
            assert norm is not None
            with torch.inference_mode():
                norm.constants[0][3] += 1
        found = run_scenario(session.model, scenario, session.doors, lambda _: None)
    place = "the walk over the stages differs" if in_walk else "so do the stages' weights or caches"
    assert place in found[0].reasons[-1]


def _bit(home: Any) -> Any:
    return replace(home, program=OffByOneBit(home.program))


@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("canary", CANARIES, ids=[each.name for each in CANARIES])
def test_every_canary_is_red_and_green_without_its_failure(
    folder: Path, canary: Canary, num_stages: int
) -> None:
    # pipeline G19, G25, G26, G57, G58, G59
    with gate_of(folder, pp_stages=num_stages) as session:
        found = run_canary(session.bench, canary, session.make, session.doors)
    if canary.absent is not None:
        assert (found.verdict, found.reason) == ("n/a", canary.absent)
        assert not found.is_red
    else:
        assert found.is_red, (found.verdict, found.reason)
        assert found.reason


def test_canaries_that_one_device_cannot_show_say_why(folder: Path) -> None:
    with gate_of(folder, pp_stages=2, pp_devices=[0, 0]) as session:
        found = [run_canary(session.bench, c, session.make, session.doors) for c in CANARIES]
    assert {each.verdict for each in found} == {"red", "n/a"}
    assert all(each.reason for each in found)
    red = {each.canary.name for each in found if each.is_red}
    assert {"missing_barrier", "unpublished_output", "neutered_counter", "shared_table"} <= red


def test_the_table_has_every_failure_class() -> None:
    assert {canary.number for canary in CANARIES} == set(range(1, 28))
    assert len({canary.name for canary in CANARIES}) == len(CANARIES)
    absent = {canary.number for canary in CANARIES if canary.absent is not None}
    assert absent == {12, 13, 16, 24}


def outcome_of(*problems: str) -> Outcome:
    return Outcome("s", "split", 1, 1, 0.1, None, problems)


def test_a_canary_that_shows_nothing_fails() -> None:
    canary = CANARIES[0]
    red, green = outcome_of("broken"), outcome_of()
    assert CanaryOutcome(canary, red, green).is_red
    inert = CanaryOutcome(canary, green, green)
    assert (inert.is_red, inert.verdict) == (False, "green")
    always = CanaryOutcome(canary, red, outcome_of("always"))
    assert (always.is_red, always.verdict) == (False, "red without the failure too")
    assert always.reason == "always"
