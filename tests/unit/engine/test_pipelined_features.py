"""What requests ask for, over pipeline stages: the same answers as on one stage, bit by bit."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from layline import LLM, Grammar, SamplingParams
from layline.engine.answers import Submission
from layline.engine.async_engine import AsyncEngine
from layline.engine.request import FinishReason
from layline.engine.scheduler import BLOCK_SIZE
from support.embedding import save_embedder
from support.pipelined import (
    BASE,
    LAYERS,
    PROMPTS,
    count,
    ended_streams,
    found_in,
    save_deep,
    staged,
    watched,
)
from support.writer import save_writer

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=3)
LOOP = [21, 22, 23, 24, 25] * 4


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_deep(tmp_path_factory.mktemp("deep"), "llama")


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    with ended_streams():
        yield


def model(directory: str | Path, num_stages: int = 3, **flags: Any) -> LLM:
    settings = {"threads": 1, "batch_invariant": True, **flags}
    return LLM(str(directory), pp_stages=num_stages, **settings)


def compare(directory: str | Path, params: Any, prompts: Any = PROMPTS, **flags: Any) -> None:
    """Over three stages as on one."""
    with model(directory, 1, **flags) as alone:
        wanted = found_in(alone.generate(prompts, params))
    with model(directory, **flags) as llm:
        watch = watched(llm)
        assert found_in(llm.generate(prompts, params)) == wanted
        assert watch.most == 4
        settled(llm)


def settled(llm: LLM) -> None:
    """Nothing runs, and nobody holds blocks or a place in the sampler."""
    assert not llm.engine.has_work
    assert not llm.engine._steps._flights
    assert llm.stats().blocks_held == 0
    assert len(staged(llm)._rows) == 0


def test_draws_and_penalties(directory: str) -> None:
    free = SamplingParams(temperature=1.2, seed=3, max_tokens=24, ignore_eos=True, logprobs=3)
    params = [
        free,
        replace(free, seed=4, top_p=0.8),
        replace(GREEDY, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.3),
        replace(free, seed=5, presence_penalty=1.5),
        replace(free, seed=6, top_k=7, frequency_penalty=1.0, stop=("e",)),
        replace(free, seed=8, min_p=0.05, repetition_penalty=1.2),
        replace(free, seed=7, logit_bias={11: 3.0}),
    ]
    compare(directory, params)


def test_ends_of_every_kind(directory: str) -> None:
    with model(directory, 1) as alone:
        outputs = alone.generate(PROMPTS, GREEDY)
    ids, texts = [each.token_ids for each in outputs], [each.text for each in outputs]
    params = [
        replace(GREEDY, stop=(texts[0][len(texts[0]) // 2 :][:2],)),
        replace(GREEDY, stop=(texts[1][3:5], texts[1][-3:]), include_stop_in_output=True),
        replace(GREEDY, stop_token_ids=(ids[2][7],)),
        replace(GREEDY, max_tokens=1),
        replace(GREEDY, stop_token_ids=(ids[4][0],), min_tokens=5),
        replace(GREEDY, max_tokens=2),
        GREEDY,
    ]
    compare(directory, params)


@pytest.mark.parametrize("chunk", [9, 2048])
def test_log_probabilities_of_prompts(directory: str, chunk: int) -> None:
    params = [replace(GREEDY, prompt_logprobs=n % 4) for n in range(len(PROMPTS))]
    params[0] = SamplingParams(max_tokens=0, prompt_logprobs=3)
    compare(directory, params, prefill_tokens=chunk)


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_a_cache_of_8_bits(tmp_path: Path, kv_dtype: str) -> None:
    compare(save_deep(tmp_path, "qwen3-window"), GREEDY, kv_dtype=kv_dtype, prefill_tokens=9)


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_weights_in_half_precision(tmp_path: Path, kv_dtype: str) -> None:
    flags: dict[str, Any] = {"dtype": "bfloat16", "kv_dtype": kv_dtype, "prefill_tokens": 9}
    compare(save_deep(tmp_path, "mistral-window"), GREEDY, **flags)


def test_answers_that_follow_grammars(tmp_path: Path) -> None:
    save_writer(tmp_path)
    grammars = [
        Grammar.regex(r"[a-z]{3}-\d{2}"),
        Grammar.choice(["red", "green", "blue"]),
        Grammar.json_schema({"type": "array", "items": {"type": "integer"}, "maxItems": 4}),
        None,
    ]
    params = [
        SamplingParams(temperature=1.0, logprobs=1, seed=seed, max_tokens=60, grammar=grammar)
        for seed, grammar in enumerate(grammars)
    ]
    prompts = ["The harbour", "In 2024", "Ein schöner Tag", "x"]
    compare(tmp_path, params, prompts)
    with model(tmp_path) as llm:
        found = [each.text for each in llm.generate(prompts, params)]
        assert found[1] in ("red", "green", "blue")


@pytest.mark.parametrize("mode", ["lasttoken", "mean"])
def test_embeddings(tmp_path: Path, mode: str) -> None:
    save_embedder(tmp_path, mode=mode, num_hidden_layers=LAYERS)
    flags: dict[str, Any] = {"prefill_tokens": 9}
    with model(tmp_path, 1, **flags) as alone:
        wanted = [each.embedding for each in alone.embed(PROMPTS)]
    with model(tmp_path, 4, **flags) as llm:
        watch = watched(llm)
        found = [each.embedding for each in llm.embed(PROMPTS)]
        assert all(np.array_equal(a, b) for a, b in zip(found, wanted, strict=True))
        assert watch.most == 5
        settled(llm)


def test_drafts_from_the_text(directory: str) -> None:  # pipeline G44, G53
    prompts = [LOOP, *PROMPTS]
    params = [replace(GREEDY, frequency_penalty=0.1), *[GREEDY] * len(PROMPTS)]
    with model(directory, 1) as alone:
        wanted = found_in(alone.generate(prompts, params))
    with model(directory, 4, speculative="ngram") as llm:
        watch = watched(llm)
        assert found_in(llm.generate(prompts, params)) == wanted
        verified = count(llm, "verify_splits")
        assert verified > 0
        assert verified + count(llm, "batch_splits") == len(watch.steps)
        assert llm.stats().drafted > 0
        assert watch.most == 1, "guessing needs the tokens"
        # Nobody waits for a turn where there is one step at a time.
        decodes = [n for n, step in enumerate(watch.steps) if step.parts[0].num_decode]
        assert len(set(watch.rows[decodes[0]])) == len(prompts)
        settled(llm)


def test_beginnings_that_are_cached(directory: str) -> None:
    with model(directory, 1) as alone:
        wanted = found_in(alone.generate(PROMPTS, GREEDY))
    with model(directory) as llm:
        for _ in range(2):
            assert found_in(llm.generate(PROMPTS, GREEDY)) == wanted
        before = llm.stats().prefix_hits
        llm.generate([BASE], GREEDY)
        assert llm.stats().prefix_hits - before == len(BASE) // BLOCK_SIZE * BLOCK_SIZE
        settled(llm)


@pytest.mark.parametrize("flags", [{}, {"prefill_tokens": 5, "prefix_cache": False}], ids=str)
def test_requests_that_lose_their_place(directory: str, flags: dict[str, Any]) -> None:
    with model(directory, 1) as alone:
        wanted = found_in(alone.generate(PROMPTS, GREEDY))
        block = alone.memory_report()["kv_cache"] // alone._executor.num_blocks
    with model(directory, kv_memory=8 * block, **flags) as llm:
        assert staged(llm).num_blocks == 8
        assert found_in(llm.generate(PROMPTS, GREEDY)) == wanted
        assert llm.stats().preemptions > 0
        settled(llm)


def test_an_abort_frees_the_blocks_of_steps_under_way(directory: str) -> None:
    with model(directory, 1) as alone:
        wanted = [each.token_ids for each in alone.generate(PROMPTS[:2], GREEDY)]
    with model(directory, prefix_cache=False) as llm:
        engine = llm.engine
        kept, gone = (engine.submit(prompt, GREEDY) for prompt in PROMPTS[:2])
        while len(gone.output_ids) < 3:
            engine.step()
        assert engine._steps._flights
        held = llm.stats().blocks_held
        engine.abort(gone)
        assert llm.stats().blocks_held < held
        # Whoever takes the blocks writes to them after the steps that are under way.
        late = engine.submit(PROMPTS[1], GREEDY)
        engine.run([kept, late])
        assert [kept.output_ids, late.output_ids] == wanted
        assert gone.finish_reason is FinishReason.ABORT
        settled(llm)


def test_streams_that_are_given_up(directory: str) -> None:
    with model(directory, 1) as alone:
        wanted = [each.token_ids for each in alone.generate(PROMPTS, GREEDY)]

    async def ask(engine: AsyncEngine, number: int) -> list[int]:
        """The whole answer, or of every third the beginning."""
        asked = Submission(prompt_ids=PROMPTS[number % len(PROMPTS)], params=GREEDY)
        found: list[int] = []
        async with await engine.submit([asked]) as stream:
            async for chunk in stream:
                found += chunk.token_ids
                if number % 3 == 0 and len(found) >= 4:
                    break
        return found

    async def everybody(engine: AsyncEngine) -> list[list[int]]:
        async with asyncio.timeout(60):
            return await asyncio.gather(*[ask(engine, number) for number in range(20)])

    with model(directory, 4, max_running=6) as llm:
        watch = watched(llm)
        engine = AsyncEngine(llm)
        try:
            found = asyncio.run(everybody(engine))
        finally:
            engine.close()
        for number, ids in enumerate(found):
            whole = wanted[number % len(PROMPTS)]
            assert ids == (whole[: len(ids)] if number % 3 == 0 else whole)
        assert sum(engine.statistics.finished.values()) == 20
        assert engine.statistics.finished["abort"] > 0
        assert watch.most == 5
        settled(llm)
