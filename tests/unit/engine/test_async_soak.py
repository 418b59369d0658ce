"""Many random requests, many of them given up: nothing of them is left."""

from __future__ import annotations

import asyncio
import gc
import random
from pathlib import Path

from layline import LLM, SamplingParams
from layline.engine.answers import AnswerStream, Part, Submission
from layline.engine.async_engine import AsyncEngine
from layline.engine.load import cache_load
from layline.engine.request import Request
from layline.errors import PromptError
from support.serving import save_talker

REQUESTS = 500
AT_ONCE = 48


async def one(engine: AsyncEngine, chance: random.Random) -> str:
    """A request of random length and end; how it ended."""
    prompt = [chance.randrange(3, 199) for _ in range(chance.choice((1, 3, 16, 40, 90)))]
    if chance.random() < 0.05:
        prompt.append(199)
    params = SamplingParams(max_tokens=chance.randrange(1, 24), seed=chance.randrange(1000))
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


async def many(engine: AsyncEngine, chance: random.Random) -> set[str]:
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

    return set(await asyncio.gather(*[in_a_slot() for _ in range(REQUESTS)]))


def alive() -> int:
    """Objects of requests that something still refers to."""
    gc.collect()
    # By type: isinstance asks lazy objects of libraries for their class, which makes them.
    return sum(type(each) in (Request, AnswerStream, Part) for each in gc.get_objects())


def test_nothing_is_left_of_many_requests(tmp_path: Path) -> None:
    save_talker(tmp_path, context=128)
    llm = LLM(str(tmp_path), threads=1, max_running=8, kv_memory="300K", prefill_tokens=64)
    engine = AsyncEngine(llm)
    chance = random.Random(5)
    others = alive()
    for _ in range(2):
        found = asyncio.run(asyncio.wait_for(many(engine, chance), 120))
        assert found == {"read", "left", "refused", "cancelled"}
        asyncio.run(engine_is_idle(engine))
        assert cache_load(llm.engine).held == 0
        assert alive() <= others
    assert engine.failure is None
    engine.close()


async def engine_is_idle(engine: AsyncEngine) -> None:
    """Wait for the step that gives up the last ones."""
    async with asyncio.timeout(10):
        while engine.load.running + engine.load.waiting + engine.load.cache.held:
            await asyncio.sleep(0.01)
