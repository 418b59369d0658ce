"""A request's answer does not depend on who runs beside it, before it, or in its place.

The reference is transformers, on float32 tiny models: logits within a tolerance, greedy ids equal.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from layline import LLM, SamplingParams
from layline.config import EngineConfig
from layline.engine.kv import slot_bytes
from layline.engine.scheduler import BLOCK_SIZE
from layline.layers.spans import MixedPhase
from layline.models.registry import family_of
from layline.weights.opening import open_checkpoint
from support.families import reference
from support.sampled import SampledLogits, generate_watched
from support.tiny import save_tiny

TOKENS = 20
GREEDY = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
# One at the edge of a block, one that begins like another, one that is another's beginning.
BASE = [5 + 7 * n % 150 for n in range(37)]
PROMPTS = [BASE, BASE[:32], [*BASE[:20], 9, 9, 9], [3], [44, 2, 8, 100, 17, 61]]
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral-window": ("Mistral", {"sliding_window": 7}),
    "qwen3": ("Qwen3", {}),
    "llama-dynamic-rope": (
        "Llama",
        {
            "max_position_embeddings": 24,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
        },
    ),
}


class Case:
    """A checkpoint and transformers' answers."""

    def __init__(self, name: str, path: Path) -> None:
        family, changes = MODELS[name]
        self.name, self.path = name, str(path)
        self.model = save_tiny(path, family, **changes)
        self.wanted: list[tuple[torch.Tensor, list[int]]] = []
        if name != "llama-dynamic-rope":
            self.wanted = [reference(self.model, prompt, TOKENS) for prompt in PROMPTS]

    def llm(self, **flags: Any) -> LLM:
        return LLM(self.path, threads=1, max_model_len=64, **flags)

    def kv_memory(self, blocks: int) -> int:
        """Bytes for ``blocks`` blocks, and the one that is never given out."""
        checkpoint = open_checkpoint(self.path)
        config = family_of(checkpoint.config).parse(checkpoint.config)
        checkpoint.close()
        return (blocks + 1) * BLOCK_SIZE * slot_bytes(config, torch.float32)

    def check(self, llm: LLM, prompts: list[int]) -> list[Any]:
        """Run ``PROMPTS[i]`` for i in ``prompts`` together and compare; gives the requests."""
        found, logits, requests = generate_watched(llm, [PROMPTS[i] for i in prompts], GREEDY)
        for number, ids, rows in zip(prompts, found, logits, strict=True):
            theirs, their_ids = self.wanted[number]
            theirs = theirs[-TOKENS:]
            assert rows.shape == theirs.shape
            assert float((rows - theirs).abs().max() / theirs.abs().max()) < 1e-4
            assert ids == their_ids
        assert llm._engine.stats().blocks_held == 0
        return requests


@pytest.fixture(scope="module", params=[name for name in MODELS if "dynamic" not in name])
def case(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case("llama", tmp_path_factory.mktemp("llama"))


def test_alone_and_in_a_batch(case: Case) -> None:
    llm = case.llm(prefix_cache=False)
    for number in range(len(PROMPTS)):
        case.check(llm, [number])
    case.check(llm, [*range(len(PROMPTS)), 0, 2])
    assert llm._engine.stats().prefix_hits == 0


@pytest.mark.parametrize("chunk", [1, 7, 16, 33])
def test_across_chunk_sizes(case: Case, chunk: int) -> None:
    case.check(case.llm(prefill_tokens=chunk), list(range(len(PROMPTS))))


@pytest.mark.parametrize("chunk", [1, 7, 40])
def test_prefilled_beside_decodes(case: Case, chunk: int) -> None:
    """Prompts arrive one after the other, so each is computed in steps that decode the others."""
    llm = case.llm(prefill_tokens=chunk, prefix_cache=False)
    watch = SampledLogits(llm)
    requests: list[Any] = []
    for number in range(len(PROMPTS)):
        requests.append(llm._engine.submit(PROMPTS[number], GREEDY))
        while not requests[-1].output_ids:
            before = [len(request.output_ids) for request in requests[:-1]]
            open_ = [request.finish_reason is None for request in requests[:-1]]
            llm._engine.step()
            grown = [len(request.output_ids) for request in requests[:-1]]
            assert [b + live for b, live in zip(before, open_, strict=True)] == grown
    llm._engine.run(requests)
    mixed = [step.parts[0].phase for step in watch.steps if step.parts[0].num_decode]
    assert sum(isinstance(phase, MixedPhase) for phase in mixed) >= len(PROMPTS) - 1
    for number, request in enumerate(requests):
        theirs, their_ids = case.wanted[number]
        theirs, rows = theirs[-TOKENS:], watch.of(request.request_id)
        assert float((rows - theirs).abs().max() / theirs.abs().max()) < 1e-4
        assert request.output_ids == their_ids


def test_after_a_prefix_hit(case: Case) -> None:
    llm = case.llm()
    (first,) = case.check(llm, [0])
    assert first.num_cached == 0
    again, shorter, other = case.check(llm, [0, 1, 2])
    assert (again.num_cached, shorter.num_cached, other.num_cached) == (32, 16, 16)
    # Together they share what the first of them computes.
    fresh = case.llm()
    assert [each.num_cached for each in case.check(fresh, [0, 0, 2, 0])] == [0, 32, 16, 32]


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("chunk", [5, 2048])
def test_after_preemption(case: Case, shares: bool, chunk: int) -> None:
    memory = case.kv_memory(6)
    llm = case.llm(kv_memory=memory, prefix_cache=shares, prefill_tokens=chunk)
    requests = case.check(llm, [*range(len(PROMPTS)), 1, 0])
    assert any(r.num_preempted and r.output_ids for r in requests)


def test_draws_and_penalties_survive_preemption(llama: Case) -> None:
    params = [
        SamplingParams(temperature=1.3, seed=3, max_tokens=TOKENS, ignore_eos=True),
        replace(GREEDY, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.3),
        SamplingParams(temperature=0.9, top_p=0.8, seed=5, max_tokens=TOKENS, logprobs=2),
    ]
    prompts = [PROMPTS[0], PROMPTS[1], PROMPTS[4]]
    roomy = llama.llm(prefix_cache=False)
    wanted = [roomy.generate([p], one)[0] for p, one in zip(prompts, params, strict=True)]
    llm = llama.llm(kv_memory=llama.kv_memory(5))
    found = llm.generate(prompts, params)
    assert llm._engine.stats().preemptions >= 1
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.text == theirs.text
        assert ours.finish_reason == theirs.finish_reason


def test_dynamic_rope_shares_nothing_and_replays_each_token_at_its_length(
    tmp_path: Path,
) -> None:
    """Its keys depend on the length at the time: only a run without preemption says what is right,
    and that one is compared with transformers elsewhere."""
    case = Case("llama-dynamic-rope", tmp_path)
    roomy = case.llm()
    wanted, logits, _ = generate_watched(roomy, PROMPTS, GREEDY)
    assert roomy._engine.stats().prefix_hits == 0
    tight = case.llm(kv_memory=case.kv_memory(6))
    found, ours, requests = generate_watched(tight, PROMPTS, GREEDY)
    assert any(request.num_preempted for request in requests)
    assert found == wanted
    for rows, theirs in zip(ours, logits, strict=True):
        assert float((rows - theirs).abs().max() / theirs.abs().max()) < 1e-4


@pytest.mark.parametrize(
    ("kv_dtype", "tolerance"), [("auto", 1e-4), ("float32", 1e-4), ("bfloat16", 3e-2)]
)
def test_cache_types(llama: Case, kv_dtype: str, tolerance: float) -> None:
    llm = llama.llm(kv_dtype=kv_dtype, prefill_tokens=9)
    itemsize = 2 if kv_dtype == "bfloat16" else 4
    report = llm.memory_report()
    assert report["kv_cache"] == 16 * itemsize * 3 * 2 * 16 * llm._engine._executor.num_blocks
    _, logits, _ = generate_watched(llm, PROMPTS, replace(GREEDY, max_tokens=1))
    errors = [
        float((rows[0] - theirs[len(prompt) - 1]).abs().max() / theirs.abs().max())
        for prompt, rows, (theirs, _) in zip(PROMPTS, logits, llama.wanted, strict=True)
    ]
    assert max(errors) < tolerance
    if kv_dtype == "bfloat16":
        assert max(errors) > 1e-4, "keys and values are not rounded"


def test_a_cache_wider_than_the_run(llama: Case) -> None:
    """Attention reads it without rounding it first."""
    params = replace(GREEDY, max_tokens=4)
    found = {}
    for kv_dtype in ("auto", "float32"):
        llm = llama.llm(dtype="bfloat16", kv_dtype=kv_dtype)
        _, logits, _ = generate_watched(llm, PROMPTS, params)
        found[kv_dtype] = torch.cat(logits)
    assert not torch.equal(found["auto"], found["float32"])


def test_unknown_cache_types_are_refused() -> None:
    from layline.errors import UsageError

    for asked, near in (("bf16", "bfloat16"), ("int4", "int8"), ("fp8_e4m3", "fp8")):
        with pytest.raises(UsageError, match=f"kv_dtype '{asked}' is not one of .* '{near}'"):
            EngineConfig(kv_dtype=asked)
    with pytest.raises(UsageError, match="prefix_cache 1 must be True or False"):
        EngineConfig(prefix_cache=1)  # type: ignore[arg-type]
