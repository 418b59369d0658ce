"""A pipeline stage that fails ends the run with one error, its threads with it; nothing hangs."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from layline import LLM, SamplingParams
from layline.engine.answers import Submission
from layline.engine.async_engine import AsyncEngine
from layline.errors import RunError, UnsplitError
from support.pipelined import PROMPTS, ended_streams, save_deep, staged, stream_threads, watched

GREEDY = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True)
PLANTED = "RuntimeError: planted, in two lines"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_deep(tmp_path_factory.mktemp("deep"), "llama")


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    with ended_streams():
        yield


@pytest.fixture
def llm(directory: str, no_thread_is_left: None) -> Iterator[LLM]:
    with LLM(directory, threads=1, pp_stages=4) as llm:
        assert len(stream_threads()) == 4 + 2, "stages, the caller and readback"
        yield llm


def plant(llm: LLM, stage: int, after: int, error: type[BaseException] = RuntimeError) -> None:
    """The stage's second layer raises once it has run for ``after`` steps."""
    model: Any = staged(llm).stages[stage].runner.model
    forward, calls = model.layers[1], 0

    def failing(*given: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > after:
            raise error("planted, in\ntwo lines")
        return forward(*given, **options)

    model.layers = [model.layers[0], failing, *model.layers[2:]]


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("after", [0, 9])
def test_the_run_ends_with_the_stage(llm: LLM, stage: int, after: int) -> None:
    plant(llm, stage, after)
    watch = watched(llm)
    message = f"pipeline stage {stage} failed: {PLANTED}"
    with pytest.raises(RunError) as first:
        llm.generate(PROMPTS, GREEDY)
    assert str(first.value) == message
    assert isinstance(first.value.__cause__, RuntimeError)
    assert after < len(watch.steps) <= after + 5, "no more than were in flight"
    for again in (
        lambda: llm.generate(PROMPTS[:1], GREEDY),
        lambda: next(iter(llm.stream([5, 9], GREEDY))),
        llm.memory_report,
    ):
        with pytest.raises(RunError) as found:
            again()
        assert str(found.value) == message
    assert str(llm.failure()) == message
    assert len(stream_threads()) == 6
    llm.close()
    assert stream_threads() == []
    with pytest.raises(RunError, match="the engine is closed"):
        llm.generate(PROMPTS[:1], GREEDY)


def test_steps_before_the_failure_gave_their_tokens(llm: LLM) -> None:
    plant(llm, 2, after=6)
    watch = watched(llm)
    requests = [llm.engine.submit(prompt, GREEDY) for prompt in PROMPTS]
    with pytest.raises(RunError, match="stage 2 failed"):
        llm.engine.run(requests)
    drawn = Counter(number for rows in watch.rows[:6] for number in rows)
    assert {each.request_id: len(each.output_ids) for each in requests} == drawn
    assert all(each.num_pending == 0 for each in requests)


@pytest.mark.parametrize("error", [MemoryError, KeyError])
def test_any_error_is_told(llm: LLM, error: type[BaseException]) -> None:
    plant(llm, 1, after=2, error=error)
    with pytest.raises(RunError, match=f"pipeline stage 1 failed: {error.__name__}: "):
        llm.generate(PROMPTS, GREEDY)


def test_every_open_answer_is_told(llm: LLM) -> None:
    plant(llm, 3, after=12)
    failures: list[Any] = []

    async def ask(engine: AsyncEngine, prompt: list[int]) -> BaseException:
        try:
            async with await engine.submit(
                [Submission(prompt_ids=prompt, params=replace(GREEDY, max_tokens=27))]
            ) as stream:
                async for _ in stream:
                    pass
        except RunError as error:
            return error
        raise AssertionError("it ended")

    async def everybody(engine: AsyncEngine) -> list[BaseException]:
        async with asyncio.timeout(30):
            found = await asyncio.gather(*[ask(engine, prompt) for prompt in PROMPTS])
            return [*found, await ask(engine, PROMPTS[0])]

    engine = AsyncEngine(llm, on_failure=failures.append)
    try:
        found = asyncio.run(everybody(engine))
    finally:
        engine.close()
    assert {str(each) for each in found} == {f"pipeline stage 3 failed: {PLANTED}"}
    assert [str(each) for each in failures] == [str(found[0])]


def test_a_run_that_is_left_ends_its_threads(directory: str) -> None:
    llm = LLM(directory, threads=1, pp_stages=2)
    llm.generate(PROMPTS[:2], GREEDY)
    assert len(stream_threads()) == 4
    del llm
    gc.collect()
    assert stream_threads() == []


def test_closing_in_mid_flight(directory: str) -> None:
    llm = LLM(directory, threads=1, pp_stages=4)
    requests = [llm.engine.submit(prompt, GREEDY) for prompt in PROMPTS]
    while min(len(each.output_ids) for each in requests) < 2:
        llm.engine.step()
    assert llm.engine._steps._flights
    llm.close()
    llm.close()
    assert stream_threads() == []
    with pytest.raises(RunError, match="the engine is closed"):
        llm.engine.step()


def test_an_interrupted_wait_goes_on(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [each.token_ids for each in llm.generate(PROMPTS, GREEDY)]
    requests = [llm.engine.submit(prompt, GREEDY) for prompt in PROMPTS]
    executor: Any = staged(llm)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    for method in ("collect", "launch"):
        for _ in range(5):
            llm.engine.step()
        with monkeypatch.context() as patch:
            patch.setattr(executor, method, interrupted)
            for _ in range(2):
                with pytest.raises(KeyboardInterrupt):
                    llm.engine.step()
    llm.engine.run(requests)
    assert [each.output_ids for each in requests] == wanted


@pytest.mark.parametrize(("door", "loop"), [("BATCH_PP", "batched decode"), ("PP_STREAMS", "")])
def test_a_door_that_shuts_the_split(
    directory: str, monkeypatch: pytest.MonkeyPatch, door: str, loop: str
) -> None:
    """Weights of other devices are not read from one; where all are on one, that one runs them."""
    monkeypatch.setenv(f"LAYLINE_{door}", "0")
    with LLM(directory, threads=1, pp_stages=2) as llm:
        if loop:
            with pytest.raises(UnsplitError, match=f"{loop} has no stage split"):
                llm.generate(PROMPTS, GREEDY)
            monkeypatch.setenv(f"LAYLINE_{door}", "1")
        found = [each.token_ids for each in llm.generate(PROMPTS, GREEDY)]
    monkeypatch.delenv(f"LAYLINE_{door}")
    with LLM(directory, threads=1) as alone:
        assert found == [each.token_ids for each in alone.generate(PROMPTS, GREEDY)]
