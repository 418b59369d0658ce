"""Gates and canaries with CUDA streams: two stages on one device, and on a pair."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from layline.config import EngineConfig
from layline.gates.canaries import CANARIES, Canary
from layline.gates.canary_run import run_canary
from layline.gates.run import Outcome, run_scenario
from layline.gates.session import GateSession, open_gate

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")
MODEL = Path(__file__).parents[2] / "tools" / "four_layers"
PAIRS = [pytest.param([0, 1], marks=needs_two), pytest.param([1, 0], marks=needs_two)]


@contextmanager
def gate_of(devices: list[int], dtype: str = "float32") -> Iterator[GateSession]:
    engine = EngineConfig(
        model=f"config:{MODEL}", device="cuda", dtype=dtype, pp_stages=2, pp_devices=devices
    )
    with open_gate(engine, lambda _: None) as session:
        yield session


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("devices", [pytest.param([0, 0]), *PAIRS], ids=str)
def test_every_loop_is_one_stage_to_the_bit(devices: list[int], dtype: str) -> None:
    # pipeline G37, G39, G40, G41, G44, G45, G46
    found: list[Outcome] = []
    with gate_of(devices, dtype) as session:
        for scenario in session.make.of("all"):
            if scenario.loop != "graph":
                run_scenario(session.model, scenario, session.doors, found.append)
    red = [(each.scenario, each.way, each.reasons) for each in found if not each.is_green]
    assert not red
    refused = {each.way for each in found if each.verdict == "refused"}
    assert refused == ({"split"} if devices == [0, 0] else {"one stream", "unsplit"})


@pytest.mark.parametrize("devices", [pytest.param([0, 0]), PAIRS[0]], ids=str)
@pytest.mark.parametrize("canary", CANARIES, ids=[each.name for each in CANARIES])
def test_every_canary_that_applies_is_red(canary: Canary, devices: list[int]) -> None:
    # pipeline G17, G18, G28, G29, G30, G58, G59
    with gate_of(devices) as session:
        found = run_canary(session.bench, canary, session.make, session.doors)
    if found.absent is None:
        assert found.is_red, (found.verdict, found.reason)
    else:
        assert found.verdict == "n/a"
