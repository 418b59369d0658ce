"""``batch_invariant``: the bits of a request's logits do not depend on what runs beside it, on
chunks, cached prefixes or preemption. Without it they do, which the same comparisons show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from layline import LLM, SamplingParams
from layline.config import EngineConfig
from layline.errors import UsageError
from layline.kernels.dense_matmul import dense_matmul
from layline.kernels.native.library import native_kernels
from layline.layers.invariance import same_bits
from support.families import CASES, reference
from support.model import smollm2_path
from support.run import run_greedy
from support.sampled import SampledLogits
from support.tiny import save_tiny

TOKENS = 18
GREEDY = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
BASE = [5 + 7 * n % 150 for n in range(37)]
PROMPTS = [BASE, BASE[:32], [*BASE[:20], 9, 9, 9], [3], [44, 2, 8, 100, 17, 61]]
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "float32": ("llama", {}),
    "float32 biases": ("llama-biases", {}),
    "bfloat16": ("qwen3-window", {"dtype": "bfloat16"}),
    "bfloat16 window": ("mistral-window", {"dtype": "bfloat16"}),
    "float32 on int8 keys": ("qwen2-window", {"kv_dtype": "int8"}),
    "packed": ("smollm2", {}),
}
Answer = tuple[list[int], torch.Tensor]


class Case:
    """A model, and each prompt's answer alone in one chunk."""

    def __init__(self, path: str, flags: dict[str, Any], invariant: bool) -> None:
        self.path = path
        self.flags = {**flags, "threads": 1, "max_model_len": 64, "batch_invariant": invariant}
        llm = self.llm(prefix_cache=False)
        self.wanted = [run(llm, [number])[0] for number in range(len(PROMPTS))]

    def llm(self, **flags: Any) -> LLM:
        return LLM(self.path, **self.flags, **flags)

    def blocks(self, count: int) -> int:
        """Bytes of as many blocks, and of the one that is never given out."""
        llm = self.llm()
        each = llm.memory_report()["kv_cache"] // llm._engine._executor.num_blocks
        return (count + 1) * each

    def changed(self, answers: list[Answer], numbers: list[int]) -> int:
        """How many of the answers have a bit that is not as wanted."""
        same = 0
        for number, (ids, logits) in zip(numbers, answers, strict=True):
            wanted_ids, wanted = self.wanted[number]
            same += ids == wanted_ids and same_bits(logits, wanted)
        return len(numbers) - same


def run(llm: LLM, numbers: list[int], stagger: int = 0) -> list[Answer]:
    """Run those prompts together; the next enters after ``stagger`` steps."""
    watch, requests = SampledLogits(llm), []
    for number in numbers:
        requests.append(llm._engine.submit(PROMPTS[number], GREEDY))
        for _ in range(stagger):
            llm._engine.step()
    llm._engine.run(requests)
    return [(list(each.output_ids), watch.of(each.request_id)) for each in requests]


def path_of(name: str, folder: Path) -> str:
    if name == "smollm2":
        if native_kernels().library is None:
            pytest.skip(native_kernels().reason)
        return smollm2_path()
    family, changes = CASES[name]
    save_tiny(folder, family, **changes)
    return str(folder)


@pytest.fixture(scope="module", params=MODELS)
def case(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Case:
    name, flags = MODELS[request.param]
    return Case(path_of(name, tmp_path_factory.mktemp("model")), flags, invariant=True)


EVERYONE = [*range(len(PROMPTS)), 0, 2]


def test_in_a_batch(case: Case) -> None:
    assert case.changed(run(case.llm(prefix_cache=False), EVERYONE), EVERYONE) == 0


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_across_chunk_sizes(case: Case, chunk: int) -> None:
    assert case.changed(run(case.llm(prefill_tokens=chunk), EVERYONE), EVERYONE) == 0


def test_prompts_beside_answers(case: Case) -> None:
    llm = case.llm(prefill_tokens=9, max_running=4)
    answers = run(llm, EVERYONE, stagger=3)
    assert case.changed(answers, EVERYONE) == 0


def test_after_a_prefix_hit(case: Case) -> None:
    llm = case.llm()
    run(llm, [0])
    hits = llm._engine.stats().prefix_hits
    assert case.changed(run(llm, [0, 1, 2]), [0, 1, 2]) == 0
    assert llm._engine.stats().prefix_hits >= hits + 64


@pytest.mark.parametrize("chunk", [5, 2048])
def test_after_preemption(case: Case, chunk: int) -> None:
    llm = case.llm(kv_memory=case.blocks(6), prefill_tokens=chunk)
    assert case.changed(run(llm, EVERYONE), EVERYONE) == 0
    assert llm._engine.stats().preemptions >= 1


def test_draws(case: Case) -> None:
    params = [SamplingParams(temperature=1.1, seed=n, max_tokens=TOKENS) for n in range(5)]
    llm = case.llm(prefill_tokens=7)
    alone = [llm.generate([p], one)[0] for p, one in zip(PROMPTS, params, strict=True)]
    together = llm.generate(PROMPTS, params)
    assert [each.token_ids for each in together] == [each.token_ids for each in alone]


@pytest.mark.parametrize("name", ["float32", "bfloat16", "packed"])
def test_without_it_the_same_comparison_finds_differences(tmp_path: Path, name: str) -> None:
    model, flags = MODELS[name]
    case = Case(path_of(model, tmp_path), flags, invariant=False)
    changed = case.changed(run(case.llm(prefill_tokens=7), EVERYONE), EVERYONE)
    assert changed > 0


def test_a_kernel_that_knows_its_batch_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the check at loading, and, where that is blind, by the comparison."""
    path = path_of("llama", tmp_path)

    def planted(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return dense_matmul(x, weight, bias, upcast=False) * (1 + x.shape[0] * 2**-20)

    monkeypatch.setattr("layline.layers.linear.tiled_matmul", planted)
    with pytest.raises(UsageError, match=r"batch_invariant does not hold here: .* a product"):
        Case(path, {}, invariant=True)
    monkeypatch.setattr("layline.layers.invariance.RowClaims.check", lambda *_: None)
    case = Case(path, {}, invariant=True)
    assert case.changed(run(case.llm(prefix_cache=False), EVERYONE), EVERYONE) == len(EVERYONE)


@pytest.mark.parametrize("name", ["llama", "llama-mqa", "qwen2-window", "mistral-window", "qwen3"])
def test_it_computes_the_model(tmp_path: Path, name: str) -> None:
    family, changes = CASES[name]
    model = save_tiny(tmp_path, family, **changes)
    config = EngineConfig(
        model=str(tmp_path), threads=1, max_model_len=64, batch_invariant=True, prefill_tokens=9
    )
    found, ids, _ = run_greedy(config, PROMPTS, TOKENS)
    for prompt, rows, ours in zip(PROMPTS, found, ids, strict=True):
        theirs, their_ids = reference(model, prompt, TOKENS)
        assert float((rows - theirs).abs().max() / theirs.abs().max()) < 1e-4
        assert ours == their_ids


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"device": "cuda"}, "does not go with device 'cuda'; expected device cpu"),
        ({"tp": 3}, "does not go with tp 3: .* expected tp 2"),
        ({"tp": 2, "sequence_parallel": True}, "does not go with sequence_parallel"),
        ({"tp": 2, "input_scattered": True}, "does not go with input_scattered"),
        ({"tp": 2, "quantised_all_reduce": True}, "does not go with quantised_all_reduce"),
    ],
)
def test_where_it_cannot_hold_it_is_refused(flags: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=f"batch_invariant {says}"):
        EngineConfig(batch_invariant=True, **flags)
    with pytest.raises(UsageError, match="batch_invariant 'yes' must be True or False"):
        EngineConfig(batch_invariant="yes")  # type: ignore[arg-type]


def test_dynamic_rope_is_refused(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    save_tiny(tmp_path, "Llama", rope_parameters=rope)
    with pytest.raises(UsageError, match="batch_invariant does not go with dynamic rope"):
        LLM(str(tmp_path), batch_invariant=True)


def test_quantised_matrices_need_the_native_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAYLINE_CPU_KERNELS", "torch")
    with pytest.raises(UsageError, match=r"needs the native kernels .* expected a dtype other"):
        LLM(smollm2_path(), batch_invariant=True, threads=1, max_model_len=64)
