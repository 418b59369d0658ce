"""Prompts in chunks that follow each other through pipeline stages."""

from __future__ import annotations

from pathlib import Path

import pytest

from layline import LLM, SamplingParams
from layline.config import EngineConfig
from layline.engine.blocks import BlockPool
from layline.engine.facts import ServedModel
from layline.engine.launch import open_doors
from layline.engine.request import Request
from layline.engine.scheduler import Scheduler
from support.fake_requests import fake_request
from support.pipelined import count
from support.tiny import save_tiny

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


def counts(scheduler: Scheduler, request: Request) -> list[int]:
    """Tokens of the request in each step until its prompt is in the cache."""
    found = []
    while not request.is_prefilled:
        plan = scheduler.next_step()
        assert plan is not None
        scheduler.begin(plan)
        found.append(sum(each.span.count for each in plan.entries if each.request is request))
    return found


def scheduler_of(*requests: Request, budget: int = 100, chunk: int = 10) -> Scheduler:
    def divide(total: int) -> list[int]:
        return [chunk] * (total // chunk) + [total % chunk] * (total % chunk > 0)

    made = Scheduler(
        BlockPool(200, None),
        block_size=4,
        max_running=8,
        prefill_tokens=budget,
        num_stages=2,
        divide=divide,
    )
    for request in requests:
        made.add(request)
    return made


def test_a_step_ends_with_the_chunk_and_not_with_the_budget() -> None:
    one = fake_request(33, 8)
    assert counts(scheduler_of(one), one) == [10, 10, 10, 3]


def test_a_budget_smaller_than_a_chunk_divides_it_and_the_bounds_stay() -> None:
    one = fake_request(23, 8)
    assert counts(scheduler_of(one, budget=6), one) == [6, 4, 6, 4, 3]


def test_prompts_share_a_step_each_with_its_chunk() -> None:
    one, other = fake_request(23, 8), fake_request(12, 8)
    scheduler = scheduler_of(one, other)
    assert counts(scheduler, one) == [10, 10, 3]
    assert other.is_prefilled


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny(path, "Llama", num_hidden_layers=4, max_position_embeddings=1024)
    return path


@pytest.mark.parametrize(
    ("doors", "stages", "chunks"),
    [
        ({}, 2, [64, 134, 134, 134, 134]),
        ({"LAYLINE_PRIME_CHUNK_SCHED": "fixed"}, 2, [128] * 4 + [88]),
        ({"LAYLINE_PRIME_CHUNK": "250"}, 2, [250, 250, 100]),
        ({"LAYLINE_PRIME_PIPE": "0"}, 2, [600]),
        ({"LAYLINE_PRIME_PP": "0"}, 2, [600]),
    ],
)
def test_doors_say_how_prompts_are_divided(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    doors: dict[str, str],
    stages: int,
    chunks: list[int],
) -> None:
    # pipeline G50
    engine = EngineConfig(model=str(folder), pp_stages=stages)
    model = ServedModel(None, None, fence=(0, 2, 4), doors=open_doors(engine))  # type: ignore[arg-type]
    divide = model.divide(engine)
    assert divide is not None
    for name, value in doors.items():
        monkeypatch.setenv(name, value)
    found = list(divide(600))
    assert sum(found) == 600
    assert len(found) == len(chunks)
    if doors:
        assert found == chunks


def test_one_step_at_a_time_has_no_chunks() -> None:
    engine = EngineConfig(pp_stages=2, overlap=False)
    model = ServedModel(None, None, fence=(0, 2, 4), doors=open_doors(engine))  # type: ignore[arg-type]
    assert model.divide(engine) is None
    alone = EngineConfig()
    assert ServedModel(None, None, doors=open_doors(alone)).divide(alone) is None  # type: ignore[arg-type]


def test_chunks_of_one_prompt_are_on_several_stages_at_a_time(folder: Path) -> None:
    # pipeline G46, G47
    prompt = [3 + i % 150 for i in range(600)]
    answers = []
    for flags in ({"pp_stages": 1}, {"pp_stages": 2}):
        with LLM(str(folder), threads=2, batch_invariant=True, **flags) as llm:
            (output,) = llm.generate([prompt], GREEDY)
            answers.append(output.token_ids)
            if flags["pp_stages"] == 2:
                assert count(llm, "batch_splits") == 5 + 3
                assert count(llm, "slot_switches") >= 4
    assert answers[0] == answers[1]
