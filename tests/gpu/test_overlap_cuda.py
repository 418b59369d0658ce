"""On a device: a launch waits for nothing, reading only for its own step, answers stay the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from layline import LLM, SamplingParams
from support.tiny import save_tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
DRAWN = SamplingParams(temperature=1.1, top_p=0.9, seed=3, max_tokens=24, ignore_eos=True)
BASE = [5 + 7 * n % 150 for n in range(37)]
PROMPTS = [BASE, BASE[:32], [*BASE[:20], 9, 9, 9], [3], [44, 2, 8, 100, 17, 61]]
# Far longer than the host needs for anything it does meanwhile.
LONG = 4_000_000_000


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny(path, "Llama", max_position_embeddings=96)
    return path


def model(directory: Path, **flags: Any) -> LLM:
    return LLM(str(directory), device="cuda", dtype="float32", **flags)


@pytest.mark.parametrize("chunk", [7, 2048])
def test_answers_are_those_without_overlap(directory: Path, chunk: int) -> None:
    params = [
        GREEDY,
        DRAWN,
        replace(GREEDY, repetition_penalty=1.4, presence_penalty=0.5),
        replace(DRAWN, seed=5, logprobs=2),
        replace(DRAWN, seed=6, frequency_penalty=1.0, min_tokens=4),
    ]
    calm = model(directory, overlap=False).generate(PROMPTS, params)
    llm = model(directory, prefill_tokens=chunk)
    found = llm.generate(PROMPTS, params)
    assert llm.engine.num_ahead > 20
    for ours, theirs in zip(found, calm, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.text == theirs.text
    assert llm.engine.stats().blocks_held == 0


@pytest.mark.parametrize("params", [GREEDY, DRAWN, replace(GREEDY, logprobs=2)], ids=str)
def test_a_launch_waits_for_nothing(
    directory: Path, monkeypatch: pytest.MonkeyPatch, params: SamplingParams
) -> None:
    """Any call that would wait for the device is an error, in prompts and in decodes."""
    llm = model(directory, prefill_tokens=9)
    llm.generate(PROMPTS, params)  # Whatever is set up at first use may wait.
    executor: Any = llm.engine._executor
    launch, calls = executor.launch, 0

    def watched(*step: Any) -> Any:
        nonlocal calls
        calls += 1
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(*step)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(executor, "launch", watched)
    llm.generate([[9, *prompt] for prompt in PROMPTS], params)
    assert calls > 24


def test_tokens_are_read_while_the_next_step_is_queued(directory: Path) -> None:
    llm = model(directory)
    requests = [llm.engine.submit(prompt, GREEDY) for prompt in PROMPTS]
    while not all(request.output_ids for request in requests):
        llm.engine.step()
    executor: Any = llm.engine._executor
    (flight,) = llm.engine._steps._flights
    torch.cuda._sleep(LONG)
    later = torch.cuda.current_stream().record_event()
    result = executor.collect(flight.launched)
    assert not later.query(), "reading waited for what was queued after the step"
    assert len(result.tokens[0]) == len(PROMPTS)
    # A step is planned, launched and given to the host while the device is busy.
    llm.engine.step()
    assert not later.query(), "planning or launching waited for the device"
    llm.engine.run(requests)
    assert all(len(request.output_ids) == 24 for request in requests)
