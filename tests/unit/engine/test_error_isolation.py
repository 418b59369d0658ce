"""An error that belongs to one request ends that request, and changes nothing for any other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from layline import LLM, SamplingParams
from layline.engine.answers import AnswerStream, Chunk, Submission
from layline.engine.async_engine import AsyncEngine
from layline.engine.kv import slot_bytes
from layline.engine.load import cache_load
from layline.engine.local import LocalExecutor
from layline.engine.request import FinishReason
from layline.engine.scheduler import BLOCK_SIZE
from layline.errors import RequestError
from layline.layers.sampler import Sampler
from layline.layers.sampling_state import RowState
from layline.models.registry import family_of
from layline.weights.opening import open_checkpoint
from support.families import reference
from support.poisoned import POISON, save_poisoned

GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
DRAWN = SamplingParams(temperature=1.0, max_tokens=10, ignore_eos=True, seed=3)
GOOD = [[5 + 7 * n % 60 for n in range(length)] for length in (37, 20, 3, 16)]
BAD = [*GOOD[0][:35], POISON, 9]
Checkpoint = tuple[Path, Any, bool]
"""Its folder, transformers' model, and whether steps overlap."""
NO_TOKEN = r"the request failed: no token to sample: its logits hold NaN"


@pytest.fixture(scope="module", params=[False, True], ids=["step by step", "overlapped"])
def checkpoint(tmp_path_factory: pytest.TempPathFactory, request: Any) -> Checkpoint:
    path = tmp_path_factory.mktemp("poisoned")
    return path, save_poisoned(path, max_position_embeddings=96), request.param


def llm_on(checkpoint: Checkpoint, **flags: Any) -> LLM:
    return LLM(str(checkpoint[0]), threads=1, overlap=checkpoint[2], **flags)


def wanted(checkpoint: Checkpoint) -> list[list[int]]:
    return [reference(checkpoint[1], ids, GREEDY.max_tokens or 0)[1] for ids in GOOD]


def accounted(llm: LLM) -> None:
    """Nothing runs and nothing is held."""
    engine = llm._engine
    assert not engine.has_work
    assert engine.stats().blocks_held == 0
    executor = engine._executor
    assert isinstance(executor, LocalExecutor)
    assert len(executor._rows) == 0


@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("chunk", [7, 2048])
def test_nan_in_one_row_ends_its_own_request(
    checkpoint: Checkpoint, params: SamplingParams, chunk: int
) -> None:
    llm = llm_on(checkpoint, prefill_tokens=chunk)
    alone = [llm.generate([ids], params)[0].token_ids for ids in GOOD]
    if params is GREEDY:
        assert alone == wanted(checkpoint)
    for _ in range(2):
        with pytest.raises(RequestError, match=rf"^prompt 1: {NO_TOKEN}") as caught:
            llm.generate([GOOD[0], BAD, *GOOD[1:]], params)
        first, bad, *rest = caught.value.outputs
        assert [output.token_ids for output in (first, *rest)] == alone
        assert (bad.finish_reason, bad.token_ids, bad.text) == ("error", [], "")
        assert bad.error is not None
        assert "\n" not in bad.error
        accounted(llm)
    assert llm.generate(GOOD, params)[0].token_ids == alone[0]


def test_nan_while_it_generates(checkpoint: Checkpoint) -> None:
    """Its own first token is the poison; that token stays."""
    llm = llm_on(checkpoint)
    biased = SamplingParams(temperature=0.0, max_tokens=10, logit_bias={POISON: 100.0})
    requests = [llm._engine.submit(ids, GREEDY) for ids in GOOD]
    bad = llm._engine.submit(GOOD[1], biased)
    llm._engine.run([*requests, bad])
    assert (bad.finish_reason, bad.output_ids) == (FinishReason.ERROR, [POISON])
    assert [request.output_ids for request in requests] == wanted(checkpoint)
    accounted(llm)


def memory_of(path: Path, blocks: int) -> int:
    found = open_checkpoint(path)
    config = family_of(found.config).parse(found.config)
    found.close()
    return (blocks + 1) * BLOCK_SIZE * slot_bytes(config, torch.float32)


@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "fp8"])
@pytest.mark.parametrize("shares", [True, False])
def test_poison_in_the_cache_reaches_nobody(
    checkpoint: Checkpoint, shares: bool, kv_dtype: str
) -> None:
    """Every block has held NaN before others use it, and longer neighbours pad shorter ones."""
    flags = {"prefix_cache": shares, "max_model_len": 96, "kv_dtype": kv_dtype}
    fresh = llm_on(checkpoint, **flags)
    alone = [fresh.generate([ids], GREEDY)[0].token_ids for ids in GOOD]
    if kv_dtype == "auto":
        assert alone == wanted(checkpoint)
    llm = llm_on(checkpoint, kv_memory=memory_of(checkpoint[0], 9), **flags)
    with pytest.raises(RequestError) as caught:
        llm.generate([[POISON, *range(3, 93)], [POISON] * 90], GREEDY)
    assert [output.finish_reason for output in caught.value.outputs] == ["error"] * 2
    executor = llm._engine._executor
    assert isinstance(executor, LocalExecutor)
    caches = [layer.self_attn.cache for layer in executor.loaded.runner.model.layers]
    for cache in caches:
        assert cache is not None
        assert cache.read(slice(BLOCK_SIZE, None)).isnan().any()
        assert not cache.read(slice(BLOCK_SIZE)).any()
    for together in (GOOD, GOOD[::-1], GOOD[:1], GOOD[1:3]):
        outputs = llm.generate(together, GREEDY)
        indices = [GOOD.index(ids) for ids in together]
        assert [output.token_ids for output in outputs] == [alone[i] for i in indices]
    accounted(llm)


def test_nobody_begins_with_what_a_failed_request_computed(checkpoint: Checkpoint) -> None:
    llm = llm_on(checkpoint)
    with pytest.raises(RequestError):
        llm.generate([BAD], GREEDY)
    before = llm._engine.stats()
    assert before.blocks_idle == 0
    assert llm.generate([GOOD[0]], GREEDY)[0].token_ids == wanted(checkpoint)[0]
    assert llm._engine.stats().prefix_hits == before.prefix_hits


def test_blocks_that_others_hold_stay_theirs(checkpoint: Checkpoint) -> None:
    """Two requests begin alike; one fails, the other goes on in the same blocks."""
    llm = llm_on(checkpoint)
    first = llm._engine.submit(GOOD[0], GREEDY)
    llm._engine.step()
    second = llm._engine.submit(BAD, GREEDY)
    llm._engine.run([first, second])
    assert second.num_cached == 2 * BLOCK_SIZE
    assert second.finish_reason is FinishReason.ERROR
    assert first.output_ids == wanted(checkpoint)[0]
    accounted(llm)
    assert llm.generate([GOOD[0]], GREEDY)[0].token_ids == wanted(checkpoint)[0]


def test_scores_that_are_not_finite(checkpoint: Checkpoint) -> None:
    llm = llm_on(checkpoint, prefill_tokens=8)
    score = SamplingParams(max_tokens=0, prompt_logprobs=1)
    with pytest.raises(RequestError, match=r"^prompt 0: .*states or logits hold NaN") as caught:
        llm.generate([BAD, GOOD[0]], score)
    assert len(caught.value.outputs[1].prompt_logprobs) == len(GOOD[0])
    accounted(llm)


def test_an_error_in_sampling_one_row(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = llm_on(checkpoint)
    alone = [output.token_ids for output in llm.generate(GOOD, DRAWN)]
    requests = [llm._engine.submit(ids, DRAWN) for ids in GOOD]
    executor = llm._engine._executor
    assert isinstance(executor, LocalExecutor)
    state = executor._rows._requests[requests[2].request_id].state
    uniform = RowState.uniform

    def broken(self: RowState, stream: int = 0) -> float:
        if self is state and self.num_produced == 4:
            raise KeyError("what was asked")
        return uniform(self, stream)

    monkeypatch.setattr(RowState, "uniform", broken)
    llm._engine.run(requests)
    assert str(requests[2].error) == "the request failed: an internal error (KeyError)"
    assert "broken" in "".join(requests[2].error.__notes__), "it says where"
    assert requests[2].output_ids == alone[2][:4]
    assert [requests[i].output_ids for i in (0, 1, 3)] == [alone[i] for i in (0, 1, 3)]
    accounted(llm)


def test_an_error_in_taking_a_token(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A grammar, say, that cannot go past what was drawn."""
    llm = llm_on(checkpoint)
    # Only draws that depend on earlier tokens take them.
    params = replace(DRAWN, frequency_penalty=0.5)
    alone = [output.token_ids for output in llm.generate(GOOD, params)]
    requests = [llm._engine.submit(ids, params) for ids in GOOD]
    executor = llm._engine._executor
    assert isinstance(executor, LocalExecutor)
    state = executor._rows._requests[requests[0].request_id].state
    observe = RowState.observe

    def broken(self: RowState, token_id: int) -> None:
        if self is state and self.num_produced == 3:
            raise ValueError("what was asked")
        observe(self, token_id)

    monkeypatch.setattr(RowState, "observe", broken)
    llm._engine.run(requests)
    assert str(requests[0].error) == "the request failed: an internal error (ValueError)"
    assert requests[0].output_ids == alone[0][:3]
    assert [request.output_ids for request in requests[1:]] == alone[1:]
    accounted(llm)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("planted"), MemoryError("planted")])
def test_errors_of_the_whole_step_are_nobodys_own(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    llm = llm_on(checkpoint)

    def broken(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(Sampler, "sample", broken)
    with pytest.raises(type(error), match="planted"):
        llm.generate(GOOD, GREEDY)
    accounted(llm)


def test_a_stream_raises_after_what_it_has(checkpoint: Checkpoint) -> None:
    llm = llm_on(checkpoint)
    with llm.stream(BAD, GREEDY) as stream, pytest.raises(RequestError, match=NO_TOKEN):
        next(stream)
    accounted(llm)


def test_an_interruption_is_no_error_of_a_request(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = llm_on(checkpoint)
    requests = [llm._engine.submit(ids, GREEDY) for ids in GOOD]

    def interrupted(_: int) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(requests[0].decoder, "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm._engine.run(requests)
    assert requests[0].finish_reason is FinishReason.ABORT
    llm._engine.run(requests)
    assert [r.output_ids for r in requests[1:]] == wanted(checkpoint)[1:]


def run(work: Callable[[], Any]) -> Any:
    async def limited() -> Any:
        async with asyncio.timeout(60):
            return await work()

    return asyncio.run(limited())


def asked(*prompts: list[int]) -> list[Submission]:
    return [Submission(prompt_ids=ids, params=GREEDY) for ids in prompts]


async def ids_of(stream: AnswerStream) -> list[int]:
    async with stream:
        return [token_id async for chunk in stream for token_id in chunk.token_ids]


async def everything(engine: AsyncEngine, bad: list[Submission]) -> list[Any]:
    """Good streams and one with ``bad`` in it, all at once."""
    streams = [await engine.submit(asked(ids)) for ids in GOOD]
    streams.insert(1, await engine.submit(bad))
    return await asyncio.gather(*map(ids_of, streams), return_exceptions=True)


@pytest.mark.parametrize("bad", [[BAD], [BAD, GOOD[0]], [GOOD[0], BAD, BAD]], ids=len)
def test_the_asynchronous_engine_goes_on(checkpoint: Checkpoint, bad: Any) -> None:
    llm = llm_on(checkpoint)
    engine = AsyncEngine(llm)
    for count in (1, 2):
        first, error, *rest = run(lambda: everything(engine, asked(*bad)))
        assert isinstance(error, RequestError)
        assert [first, *rest] == wanted(checkpoint)
        run(lambda: idle(engine))
        assert engine.failure is None
        assert engine.statistics.finished["length"] >= len(GOOD) * count
        assert engine.statistics.finished["error"] >= count
        total = (len(GOOD) + len(bad)) * count
        assert engine.statistics.finished.total() == total, "each is counted once"
    engine.close()
    accounted(llm)


async def idle(engine: AsyncEngine) -> None:
    while engine.load.running or engine.load.waiting or engine._open:
        await asyncio.sleep(0.005)


@pytest.mark.parametrize("where", ["chunk", "deliver"])
def test_an_error_in_delivery_is_one_streams(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    llm = llm_on(checkpoint)
    engine = AsyncEngine(llm)
    make, deliver = AsyncEngine._chunk, AnswerStream.deliver
    marked = [8, 8, 8]

    def broken_chunk(self: Any, part: Any, *arguments: Any) -> Chunk:
        if list(part.submission.prompt_ids) == marked and part.num_tokens == 2:
            raise KeyError("what was asked")
        return make(self, part, *arguments)

    def broken_deliver(self: Any, chunk: Chunk) -> None:
        if list(self.parts[0].submission.prompt_ids) == marked:
            raise KeyError("what was asked")
        deliver(self, chunk)

    if where == "chunk":
        monkeypatch.setattr(AsyncEngine, "_chunk", broken_chunk)
    else:
        monkeypatch.setattr(AnswerStream, "deliver", broken_deliver)
    first, error, *rest = run(lambda: everything(engine, asked(marked)))
    assert isinstance(error, RequestError)
    assert str(error) == "the request failed: an internal error (KeyError)"
    assert [first, *rest] == wanted(checkpoint)
    run(lambda: idle(engine))
    assert engine.failure is None
    assert cache_load(llm.engine).held == 0
    engine.close()
    accounted(llm)
