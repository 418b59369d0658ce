"""Log-probabilities of prompts: transformers' on the same checkpoint, however they are computed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from layline import LLM, SamplingParams
from layline.engine.kv import slot_bytes
from layline.engine.request import FinishReason
from layline.engine.row_reader import ROWS_AT_ONCE
from layline.engine.scheduler import BLOCK_SIZE
from layline.errors import SamplingError
from layline.layers.known_tokens import KnownToken, _on_device, known_logprobs
from layline.models.registry import family_of
from layline.weights.opening import open_checkpoint
from support.families import CASES
from support.tiny import VOCAB, save_tiny

TOLERANCE = 2e-4
CONTEXT = 160
# Below and above a block, a chunk and the rows that are scored together.
LENGTHS = (1, 2, 16, 17, 40, ROWS_AT_ONCE + 2, 150)
SCORE = SamplingParams(max_tokens=0, prompt_logprobs=3, temperature=0.0)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in LENGTHS]


class Scored:
    """A checkpoint, and transformers' log-probabilities of prompts."""

    overlap = False

    def __init__(self, path: Path, family: str, **changes: Any) -> None:
        self.path = str(path)
        shape = {"max_position_embeddings": CONTEXT, **changes}
        self.model = save_tiny(path, family, **shape)

    @torch.inference_mode()
    def table(self, ids: list[int]) -> torch.Tensor:
        return self.model(torch.tensor([ids])).logits[0].float().log_softmax(-1)

    def check(self, ids: list[int], found: Any, top: int = 3) -> None:
        """``found``, with None for the first token, against the reference."""
        assert found is not None
        assert len(found) == len(ids)
        assert found[0] is None
        table = self.table(ids)
        for row, (token_id, one) in enumerate(zip(ids[1:], found[1:], strict=True)):
            assert one.token_id == token_id
            assert one.logprob == pytest.approx(float(table[row, token_id]), abs=TOLERANCE)
            best = table[row].topk(top)
            assert len(one.top) == top
            assert [value for _, value in one.top] == pytest.approx(
                best.values.tolist(), abs=TOLERANCE
            )
            assert [i for i, _ in one.top] == best.indices.tolist()


@pytest.fixture(scope="module", params=[False, True], ids=["step by step", "overlapped"])
def llama(tmp_path_factory: pytest.TempPathFactory, request: Any) -> Scored:
    scored = Scored(tmp_path_factory.mktemp("llama"), "Llama")
    scored.overlap = request.param
    return scored


@pytest.mark.parametrize("case", ["llama-biases", "mistral-window", "qwen2", "qwen3", "llama-tied"])
def test_they_are_those_of_transformers(tmp_path: Path, case: str) -> None:
    family, changes = CASES[case]
    scored = Scored(tmp_path, family, **changes)
    llm = LLM(scored.path, threads=1, prefill_tokens=37)
    for ids, output in zip(prompts(), llm.generate(prompts(), SCORE), strict=True):
        scored.check(ids, output.prompt_logprobs)
        assert (output.text, output.token_ids, output.finish_reason) == ("", [], "length")
        assert output.usage.completion_tokens == 0


@pytest.mark.parametrize("chunk", [1, 7, 64, 2048])
def test_chunks_do_not_change_them(llama: Scored, chunk: int) -> None:
    llm = LLM(llama.path, threads=1, overlap=llama.overlap, prefill_tokens=chunk)
    for ids, output in zip(prompts(), llm.generate(prompts(), SCORE), strict=True):
        llama.check(ids, output.prompt_logprobs)
    assert llm._engine.stats().blocks_held == 0


def test_a_prompt_may_fill_the_context_where_nothing_is_generated(llama: Scored) -> None:
    llm = LLM(llama.path, threads=1, overlap=llama.overlap)
    ids = (prompts()[-1] * 2)[:CONTEXT]
    llama.check(ids, llm.generate([ids], SCORE)[0].prompt_logprobs)


def test_they_come_with_the_answer_and_leave_it_as_it_is(llama: Scored) -> None:
    llm = LLM(llama.path, threads=1, overlap=llama.overlap, prefill_tokens=16)
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=2)
    alone = llm.generate(prompts()[:6], params)
    both = SamplingParams(
        max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=2, prompt_logprobs=3
    )
    for output, with_prompt in zip(alone, llm.generate(prompts()[:6], both), strict=True):
        assert output.prompt_logprobs is None
        assert with_prompt.token_ids == output.token_ids
        assert len(with_prompt.logprobs or []) == 8
        llama.check(output.prompt_token_ids, with_prompt.prompt_logprobs)


def test_a_cached_prompt_is_computed_for_them_and_offered_to_others(llama: Scored) -> None:
    llm = LLM(llama.path, threads=1, overlap=llama.overlap)
    ids = prompts()[-1]
    plain = SamplingParams(max_tokens=1, temperature=0.0)
    llm.generate([ids], plain)
    hits = llm._engine.stats().prefix_hits
    llama.check(ids, llm.generate([ids], SCORE)[0].prompt_logprobs)
    assert llm._engine.stats().prefix_hits == hits, "what is scored is not taken from the cache"
    fresh = LLM(llama.path, threads=1, overlap=llama.overlap)
    fresh.generate([ids], SCORE)
    fresh.generate([ids], plain)
    assert fresh._engine.stats().prefix_hits == (len(ids) - 1) // BLOCK_SIZE * BLOCK_SIZE


def kv_memory(path: str, blocks: int) -> int:
    checkpoint = open_checkpoint(path)
    config = family_of(checkpoint.config).parse(checkpoint.config)
    checkpoint.close()
    return (blocks + 1) * BLOCK_SIZE * slot_bytes(config, torch.float32)


@pytest.mark.parametrize("shares", [True, False])
def test_preemption_neither_loses_nor_doubles_them(llama: Scored, shares: bool) -> None:
    """Decodes take the blocks of a prompt that is half computed, and of those that generate."""
    llm = LLM(
        llama.path,
        threads=1,
        max_model_len=96,
        kv_memory=kv_memory(llama.path, 7),
        prefill_tokens=4,
        prefix_cache=shares,
        overlap=llama.overlap,
    )
    params = SamplingParams(
        max_tokens=40, temperature=0.0, ignore_eos=True, prompt_logprobs=3, seed=1
    )
    wanted = prompts()[1:5]
    requests = [llm._engine.submit(ids, params) for ids in wanted]
    requests.append(llm._engine.submit(wanted[-1], SCORE))
    wanted.append(wanted[-1])
    llm._engine.run(requests)
    assert llm._engine.stats().preemptions > 0
    lost = [r for r in requests if r.num_preempted]
    assert lost
    for ids, request in zip(wanted, requests, strict=True):
        llama.check(ids, [None, *request.prompt_logprobs])
        assert request.finish_reason is FinishReason.LENGTH
    assert llm._engine.stats().blocks_held == 0


def test_a_prompt_preempted_half_way_is_read_on(llama: Scored) -> None:
    llm = LLM(llama.path, threads=1, overlap=llama.overlap, prefill_tokens=16)
    engine, ids = llm._engine, prompts()[-1]
    request = engine.submit(ids, SCORE)
    for _ in range(3):
        engine.step()
    # With overlap a fourth chunk is under way.
    assert request.num_read == (64 if llama.overlap else 48)
    (queue,) = engine._scheduler.parts
    queue._preempt(queue._running[request.request_id])
    engine.run([request])
    llama.check(ids, [None, *request.prompt_logprobs])
    # What had been read came back from the cache, and the chunk that was under way.
    assert engine.stats().prefix_hits == (64 if llama.overlap else 48)


def test_a_failed_step_does_not_double_them(llama: Scored, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(llama.path, threads=1, overlap=llama.overlap, prefill_tokens=16)
    engine, ids = llm._engine, prompts()[-1]
    request = engine.submit(ids, SCORE)
    collect, calls = type(engine._executor).collect, []

    def sometimes(self: Any, *arguments: Any) -> Any:
        result = collect(self, *arguments)
        calls.append(1)
        if len(calls) % 2:
            raise OSError("planted")
        return result

    monkeypatch.setattr(type(engine._executor), "collect", sometimes)
    while request.finish_reason is None:
        try:
            engine.step()
        except OSError:
            continue
    assert len(calls) > 6
    llama.check(ids, [None, *request.prompt_logprobs])


def test_at_most_so_many_rows_are_scored_at_a_time(
    llama: Scored, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(llama.path, threads=1, overlap=llama.overlap)
    seen: list[int] = []
    model: Any = llm._engine._executor
    decoder = model.loaded.runner.model
    logits = type(decoder).logits

    def counted(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        seen.append(hidden.shape[0])
        return logits(self, hidden)

    monkeypatch.setattr(type(decoder), "logits", counted)
    llm.generate(prompts(), SCORE)
    assert max(seen) == ROWS_AT_ONCE
    assert sum(seen) == sum(LENGTHS) - len(LENGTHS), "no row that nobody asked for"


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"max_tokens": 0}, "max_tokens 0 is out of range; expected 1 or more"),
        ({"prompt_logprobs": 21}, "prompt_logprobs 21 is out of range; expected 0 to 20"),
        ({"prompt_logprobs": -1}, "prompt_logprobs -1 is out of range"),
        ({"prompt_logprobs": True}, "prompt_logprobs True is not an integer"),
        ({"prompt_logprobs": 1, "max_tokens": -1}, "max_tokens -1 is out of range"),
        ({"prompt_logprobs": 1, "max_tokens": 0, "min_tokens": 1}, "min_tokens 1 is above"),
    ],
)
def test_bad_parameters(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(SamplingError, match=text):
        SamplingParams(**fields)


@pytest.mark.parametrize("read", [known_logprobs, _on_device])
def test_rows_that_say_nothing_and_tokens_without_an_id(read: Any) -> None:
    logits = torch.randn(5, 12, generator=torch.Generator().manual_seed(1))
    logits[1, 3] = math.nan
    logits[2, 4] = math.inf
    logits[3] = -math.inf
    known = [KnownToken(2, 3, 10), *[KnownToken(1, 1, 12)] * 3, KnownToken(11, 2, 10)]
    first, *bad, last = read(logits, known)
    wanted = logits[0, :10].log_softmax(-1)
    assert first.logprob == pytest.approx(float(wanted[2]), abs=1e-6)
    assert [i for i, _ in first.top] == wanted.topk(3).indices.tolist()
    assert bad == [None] * 3
    assert last.logprob == -math.inf
    assert [i for i, _ in last.top] == logits[4, :10].topk(2).indices.tolist()
