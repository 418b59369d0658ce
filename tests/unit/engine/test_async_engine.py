"""The asynchronous engine: many tasks on one engine, ends of every kind, nothing left behind."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from layline import LLM, SamplingParams
from layline.engine.answers import AnswerStream, Chunk, Submission
from layline.engine.async_engine import AsyncEngine
from layline.engine.load import cache_load
from layline.errors import (
    LaylineError,
    OverloadedError,
    PromptError,
    RunError,
    SamplingError,
    StoppingError,
)
from support.serving import save_talker

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
LONG = SamplingParams(temperature=0.0)
PROMPTS = [[5, 9, 11], [7] * 20, [3], [44, 8, 100, 17, 61], [9] * 33]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    path = tmp_path_factory.mktemp("talker")
    save_talker(path)
    return LLM(str(path), threads=1, max_running=4)


@pytest.fixture
def engine(llm: LLM) -> Iterator[AsyncEngine]:
    engine = AsyncEngine(llm)
    yield engine
    engine.close()
    assert cache_load(llm.engine).held == 0
    assert not llm.engine.has_work


def run(work: Callable[[], Awaitable[Any]]) -> Any:
    async def limited() -> Any:
        async with asyncio.timeout(60):
            return await work()

    return asyncio.run(limited())


def asked(prompt: list[int], params: SamplingParams = GREEDY) -> list[Submission]:
    return [Submission(prompt_ids=prompt, params=params)]


async def ids_of(stream: AnswerStream) -> list[int]:
    return [token_id async for chunk in stream for token_id in chunk.token_ids]


async def until(true: Callable[[], bool]) -> None:
    while not true():
        await asyncio.sleep(0.005)


def test_many_tasks_get_what_each_gets_alone(llm: LLM, engine: AsyncEngine) -> None:
    wanted = [llm.generate([prompt], GREEDY)[0] for prompt in PROMPTS]

    async def one(number: int) -> tuple[str, list[int], str | None]:
        text, ids, reason = "", [], None
        async with await engine.submit(asked(PROMPTS[number % len(PROMPTS)])) as stream:
            async for chunk in stream:
                assert reason is None
                text += chunk.text
                ids += chunk.token_ids
                reason = chunk.finish_reason
        return text, ids, reason

    async def all_of_them() -> Any:
        return await asyncio.gather(*[one(number) for number in range(20)])

    for number, found in enumerate(run(all_of_them)):
        output = wanted[number % len(PROMPTS)]
        assert found == (output.text, output.token_ids, "length")
    statistics = engine.statistics
    assert statistics.generated_tokens == 20 * 12
    assert statistics.finished == {"length": 20}
    # Far fewer steps than tokens: they ran together.
    assert statistics.steps < 20 * 12 / 2


def test_answers_of_one_stream_are_told_apart(llm: LLM, engine: AsyncEngine) -> None:
    async def several() -> dict[int, list[int]]:
        submissions = [Submission(prompt_ids=prompt, params=GREEDY) for prompt in PROMPTS]
        found: dict[int, list[int]] = {}
        async for chunk in await engine.submit(submissions):
            found.setdefault(chunk.index, []).extend(chunk.token_ids)
        return found

    wanted = [output.token_ids for output in llm.generate(PROMPTS, GREEDY)]
    assert run(several) == dict(enumerate(wanted))


def test_a_slow_reader_gets_joined_chunks_and_loses_nothing(llm: LLM, engine: AsyncEngine) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12, logprobs=1)

    async def slow() -> list[Chunk]:
        stream = await engine.submit(asked(PROMPTS[0], params))
        await until(lambda: engine.statistics.finished.total() == 1)
        await asyncio.sleep(0.05)
        return [chunk async for chunk in stream]

    chunks = run(slow)
    assert len(chunks) == 1
    (wanted,) = llm.generate([PROMPTS[0]], params)
    assert list(chunks[0].token_ids) == wanted.token_ids
    assert list(chunks[0].logprobs) == wanted.logprobs
    assert (chunks[0].text, chunks[0].finish_reason) == (wanted.text, "length")


def test_loops_of_several_threads_share_it(llm: LLM, engine: AsyncEngine) -> None:
    found: dict[int, list[int]] = {}

    def in_a_loop_of_its_own(number: int) -> None:
        async def one() -> None:
            found[number] = await ids_of(await engine.submit(asked(PROMPTS[number])))

        asyncio.run(one())

    threads = [threading.Thread(target=in_a_loop_of_its_own, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == {i: llm.generate([PROMPTS[i]], GREEDY)[0].token_ids for i in range(3)}


@pytest.mark.parametrize("how", ["leave", "cancel", "thread"])
def test_what_is_given_up_stops_at_once(llm: LLM, engine: AsyncEngine, how: str) -> None:
    async def give_up() -> None:
        stream = await engine.submit(asked([5, 6], LONG))
        await anext(stream)
        assert cache_load(llm.engine).held > 0
        if how == "leave":
            async with stream:
                pass
        elif how == "thread":
            await asyncio.to_thread(stream.abort)
        else:
            task = asyncio.ensure_future(reading(stream))
            await asyncio.sleep(0.02)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await until(lambda: cache_load(llm.engine).held == 0)
        assert (engine.load.running, engine.load.waiting) == (0, 0)
        steps = engine.statistics.steps
        await asyncio.sleep(0.05)
        assert engine.statistics.steps == steps

    async def reading(stream: AnswerStream) -> None:
        async with stream:
            await ids_of(stream)

    run(give_up)
    engine.close()
    assert engine.statistics.finished == {"abort": 1}


def test_a_task_that_is_cancelled_while_it_submits_leaves_nothing(
    llm: LLM, engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = threading.Event()
    submit = type(llm.engine).submit

    def held(self: Any, *arguments: Any, **keywords: Any) -> Any:
        slow.wait(10)
        return submit(self, *arguments, **keywords)

    monkeypatch.setattr(type(llm.engine), "submit", held)

    async def cancelled() -> None:
        task = asyncio.ensure_future(engine.submit(asked([5], LONG)))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.sleep(0.01)
        slow.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: engine.load.running + engine.load.waiting == 0)

    run(cancelled)


def test_waiting_requests_can_be_given_up(llm: LLM, engine: AsyncEngine) -> None:
    async def crowd() -> None:
        streams = [await engine.submit(asked([5], LONG)) for _ in range(6)]
        await until(lambda: (engine.load.running, engine.load.waiting) == (4, 2))
        for stream in reversed(streams):
            stream.abort()
            stream.abort()
        await until(lambda: engine.load.running + engine.load.waiting == 0)

    run(crowd)


def test_what_can_never_run_is_refused_whole(engine: AsyncEngine) -> None:
    async def refused() -> None:
        good, bad = asked(PROMPTS[0])[0], asked([5, 5000])[0]
        with pytest.raises(PromptError, match="5000"):
            await engine.submit([good, bad])
        biased = SamplingParams(logit_bias={5000: 1.0})
        with pytest.raises(SamplingError, match="5000"):
            await engine.submit(asked([5], biased))
        assert len(await ids_of(await engine.submit(asked([5])))) == 12

    run(refused)


def test_too_many_are_refused(llm: LLM) -> None:
    engine = AsyncEngine(llm, max_open=2)

    async def crowd() -> None:
        first = await engine.submit(asked([5], LONG) * 2)
        with pytest.raises(OverloadedError, match="at most 2"):
            await engine.submit(asked([5]))
        first.abort()
        await until(lambda: engine.load.running == 0)
        assert len(await ids_of(await engine.submit(asked([5])))) == 12

    run(crowd)
    engine.close()


def test_draining_finishes_what_runs(llm: LLM) -> None:
    engine = AsyncEngine(llm)

    async def drained() -> None:
        stream = await engine.submit(asked([5], SamplingParams(temperature=0.0, max_tokens=400)))
        draining = asyncio.ensure_future(engine.drain(30))
        await asyncio.sleep(0)
        with pytest.raises(StoppingError):
            await engine.submit(asked([5]))
        assert len(await ids_of(stream)) == 400
        assert await draining is True

    run(drained)
    engine.close()


def test_draining_ends_what_takes_too_long(llm: LLM) -> None:
    engine = AsyncEngine(llm)

    async def drained() -> None:
        stream = await engine.submit(asked([5], LONG))
        assert await engine.drain(0.1) is False
        with pytest.raises(StoppingError, match=r"within 0\.1 s"):
            await ids_of(stream)
        assert cache_load(llm.engine).held == 0

    run(drained)
    engine.close()


def test_closing_ends_open_requests(llm: LLM) -> None:
    engine = AsyncEngine(llm)

    async def closed() -> None:
        stream = await engine.submit(asked([5], LONG))
        await anext(stream)
        await asyncio.to_thread(engine.close)
        with pytest.raises(StoppingError):
            await ids_of(stream)

    run(closed)
    assert cache_load(llm.engine).held == 0


def failing(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, error: Exception, armed: threading.Event
) -> None:
    """Have the third step after ``armed`` is set fail, and every later one."""
    launch = type(llm._executor).launch
    steps = 0

    def launch_some(self: Any, *arguments: Any) -> Any:
        nonlocal steps
        steps += armed.is_set()
        if steps > 2:
            raise error
        return launch(self, *arguments)

    monkeypatch.setattr(type(llm._executor), "launch", launch_some)


@pytest.mark.parametrize("error", [RunError("rank 1 is gone"), ValueError("a bug")])
def test_a_failed_step_fails_everyone_and_everything_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    save_talker(tmp_path)
    llm = LLM(str(tmp_path), threads=1, max_running=2)
    armed = threading.Event()
    failing(llm, monkeypatch, error, armed)
    told: list[LaylineError] = []
    engine = AsyncEngine(llm, on_failure=told.append)

    async def failed() -> None:
        streams = [await engine.submit(asked([5 + i], LONG)) for i in range(4)]
        armed.set()
        for stream in streams:
            with pytest.raises(RunError, match=str(error)):
                await ids_of(stream)
        with pytest.raises(RunError, match=str(error)):
            await engine.submit(asked([5]))
        assert await engine.drain(10) is False
        await until(lambda: bool(told))

    run(failed)
    assert told == [engine.failure]
    assert engine.load.waiting + engine.load.running == 0
    assert engine.statistics.finished["error"] == 4
    engine.close()


def test_ranks_that_are_gone_are_noticed_without_a_step(llm: LLM) -> None:
    class Gone:
        engine = llm.engine
        found: LaylineError | None = None

        def failure(self) -> LaylineError | None:
            return self.found

    source = Gone()
    engine = AsyncEngine(source)
    time.sleep(0.05)
    assert engine.failure is None
    source.found = RunError("rank 0 ended unexpectedly")

    async def noticed() -> None:
        await until(lambda: engine.failure is not None)

    run(noticed)
    engine.close()


def test_a_loop_that_ended_does_not_hold_the_engine(llm: LLM, engine: AsyncEngine) -> None:
    kept: list[AnswerStream] = []

    async def leave_it() -> None:
        kept.append(await engine.submit(asked([5], LONG)))

    asyncio.run(leave_it())

    async def other() -> None:
        await until(lambda: engine.load.running == 0)
        assert len(await ids_of(await engine.submit(asked([5])))) == 12

    run(other)
