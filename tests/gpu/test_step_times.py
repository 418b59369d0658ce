"""Parts of a step on a CUDA device: the stage is timed there, and nothing waits for the clock."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from layline import LLM, SamplingParams
from layline.engine.pass_clock import PassClock
from support.tiny import save_tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def test_a_stage_takes_the_time_of_its_device_not_of_its_launch() -> None:
    clock = PassClock(torch.device("cuda"))
    x = torch.randn(8192, 8192, device="cuda")
    torch.cuda.synchronize()
    clock.start()
    clock.lap("prepare")
    for _ in range(20):
        x = x @ x / 8192
    clock.lap("execute")
    x.sum().item()
    clock.lap("sample")
    times = clock.take().times()
    ((stage, seconds),) = times.stages
    assert stage == 0
    # What was launched in no time ran while the host waited to read.
    assert seconds > times.execute
    assert seconds <= times.execute + times.sample


def test_every_step_of_a_model_has_its_stage(tmp_path: Path) -> None:
    save_tiny(tmp_path, "Llama")
    llm = LLM(str(tmp_path), device="cuda")
    llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    times = llm.engine.times
    times.end_step()
    assert sum(times.stages[0].counts) == sum(times.parts["execute"].counts) == 6
    assert times.stages[0].total > 0
