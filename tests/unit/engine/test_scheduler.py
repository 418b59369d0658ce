"""Step plans: budgets, admission, phases. No model is run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from layline.engine.blocks import BlockPool
from layline.engine.scheduler import Scheduler
from layline.layers.spans import Phase

BLOCK = 4


def request(prompt: int, most: int, number: int = 0) -> Any:
    fake = SimpleNamespace(
        request_id=number,
        prompt_ids=tuple(range(prompt)),
        output_ids=[],
        blocks=[],
        num_computed=0,
        most_length=prompt + most,
    )
    return _Prefillable(fake)


class _Prefillable:
    def __init__(self, fake: Any) -> None:
        self.__dict__.update(fake.__dict__)

    @property
    def is_prefilled(self) -> bool:
        return self.num_computed >= len(self.prompt_ids)


def scheduler(blocks: int = 100, running: int = 8, budget: int = 16) -> Scheduler:
    return Scheduler(
        BlockPool(blocks + 1), block_size=BLOCK, max_running=running, prefill_tokens=budget
    )


def advance(it: Scheduler) -> Any:
    plan = it.next_step()
    assert plan is not None
    it.complete(plan)
    for entry in plan.entries:
        if entry.samples:
            entry.request.output_ids.append(7)
    return plan


def test_prompts_are_cut_to_the_budget_and_decoded_together() -> None:
    it = scheduler()
    first, second = request(20, 4), request(9, 4)
    it.add(first)
    it.add(second)
    plan = advance(it)
    assert [(e.span.start, e.span.count, e.samples) for e in plan.entries] == [(0, 16, False)]
    plan = advance(it)
    assert [(e.span.start, e.span.count, e.samples) for e in plan.entries] == [
        (16, 4, True),
        (0, 9, True),
    ]
    assert plan.token_ids == (*range(16, 20), *range(9))
    assert {e.span.rope_length for e in plan.entries} == {20, 9}
    plan = advance(it)
    assert plan.phase is Phase.DECODE
    assert [(e.span.start, e.span.rope_length) for e in plan.entries] == [(20, 21), (9, 10)]


def test_a_request_waits_until_it_fits_at_its_longest() -> None:
    it = scheduler(blocks=5)
    first, second = request(8, 4), request(8, 4)
    it.add(first)
    it.add(second)
    advance(it)
    assert len(first.blocks) == 3
    assert second.blocks == []
    it.remove(first)
    it.remove(first)
    assert first.blocks == []
    advance(it)
    assert len(second.blocks) == 3


def test_a_request_that_never_fits_is_refused() -> None:
    with pytest.raises(ValueError, match="can never fit"):
        scheduler(blocks=2).add(request(8, 4))


def test_nothing_to_do() -> None:
    it = scheduler()
    assert it.next_step() is None
    waiting = request(3, 3)
    it.add(waiting)
    it.remove(waiting)
    assert it.next_step() is None


def test_the_scheduler_needs_no_torch() -> None:
    import subprocess
    import sys

    code = (
        "import sys, layline.engine.scheduler, layline.engine.output, layline.config\n"
        "import layline.models.registry\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
