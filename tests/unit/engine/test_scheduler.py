"""Step plans: budgets, admission, growth, preemption, order. No model is run."""

from __future__ import annotations

import subprocess
import sys

import pytest

from layline.engine.blocks import BlockPool
from layline.engine.prefix import PrefixCache
from layline.engine.request import Request
from layline.engine.scheduler import REPLAYED_ROWS, Scheduler
from layline.engine.step_plan import StepPlan
from layline.engine.waiting import MAX_OVERTAKEN
from layline.errors import PromptError
from layline.layers.spans import MixedPhase, Phase
from support.fake_requests import fake_request

BLOCK = 4
request = fake_request


def scheduler(
    blocks: int = 100, running: int = 8, budget: int = 16, *, prefix: bool = False
) -> Scheduler:
    return Scheduler(
        BlockPool(blocks + 1, PrefixCache() if prefix else None),
        block_size=BLOCK,
        max_running=running,
        prefill_tokens=budget,
    )


def added(it: Scheduler, *requests: Request) -> tuple[Request, ...]:
    for each in requests:
        it.add(each)
    return requests


def advance(it: Scheduler, phase: Phase | None = None, limit: int | None = None) -> StepPlan:
    """One step, its tokens, and the end of requests that have all of theirs."""
    plan = it.next_step(limit) if phase is None else it.next_phase(phase, limit)
    assert plan is not None
    it.begin(plan)
    it.complete(plan)
    for entry in plan.entries:
        if entry.samples:
            entry.request.output_ids.append(7)
            if len(entry.request.output_ids) == entry.request.most_tokens:
                it.remove(entry.request)
    return plan


def spans(plan: StepPlan) -> list[tuple[int, int, bool]]:
    return [(entry.span.start, entry.span.count, entry.samples) for entry in plan.entries]


def who(plan: StepPlan) -> list[Request]:
    return [entry.request for entry in plan.entries]


def finish(it: Scheduler, limit: int = 1000, *, mixes: bool = True) -> list[StepPlan]:
    """Steps, or phases in turn as on some meshes, until nothing is left."""
    plans: list[StepPlan] = []
    while it.num_unfinished:
        phase = None if mixes else (Phase.PREFILL, Phase.DECODE)[len(plans) % 2]
        plans.append(advance(it, phase))
        assert len(plans) < limit, "requests do not finish"
    assert it.stats.blocks_held == 0
    return plans


def test_prompts_are_cut_to_the_budget_and_decoded_together() -> None:
    it = scheduler()
    first, second = added(it, request(20, 4), request(9, 4))
    plan = advance(it)
    # The first does not end in this step, so the second has half of it.
    assert spans(plan) == [(0, 8, False), (0, 8, False)]
    assert plan.token_ids == (*first.prompt_ids[:8], *second.prompt_ids[:8])
    plan = advance(it)
    assert spans(plan) == [(8, 12, True), (8, 1, True)]
    assert {e.span.rope_length for e in plan.entries} == {20, 9}
    plan = advance(it)
    assert plan.phase is Phase.DECODE
    assert [(e.span.start, e.span.rope_length) for e in plan.entries] == [(20, 21), (9, 10)]


def test_a_long_prompt_leaves_half_to_those_behind_it_and_only_to_them() -> None:
    it = scheduler(running=3)
    long, short = added(it, request(60, 1), request(3, 1))
    assert spans(advance(it)) == [(0, 13, False), (0, 3, True)]
    assert spans(advance(it)) == [(13, 16, False)]
    other, last = added(it, request(30, 1), request(2, 1))
    plan = advance(it)
    assert who(plan) == [long, other, last]
    assert [count for _, count, _ in spans(plan)] == [10, 4, 2], "what is left goes to the first"
    assert short.num_computed == 3


def test_a_prompt_is_computed_beside_decodes_and_holds_up_none() -> None:
    it = scheduler(budget=8)
    first, second = added(it, request(3, 40), request(4, 40))
    advance(it)
    (long,) = added(it, request(50, 2))
    for number in range(1, 10):
        plan = advance(it)
        assert who(plan) == [first, second, long]
        assert plan.num_decode == 2
        assert plan.phase == (MixedPhase(2) if number < 10 else Phase.DECODE)
        # One budget: what the decodes leave of eight tokens, and in the end what is left of fifty.
        chunk = min(6, 50 - 6 * (number - 1))
        assert spans(plan)[2] == (6 * (number - 1), chunk, number == 9)
        assert plan.token_ids[:2] == (7, 7)
        assert len(first.output_ids) == len(second.output_ids) == number + 1, "a gap"
    assert (who(advance(it)), len(long.output_ids)) == ([first, second, long], 2)


@pytest.mark.parametrize("budget", [1, 2, 3])
def test_a_prompt_goes_on_however_many_decode(budget: int) -> None:
    it = scheduler(budget=budget)
    talking = added(it, *[request(1, 60) for _ in range(5)])
    while not all(each.output_ids for each in talking):
        advance(it)
    (late,) = added(it, request(9, 1))
    counts = [len(each.output_ids) for each in talking]
    for number in range(9):
        plan = advance(it)
        assert plan.num_decode == 5
        assert spans(plan)[5] == (number, 1, number == 8)
    assert late.output_ids
    assert [len(each.output_ids) - 9 for each in talking] == counts


def test_one_preempted_by_a_decode_does_not_come_back_in_that_step() -> None:
    it = scheduler(blocks=6)
    old, new = added(it, request(8, 9), request(7, 9))
    while not new.num_preempted:
        plan = advance(it)
    assert who(plan) == [old]
    assert new.blocks == []
    finish(it)


def test_prefill_and_decode_are_preferred_as_asked() -> None:
    it = scheduler()
    (first,) = added(it, request(3, 9))
    advance(it, Phase.DECODE)
    (second,) = added(it, request(10, 9))
    assert who(advance(it, Phase.DECODE)) == [first]
    plan = advance(it, Phase.PREFILL, 4)
    assert (who(plan), plan.phase) == ([second], Phase.PREFILL)
    assert len(plan.token_ids) == 4
    assert len(advance(it, Phase.PREFILL, 99).token_ids) == 6
    assert who(advance(it, Phase.PREFILL)) == [first, second]


def test_blocks_are_taken_as_they_are_needed() -> None:
    it = scheduler(blocks=10)
    (only,) = added(it, request(8, 30))
    advance(it)
    held = [len(only.blocks)]
    for _ in range(6):
        advance(it)
        held.append(len(only.blocks))
    # Eight prompt tokens fill two blocks; each generated token is fed one step later.
    assert held == [2, 3, 3, 3, 3, 4, 4]


def test_the_last_in_line_gives_way_and_computes_only_what_is_gone() -> None:
    it = scheduler(blocks=6, prefix=True)
    first, second = added(it, request(8, 9), request(7, 9))
    while not second.num_preempted:
        advance(it)
    assert (first.num_preempted, second.num_preempted) == (0, 1)
    assert (second.blocks, second.num_computed) == ([], 0)
    kept = list(second.output_ids)
    finish(it)
    assert second.output_ids[: len(kept)] == kept
    assert len(first.output_ids) == len(second.output_ids) == 9
    assert it.stats.preemptions == 1


def test_generated_tokens_are_replayed_by_decode_one_row_each() -> None:
    it = scheduler(blocks=60)
    first, second = added(it, request(6, 200), request(5, 200))
    while len(second.output_ids) < REPLAYED_ROWS + 10:
        advance(it)
    it._preempt(it._running[second.request_id])
    second.num_computed = 0
    plan = advance(it)
    assert (plan.phase, who(plan)) == (MixedPhase(1), [first, second])
    assert spans(plan)[1] == (0, 5, False)
    plan = advance(it)
    mine = [entry for entry in plan.entries if entry.request is second]
    assert [entry.span.start for entry in mine] == list(range(5, 5 + REPLAYED_ROWS))
    assert [entry.span.rope_length for entry in mine] == list(range(6, 6 + REPLAYED_ROWS))
    assert not any(entry.samples for entry in mine)
    assert plan.token_ids[-REPLAYED_ROWS:] == tuple(second.output_ids[:REPLAYED_ROWS])
    assert who(plan)[0] is first, "nobody waits for a replay"
    plan = advance(it)
    assert [entry.samples for entry in plan.entries][-2:] == [False, True]
    assert spans(advance(it))[1:] == [(second.num_computed - 1, 1, True)]


def test_what_others_hold_is_shared_and_never_written() -> None:
    it = scheduler(prefix=True)
    prompt = list(range(10))
    first, second = added(it, request(prompt, 9), request([*prompt[:8], 77], 9))
    # Nothing to share yet, and what the second begins with is being computed: it waits a step.
    assert who(advance(it, Phase.PREFILL)) == [first]
    plan = advance(it, Phase.PREFILL)
    assert (who(plan), spans(plan)) == ([second], [(8, 1, True)])
    assert first.blocks[:2] == second.blocks[:2]
    assert first.blocks[2] != second.blocks[2]
    assert [it._pool.holders(block) for block in first.blocks] == [2, 2, 1]
    assert (first.num_cached, second.num_cached) == (0, 8)
    it.remove(first)
    assert [it._pool.holders(block) for block in second.blocks] == [1, 1, 1]
    it.remove(second)
    assert (it.stats.blocks_held, it.stats.blocks_idle) == (0, 2)


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK])
def test_a_fully_cached_prompt_computes_its_last_token(length: int) -> None:
    it = scheduler(prefix=True)
    prompt = list(range(length))
    added(it, request(prompt, 2))
    finish(it)
    (again,) = added(it, request(prompt, 2))
    (plan, *_) = finish(it)
    cached = (length - 1) // BLOCK * BLOCK
    assert again.num_cached == cached
    assert spans(plan) == [(cached, length - cached, True)]


def test_generated_tokens_are_shared_too() -> None:
    it = scheduler(prefix=True)
    (first,) = added(it, request([1, 2, 3], 6))
    finish(it)
    (second,) = added(it, request([*first.prompt_ids, *first.output_ids, 9], 1))
    finish(it)
    assert second.num_cached == 8


def test_other_salts_share_nothing() -> None:
    it = scheduler(prefix=True)
    prompt = list(range(9))
    found = []
    for salt in ("", "a", "b", "a", ""):
        (one,) = added(it, request(prompt, 1, salt=salt))
        finish(it)
        found.append(one.num_cached)
    assert found == [0, 0, 0, 8, 8]


def test_a_request_that_never_fits_is_refused_at_once() -> None:
    it = scheduler(blocks=2)
    with pytest.raises(PromptError, match=r"has 6 tokens .* grow to 10, .* holds 8; .* at most 9"):
        it.add(request(6, 4))
    assert it.num_unfinished == 0
    added(it, request(5, 4))
    finish(it)


def test_one_that_must_wait_does_not_block_those_that_fit() -> None:
    it = scheduler(blocks=10, budget=64)
    running, wide, narrow = added(it, request(24, 9), request(16, 1), request(4, 1))
    assert who(advance(it)) == [running, narrow]
    plans = finish(it)
    assert any(wide in who(plan) for plan in plans)


def test_nobody_is_overtaken_without_end() -> None:
    it = scheduler(blocks=9, budget=64)
    added(it, request(16, 1))
    (wide,) = added(it, request(32, 1))
    overtaken = 0
    while not wide.output_ids:
        added(it, request(4, 3), request(4, 3))
        for phase in (Phase.PREFILL, Phase.DECODE):
            plan = advance(it, phase)
            if plan.phase is Phase.PREFILL:
                overtaken += len([each for each in who(plan) if each is not wide])
        assert overtaken < 2 * MAX_OVERTAKEN
    assert overtaken >= MAX_OVERTAKEN


def test_higher_priority_goes_first_and_is_preempted_last() -> None:
    it = scheduler(running=1, budget=64)
    low, high, middle, high_too = added(
        it,
        request(3, 1, priority=-1),
        request(3, 1, priority=5),
        request(3, 1),
        request(3, 1, priority=5),
    )
    assert [who(advance(it))[0] for _ in range(4)] == [high, high_too, middle, low]
    it = scheduler(blocks=6, budget=64)
    old, urgent = added(it, request(8, 9), request(7, 9, priority=1))
    finish(it)
    assert (old.num_preempted > 0, urgent.num_preempted) == (True, 0)


def test_low_priority_is_not_starved() -> None:
    it = scheduler(running=1, budget=64)
    (low,) = added(it, request(3, 2, priority=-3))
    others = 0
    while not low.output_ids:
        added(it, request(3, 1, priority=3))
        others += low not in who(advance(it))
        assert others <= MAX_OVERTAKEN
    assert others == MAX_OVERTAKEN


@pytest.mark.parametrize("mixes", [False, True])
@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize(
    ("blocks", "running", "budget"), [(1, 8, 16), (100, 1, 16), (100, 8, 1), (2, 1, 1), (3, 8, 3)]
)
def test_narrow_places(blocks: int, running: int, budget: int, prefix: bool, mixes: bool) -> None:
    it = scheduler(blocks, running, budget, prefix=prefix)
    room = min(blocks, 6) * BLOCK + 1
    # Equal prompts too, some at the edge of a block.
    sizes = [n for n in (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK) if n < room] * 3
    added(it, *[request(list(range(size)), room - size) for size in sizes])
    finish(it, limit=3000, mixes=mixes)


def test_a_step_that_was_not_run_comes_again() -> None:
    it = scheduler(prefix=True)
    (only,) = added(it, request(8, 9))
    for _ in range(3):
        plan = it.next_step()
        assert plan is not None
        assert it.next_step() == plan
        advance(it)
    assert len(only.output_ids) == 3


def test_what_a_failed_step_was_to_compute_is_offered_to_nobody() -> None:
    """Whether its request goes on, ends, or somebody has begun with its blocks already."""
    for ends in (False, True):
        it = scheduler(budget=12, prefix=True)
        (first,) = added(it, request(range(11), 3))
        planned = it.next_step()
        assert planned is not None
        it.begin(planned)
        # It has the same prompt, and is planned while the first one's blocks are under way.
        (second,) = added(it, request(range(11), 3))
        ahead = it.next_step()
        assert ahead is not None
        it.begin(ahead)
        assert second.num_computed > 0
        shared = set(first.blocks) & set(second.blocks)
        assert shared
        it.cancel(ahead)
        it.cancel(planned)
        if ends:
            it.remove(first)
        (third,) = added(it, request(range(11), 3))
        again = advance(it)
        starts = {id(entry.request): entry.span.start for entry in again.entries}
        assert set(starts.values()) == {0}, "somebody begins with what nobody has computed"
        assert third.num_cached == 0
        finish(it)


def test_removing() -> None:
    it = scheduler(prefix=True)
    assert it.next_step() is None
    waiting, running = added(it, request(3, 3), request(3, 3))
    it.remove(waiting)
    it.remove(waiting)
    assert who(advance(it)) == [running]
    it.remove(running)
    it.remove(running)
    assert running.blocks == []
    assert it.next_step() is None
    assert it.stats.blocks_held == 0


def test_the_scheduler_needs_no_torch() -> None:
    code = (
        "import sys, layline.engine.scheduler, layline.engine.output, layline.config\n"
        "import layline.models.registry\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
