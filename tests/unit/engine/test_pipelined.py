"""A model over pipeline stages in one process answers as it does on one stage.

In batch-invariant FP32 every log-probability is the same bit by bit, whatever shares its step: so
what is compared is the split alone, not how a batch is divided over microbatches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from layline import LLM, SamplingParams
from layline.engine.step_times import StepTimes
from layline.errors import UsageError
from layline.pipeline.fence import even_fence
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

GREEDY = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True, logprobs=5)
# Prompts of up to 37 tokens are longer than each window, and than each chunk.
FAMILIES = [
    "llama",
    "llama-tied",
    "mistral-window",
    "qwen2-window",
    "qwen3",
    "qwen3-window",
    "llama-rope-yarn",
]
EVEN: list[dict[str, Any]] = [{"pp_stages": n} for n in (2, 3, 4, 8)]
UNEVEN: list[dict[str, Any]] = [
    {"pp_stages": 2, "pp_splits": (7,)},
    {"pp_stages": 4, "pp_splits": (1, 2, 6)},
    {"pp_stages": 3, "pp_splits": "auto"},
]


class Case:
    """A checkpoint and what it answers on one stage."""

    def __init__(self, path: Path, name: str) -> None:
        self.path = save_deep(path, name)
        self.invariant = name != "llama-dynamic"
        with self.llm() as llm:
            self.wanted = found_in(llm.generate(PROMPTS, GREEDY))

    def llm(self, **flags: Any) -> LLM:
        settings = {"threads": 1, "batch_invariant": self.invariant, **flags}
        return LLM(self.path, **settings)


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp("deep"), request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    with ended_streams():
        yield


def check(case: Case, way: dict[str, Any]) -> None:
    """Answers bit by bit, every step split, one more in flight than stages, fed on the devices."""
    with case.llm(prefill_tokens=9, **way) as llm:
        watch = watched(llm)
        assert found_in(llm.generate(PROMPTS, GREEDY)) == case.wanted
        assert count(llm, "batch_splits") == len(watch.steps)
        assert watch.most == way["pp_stages"] + 1
        assert watch.fed > 0
        assert watch.shared == set()


@pytest.mark.parametrize("way", [EVEN[0], EVEN[3], UNEVEN[1]], ids=str)
def test_every_bit_is_that_of_one_stage(case: Case, way: dict[str, Any]) -> None:
    # pipeline G39, G40, G53
    check(case, way)


@pytest.mark.parametrize("way", [*EVEN, *UNEVEN], ids=str)
def test_every_way_to_cut(llama: Case, way: dict[str, Any]) -> None:  # pipeline G39, G40
    check(llama, way)


@pytest.mark.parametrize("name", ["llama", "llama-biases", "mistral-window", "llama-dynamic"])
@pytest.mark.parametrize("num_stages", [2, 5])
def test_greedy_answers_without_invariance(tmp_path: Path, name: str, num_stages: int) -> None:
    case = Case(tmp_path, name)
    ids = [answer[0] for answer in case.wanted]
    with case.llm(batch_invariant=False, pp_stages=num_stages) as llm:
        assert [each.token_ids for each in llm.generate(PROMPTS, GREEDY)] == ids


@pytest.mark.parametrize("chunk", [1, 5, 16, 64])
def test_chunks_of_prompts(llama: Case, chunk: int) -> None:  # pipeline G45
    with llama.llm(prefill_tokens=chunk, pp_stages=3) as llm:
        watch = watched(llm)
        assert found_in(llm.generate(PROMPTS, GREEDY)) == llama.wanted
        chunks = [step.parts[0].num_tokens - step.parts[0].num_decode for step in watch.steps]
        assert max(chunks) <= chunk
        assert sum(n > 0 for n in chunks) >= -(-len(BASE) // chunk)


def test_a_token_is_fed_before_the_host_knows_it(llama: Case) -> None:  # pipeline G43
    with llama.llm(prefill_tokens=9, pp_stages=4) as llm:
        watch = watched(llm)
        (found,) = found_in(llm.generate([BASE], GREEDY))
        assert found == llama.wanted[0]
        # The chunks of its prompt follow each other, and its decodes too.
        assert watch.most == 5
        decodes = [step for step in watch.steps if step.parts[0].num_decode]
        assert watch.fed == len(decodes) >= GREEDY.max_tokens - 1
        chunks = [step.parts[0].num_tokens - step.parts[0].num_decode for step in watch.steps]
        assert [n for n in chunks if n] == [9, 9, 9, 9, 1]


@pytest.mark.parametrize("num_requests", [1, 2, 3, 4, 5, 8, 16])
def test_batches_of_every_size(llama: Case, num_requests: int) -> None:  # pipeline G41
    numbers = [n % len(PROMPTS) for n in range(num_requests)]
    with llama.llm(pp_stages=4) as llm:
        found = found_in(llm.generate([PROMPTS[n] for n in numbers], GREEDY))
        assert found == [llama.wanted[n] for n in numbers]


def test_one_token_each(llama: Case) -> None:
    params = replace(GREEDY, max_tokens=1)
    with llama.llm() as llm:
        wanted = found_in(llm.generate(PROMPTS, params))
    with llama.llm(pp_stages=4) as llm:
        assert found_in(llm.generate(PROMPTS, params)) == wanted


def test_more_requests_than_run_at_a_time(llama: Case) -> None:
    with llama.llm(pp_stages=4, max_running=3) as llm:
        watch = watched(llm)
        assert found_in(llm.generate(PROMPTS * 3, GREEDY)) == llama.wanted * 3
        assert max(len(set(rows)) for rows in watch.rows) <= 3
        assert llm.stats().blocks_held == 0


def test_steps_go_on_from_the_oldest_alone(llama: Case) -> None:
    with llama.llm(pp_stages=4, prefix_cache=False) as llm:
        watch = watched(llm)
        llm.generate(PROMPTS * 2, GREEDY)
        assert watch.most == 5
        assert watch.shared == set()


@pytest.mark.parametrize("overlap", [False, True])
def test_one_step_at_a_time_where_asked(llama: Case, overlap: bool) -> None:
    with llama.llm(pp_stages=3, overlap=overlap) as llm:
        watch = watched(llm)
        assert found_in(llm.generate(PROMPTS, GREEDY)) == llama.wanted
        assert watch.most == (4 if overlap else 1)
        assert (watch.fed > 0) == overlap


def test_each_stage_has_its_layers_and_nothing_else(llama: Case) -> None:  # pipeline G10, G27
    with llama.llm(pp_stages=3) as llm, llama.llm() as whole:
        fence = even_fence(LAYERS, 3)
        stages = staged(llm).stages
        assert [(each.part.start, each.part.stop) for each in stages] == [*pairwise(fence)]
        models = [each.runner.model for each in stages]
        assert [model.embed_tokens is not None for model in models] == [True, False, False]
        assert [model.norm is not None for model in models] == [False, False, True]
        assert [model.lm_head is not None for model in models] == [False, False, True]
        caches = [layer.self_attn.cache for model in models for layer in model.layers]
        assert len({id(cache) for cache in caches}) == LAYERS
        alone = whole.memory_report()
        assert llm.memory_report()["weights"] == alone["weights"]
        per_block = llm.memory_report()["kv_cache"] / staged(llm).num_blocks
        assert per_block == alone["kv_cache"] / whole._executor.num_blocks


def test_every_stage_is_timed(llama: Case) -> None:
    with llama.llm(pp_stages=4) as llm:
        watch = watched(llm)
        llm.generate(PROMPTS, GREEDY)
        times: StepTimes = llm.engine.times
        assert sorted(times.stages) == [0, 1, 2, 3]
        assert {sum(each.counts) for each in times.stages.values()} == {len(watch.steps)}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"pp_stages": 9}, "pp_stages 9 .*expected 1 to 8"),
        ({"pp_stages": 2, "pp_splits": (8,)}, "pp_splits 8 .*from 1 to 7"),
        ({"pp_stages": 2, "kv_memory": 5000}, "kv_memory 5000 bytes holds 0 tokens"),
    ],
)
def test_stages_that_cannot_be_leave_no_thread(
    llama: Case, flags: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        llama.llm(**flags)


def test_a_door_opens_stages(llama: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAYLINE_PP_STAGES", "2")
    monkeypatch.setenv("LAYLINE_PP_SPLITS", "3")
    with llama.llm() as llm:
        assert llm._model.fence == (0, 3, LAYERS)
        assert found_in(llm.generate(PROMPTS, GREEDY)) == llama.wanted
