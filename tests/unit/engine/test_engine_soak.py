"""Hundreds of random requests with cancels and failures: answers stay right, no block is lost."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from layline import LLM, SamplingParams
from layline.engine.kv import slot_bytes
from layline.engine.local import LocalExecutor
from layline.engine.request import FinishReason, Request
from layline.engine.scheduler import BLOCK_SIZE
from layline.errors import PromptError, RunError
from layline.models.registry import family_of
from layline.weights.opening import open_checkpoint
from support.tiny import save_tiny

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
TREE = [11 * n % 190 + 3 for n in range(40)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny(path, "Llama", num_hidden_layers=1, max_position_embeddings=128)
    return path


def memory_of(directory: Path, blocks: int) -> int:
    import torch

    checkpoint = open_checkpoint(directory)
    config = family_of(checkpoint.config).parse(checkpoint.config)
    checkpoint.close()
    return (blocks + 1) * BLOCK_SIZE * slot_bytes(config, torch.float32)


def accounted(llm: LLM) -> None:
    """Nothing runs, and every block is free or kept for its contents."""
    assert not llm._engine.has_work
    (queue,) = llm._engine._scheduler.parts
    pool = queue._pool
    assert all(pool.holders(block) == 0 for block in range(pool.capacity + 1))
    assert pool.num_free + pool.num_idle == pool.capacity
    executor = llm._engine._executor
    assert isinstance(executor, LocalExecutor)
    assert len(executor._rows) == 0, "a request is still known to the sampler"


def random_prompt(draw: random.Random) -> list[int]:
    """Beginnings of one sequence, sometimes followed by something of their own."""
    prompt = TREE[: draw.choice([1, 5, 15, 16, 17, 32, 33, 40])]
    if draw.random() < 0.5:
        prompt = [*prompt, *[draw.randrange(3, 199) for _ in range(draw.randrange(1, 4))]]
    return prompt


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("shares", [True, False])
def test_hundreds_of_requests_with_cancels_and_failed_steps(
    directory: Path, monkeypatch: pytest.MonkeyPatch, shares: bool, overlap: bool
) -> None:
    llm = LLM(
        str(directory),
        threads=1,
        max_running=6,
        prefill_tokens=24,
        kv_memory=memory_of(directory, 10),
        prefix_cache=shares,
        overlap=overlap,
    )
    engine = llm._engine
    draw = random.Random(4)
    executor: Any = engine._executor
    run = executor._runner.run_reading

    def failing(*step: Any) -> Any:
        if draw.random() < 0.05:
            raise RunError("planted")
        return run(*step)

    monkeypatch.setattr(executor._runner, "run_reading", failing)
    made: list[Request] = []
    live: list[Request] = []
    failures = 0
    while len(made) < 300 or live:
        if len(made) < 300 and draw.random() < 0.4:
            params = SamplingParams(
                temperature=0.0, max_tokens=draw.choice([1, 4, 50, 80]), ignore_eos=True
            )
            request = engine.submit(
                random_prompt(draw),
                params,
                priority=draw.randrange(3),
                cache_salt=draw.choice(["", "other"]),
            )
            made.append(request)
            live.append(request)
        if live and draw.random() < 0.02:
            engine.abort(draw.choice(live))
        try:
            engine.step()
        except RunError:
            failures += 1
        live = [request for request in live if request.finish_reason is None]
    accounted(llm)
    stats = engine.stats()
    assert failures > 10
    assert (engine.num_ahead > 100) == overlap
    assert stats.preemptions > 10
    assert (stats.prefix_hits > 500) == shares
    ended = [request for request in made if request.finish_reason is FinishReason.LENGTH]
    assert 200 < len(ended) < 290
    monkeypatch.undo()
    calm = LLM(str(directory), threads=1, prefix_cache=False)
    wanted = calm.generate(
        [request.prompt_ids for request in ended], [request.params for request in ended]
    )
    assert [r.output_ids for r in ended] == [output.token_ids for output in wanted]
    assert [r.text for r in ended] == [output.text for output in wanted]


def test_a_text_that_fails_ends_its_own_request_only(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(str(directory), threads=1)
    prompts = [TREE[:3], TREE[:9], TREE[:20]]
    wanted = llm.generate(prompts, GREEDY)
    requests = [llm._engine.submit(prompt, GREEDY) for prompt in prompts]

    def broken(_: int) -> str:
        raise ValueError("planted")

    monkeypatch.setattr(requests[0].decoder, "add", broken)
    llm._engine.run(requests)
    assert requests[0].finish_reason is FinishReason.ERROR
    assert str(requests[0].error) == "the request failed: an internal error (ValueError)"
    assert [r.output_ids for r in requests[1:]] == [output.token_ids for output in wanted[1:]]
    accounted(llm)


def test_what_can_never_fit_is_refused_and_leaves_nothing(directory: Path) -> None:
    from layline.engine.balance import MeshScheduler
    from layline.engine.core import Engine

    llm = LLM(str(directory), threads=1)
    scheduler = MeshScheduler.of(llm.engine_config, 3)
    llm._engine = Engine(llm._model, scheduler, llm._executor)
    with pytest.raises(PromptError, match=r"has 40 tokens .* grow to 52, but the cache holds 32"):
        llm.generate([TREE], GREEDY)
    accounted(llm)
    assert len(llm.generate([TREE[:20]], GREEDY)[0].token_ids) == 12


def test_statistics(directory: Path) -> None:
    llm = LLM(str(directory), threads=1, max_running=1)
    requests = [llm._engine.submit(prompt, GREEDY) for prompt in (TREE[:20], TREE)]
    llm._engine.step()
    stats = llm._engine.stats()
    assert (stats.running, stats.waiting, stats.blocks_held) == (1, 1, 2)
    assert stats.blocks == llm._engine._executor.num_blocks - 1
    llm._engine.run(requests)
    stats = llm._engine.stats()
    assert (stats.running, stats.waiting, stats.blocks_held) == (0, 0, 0)
    assert (stats.prefix_lookups, stats.prefix_hits) == (60, 16)
    assert [request.num_cached for request in requests] == [0, 16]


@pytest.mark.parametrize(
    ("terminal", "prompts", "shown", "bar"),
    [
        (True, 3, True, True),
        (True, 1, True, False),
        (True, 3, False, False),
        (False, 3, True, False),
    ],
)
def test_a_progress_bar_for_many_prompts_on_a_terminal(
    directory: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    terminal: bool,
    prompts: int,
    shown: bool,
    bar: bool,
) -> None:
    import sys

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    llm = LLM(str(directory), threads=1)
    outputs = llm.generate([TREE[:9]] * prompts, GREEDY, progress=shown)
    assert len(outputs) == prompts
    out, err = capsys.readouterr()
    assert out == ""
    assert ("generating" in err) == bar
    assert (f"{prompts}/{prompts}" in err) == bar
