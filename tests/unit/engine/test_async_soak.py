"""Thousands of random requests, many of them given up: nothing of them is left."""

from __future__ import annotations

import asyncio
import gc
import random
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from layline import LLM, SamplingParams
from layline.engine.answers import AnswerStream, Part, Submission
from layline.engine.async_engine import AsyncEngine
from layline.engine.load import cache_load
from layline.engine.request import Request
from layline.errors import PromptError
from support.serving import save_talker

REQUESTS = 500
ROUNDS = 5
AT_ONCE = 48
# A leak of one object by each request is ten times as many, and at least 40 bytes each.
MOST_OBJECTS = REQUESTS // 10
MOST_BYTES = 20 * REQUESTS
MOST_RESIDENT = 16 << 20


async def one(engine: AsyncEngine, chance: random.Random) -> str:
    """A request of random length and end; how it ended."""
    prompt = [chance.randrange(3, 199) for _ in range(chance.choice((1, 3, 16, 40, 90)))]
    if chance.random() < 0.05:
        prompt.append(199)
    params = SamplingParams(max_tokens=chance.randrange(1, 16), seed=chance.randrange(1000))
    count = chance.choice((1, 1, 1, 3))
    try:
        async with await engine.submit([Submission(prompt_ids=prompt, params=params)] * count) as s:
            patience = chance.choice((0, 1, 4, 1000, 1000))
            async for _ in s:
                patience -= 1
                if patience <= 0:
                    return "left"
    except PromptError:
        return "refused"
    return "read"


async def many(engine: AsyncEngine, chance: random.Random, count: int = REQUESTS) -> set[str]:
    slots = asyncio.Semaphore(AT_ONCE)

    async def in_a_slot() -> str:
        async with slots:
            task = asyncio.ensure_future(one(engine, chance))
            if chance.random() < 0.2:
                await asyncio.sleep(chance.random() * 0.02)
                task.cancel()
            (found,) = await asyncio.gather(task, return_exceptions=True)
            if isinstance(found, asyncio.CancelledError):
                return "cancelled"
            assert isinstance(found, str), found
            return found

    return set(await asyncio.gather(*[in_a_slot() for _ in range(count)]))


def alive() -> int:
    """Objects of requests that something still refers to."""
    gc.collect()
    # By type: isinstance asks lazy objects of libraries for their class, which makes them.
    return sum(type(each) in (Request, AnswerStream, Part) for each in gc.get_objects())


@dataclass(frozen=True)
class Held:
    """What this process holds: objects that the collector knows, bytes of Python and in all."""

    objects: int
    traced: int
    resident: int

    @classmethod
    def now(cls) -> Held:
        gc.collect()
        traced, _ = tracemalloc.get_traced_memory()
        return cls(len(gc.get_objects()), traced, psutil.Process().memory_info().rss)


def growth(held: list[Held], name: str) -> int:
    """The least by which it grew from one round to the next: caches fill once, leaks go on."""
    return min(getattr(after, name) - getattr(before, name) for before, after in pairwise(held))


@contextmanager
def traced() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()


@pytest.fixture
def llm(tmp_path: Path) -> LLM:
    save_talker(tmp_path, context=128)
    return LLM(str(tmp_path), threads=1, max_running=8, kv_memory="300K", prefill_tokens=64)


def test_nothing_is_left_of_thousands_of_requests(llm: LLM) -> None:
    engine = AsyncEngine(llm)
    chance = random.Random(5)
    others = alive()
    held: list[Held] = []
    with traced():
        for _ in range(ROUNDS):
            found = asyncio.run(asyncio.wait_for(many(engine, chance), 120))
            assert found == {"read", "left", "refused", "cancelled"}
            asyncio.run(engine_is_idle(engine))
            assert cache_load(llm.engine).held == 0
            assert alive() <= others
            held.append(Held.now())
    assert engine.failure is None
    engine.close()
    # The first round warms up.
    assert growth(held[1:], "objects") < MOST_OBJECTS, held
    assert growth(held[1:], "traced") < MOST_BYTES, held
    assert held[-1].resident - held[1].resident < MOST_RESIDENT, held


def test_a_leak_would_be_seen(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each request one small object is kept, a fiftieth of what a stream of it would be."""
    kept: list[Any] = []
    submit = llm.engine.submit

    def leaking(*arguments: Any, **keywords: Any) -> Request:
        kept.append([len(kept)])
        return submit(*arguments, **keywords)

    monkeypatch.setattr(llm.engine, "submit", leaking)
    engine = AsyncEngine(llm)
    chance = random.Random(6)
    held: list[Held] = []
    with traced():
        for _ in range(3):
            asyncio.run(asyncio.wait_for(many(engine, chance, REQUESTS // 2), 120))
            asyncio.run(engine_is_idle(engine))
            held.append(Held.now())
    engine.close()
    # Half of the requests.
    assert growth(held[1:], "objects") > MOST_OBJECTS
    assert growth(held[1:], "traced") > MOST_BYTES


async def engine_is_idle(engine: AsyncEngine) -> None:
    """Wait for the step that gives up the last ones."""
    async with asyncio.timeout(10):
        while engine.load.running + engine.load.waiting + engine.load.cache.held:
            await asyncio.sleep(0.01)
