"""Scheduling over attention DP: who gets a request, what a step of the mesh is. No model is run."""

from __future__ import annotations

from typing import Any

import pytest

from layline.boundary.layout import BatchVariant
from layline.boundary.rows import DpPadding
from layline.config import DP_PADDINGS, EngineConfig
from layline.engine.balance import (
    PREFILL_BESIDE_DECODES,
    MeshPlan,
    MeshScheduler,
    StepRules,
)
from layline.engine.blocks import BlockPool
from layline.engine.prefix import PrefixCache
from layline.engine.request import Request
from layline.engine.scheduler import Scheduler
from layline.engine.step import IDLE
from layline.layers.spans import MixedPhase, Phase
from support.fake_requests import fake_request

BLOCK = 4


def requests(*sizes: tuple[int, int]) -> list[Request]:
    return [fake_request(*size) for size in sizes]


def mesh(attn_dp: int, budget: int = 16, **rules: Any) -> MeshScheduler:
    queues = [
        Scheduler(
            BlockPool(100, PrefixCache()), block_size=BLOCK, max_running=8, prefill_tokens=budget
        )
        for _ in range(attn_dp)
    ]
    return MeshScheduler(queues, StepRules(**rules))


def advance(it: MeshScheduler) -> MeshPlan:
    plan = it.next_step()
    assert plan is not None
    it.begin(plan)
    it.complete(plan)
    for part in plan.sampling:
        for request in part:
            request.output_ids.append(7)
    return plan


def test_a_request_goes_where_the_fewest_tokens_are_expected() -> None:
    it = mesh(3)
    made = requests((10, 10), (2, 2), (3, 2), (2, 1), (1, 1), (4, 4))
    for request in made:
        it.add(request)
    # Expected before each: 0 0 0 | 20 0 0 | 20 4 0 | 20 4 5 | 20 7 5 | 20 7 7.
    assert [request.attn_dp for request in made] == [0, 1, 2, 1, 2, 1]
    it.remove(made[0])
    assert it.parts[0].load == 0
    late = requests((1, 1))[0]
    it.add(late)
    assert late.attn_dp == 0


def test_ranks_choose_their_phase_alone_and_idle_ones_have_a_part() -> None:
    it = mesh(3, attn_cp=1)
    short, long = requests((2, 8), (20, 4))
    it.add(short)
    it.add(long)
    plan = advance(it)
    assert [part.phase for part in plan.step.parts[:2]] == [Phase.PREFILL, Phase.PREFILL]
    assert plan.step.parts[2] is IDLE
    assert plan.parts[2] is None
    assert plan.step.rows.counts == ((2,), (16,), (0,))
    assert plan.sampling == [[short], [], []]
    plan = advance(it)
    assert [part.phase for part in plan.step.parts] == [Phase.DECODE, Phase.PREFILL, Phase.DECODE]
    assert plan.step.ffn_phase is Phase.PREFILL
    assert plan.step.rows.counts == ((1,), (4,), (0,))
    assert plan.sampling == [[short], [long], []]
    it.remove(short)
    it.remove(long)
    assert it.next_step() is None
    assert it.num_unfinished == 0


def test_the_same_arrivals_give_the_same_steps() -> None:
    def run() -> list[Any]:
        it = mesh(2, budget=5)
        steps = []
        made = requests((7, 3), (3, 2), (6, 6), (1, 1))
        for number, request in enumerate(made):
            request.prompt_ids = tuple(range(100 * number, 100 * number + len(request.prompt_ids)))
            it.add(request)
        for _ in range(6):
            plan = advance(it)
            steps.append((plan.step, [[made.index(r) for r in part] for part in plan.sampling]))
        return steps

    assert run() == run()


@pytest.mark.parametrize(("layout", "counts"), [("contiguous", (4, 3, 3)), ("zigzag", (3, 3, 4))])
def test_a_context_parallel_prompt_is_divided(layout: str, counts: tuple[int, ...]) -> None:
    it = mesh(1, attn_cp=3, tp=3, cp_layout=layout)
    it.add(requests((10, 4))[0])
    rows = advance(it).step.rows
    assert rows.variant is BatchVariant.CONTEXT_PARALLEL
    assert rows.counts == (counts,)
    assert rows.total == 10
    rows = advance(it).step.rows
    assert rows.variant is BatchVariant.ORDINARY
    assert rows.counts == ((1, 1, 1),)


def test_short_prompts_leave_context_ranks_without_rows() -> None:
    it = mesh(1, attn_cp=4, tp=4)
    for request in requests((2, 1), (1, 1)):
        it.add(request)
    assert advance(it).step.rows.counts == ((2, 1, 0, 0),)


def test_context_parallel_needs_every_busy_rank_to_prefill() -> None:
    it = mesh(2, attn_cp=2, tp=4)
    first, second = requests((4, 4), (30, 2))
    it.add(first)
    assert advance(it).step.rows.variant is BatchVariant.CONTEXT_PARALLEL  # The other one idles.
    it.add(second)
    rows = advance(it).step.rows
    assert rows.variant is BatchVariant.ORDINARY
    assert rows.counts == ((1, 1), (16, 16))


def test_sequence_parallel_serves_prompts_only() -> None:
    it = mesh(1, tp=2, sequence_parallel=True, input_scattered=True)
    for request in requests((3, 3), (2, 3)):
        it.add(request)
    variants = [advance(it).step.rows.variant for _ in range(2)]
    # Both flags: sequence-parallel where it serves, and then 2 rows of 2 ranks.
    assert variants == [BatchVariant.SEQUENCE_PARALLEL, BatchVariant.INPUT_SCATTERED]


def test_input_scattered_needs_rows_that_divide() -> None:
    it = mesh(1, tp=3, input_scattered=True)
    for request in requests((4, 3), (2, 3)):
        it.add(request)
    variants = [advance(it).step.rows.variant for _ in range(2)]
    assert variants == [BatchVariant.INPUT_SCATTERED, BatchVariant.ORDINARY]


def test_rules_follow_the_configuration() -> None:
    config = EngineConfig(tp=4, attn_dp=2, attn_cp=2, dp_padding="sum-len", cp_layout="zigzag")
    rules = StepRules.of(config)
    assert rules == StepRules(tp=4, attn_cp=2, padding=DpPadding.SUM_LEN, cp_layout="zigzag")
    assert tuple(padding.value for padding in DpPadding) == DP_PADDINGS


def test_a_request_goes_where_its_beginning_is_cached_unless_that_rank_is_busy() -> None:
    it = mesh(3)
    text = list(range(40))
    first = fake_request(text, 1)
    busy = fake_request(2, 30)
    it.add(busy)
    it.add(first)
    while not first.output_ids:
        advance(it)
    it.remove(first)
    assert (busy.attn_dp, first.attn_dp) == (0, 1)
    placed = [fake_request([*text[:24], 500 + n], 3) for n in range(4)]
    for request in placed:
        it.add(request)
    # Costs: 32 0-24 0, then 32 28-24 0, 32 28-24 28, 32 56-24 28.
    assert [request.attn_dp for request in placed] == [1, 2, 1, 2]
    other = fake_request(text, 1, salt="other")
    it.add(other)
    assert other.attn_dp == 0, "another salt finds nothing"


def test_prompts_and_decodes_share_steps() -> None:
    it = mesh(2, budget=8, tp=4, input_scattered=True)
    talking, reading, elsewhere = fake_request(3, 50), fake_request(40, 1), fake_request(80, 1)
    it.parts[0].add(talking)
    advance(it)
    it.parts[0].add(reading)
    it.parts[1].add(elsewhere)
    for number in range(5):
        step = advance(it).step
        assert [part.phase for part in step.parts] == [MixedPhase(1), Phase.PREFILL]
        # Rows of several ranks have one phase.
        assert (step.ffn_phase, step.prefills) == (Phase.PREFILL, False)
        assert step.rows.counts == ((8,), (8,))
        assert step.rows.variant is BatchVariant.INPUT_SCATTERED
        assert len(talking.output_ids) == number + 2, "a decode was left out"


def test_the_rows_of_one_rank_keep_their_phases_everywhere() -> None:
    it = mesh(1, budget=8, tp=4)
    for request in requests((3, 9), (40, 2)):
        it.add(request)
    advance(it)
    step = advance(it).step
    assert step.ffn_phase == step.parts[0].phase == MixedPhase(1)


@pytest.mark.parametrize(
    "rules",
    [{"sequence_parallel": True}, {"attn_cp": 2}, {"quantised_all_reduce": True}],
    ids=str,
)
def test_where_phases_cannot_share_a_step_they_take_turns(rules: dict[str, Any]) -> None:
    it = mesh(1, budget=8, tp=2, **rules)
    talking = fake_request(3, 50)
    it.add(talking)
    advance(it)
    it.add(fake_request(100, 1))
    phases = [advance(it).step.parts[0].phase for _ in range(8)]
    assert phases == [Phase.DECODE, Phase.PREFILL] * 4
    assert len(talking.output_ids) == 5


def test_a_stream_of_short_requests_elsewhere_starves_nobody() -> None:
    """Ranks that prefill all the time must not keep another one in decodes, nor in prompts."""
    it = mesh(3, budget=8)
    talking, reading = fake_request(3, 200), fake_request(150, 1)
    it.parts[0].add(talking)
    it.parts[0].add(reading)
    for _ in range(60):
        for rank in (1, 2):
            it.parts[rank].add(fake_request(5, 2))
        plan = advance(it)
        for part in plan.sampling[1:]:
            for request in part:
                if len(request.output_ids) == 2:
                    it.remove(request)
    assert reading.output_ids
    assert len(talking.output_ids) > 25


def test_prompts_beside_decodes_come_in_smaller_chunks() -> None:
    it = MeshScheduler.of(EngineConfig(tp=2, attn_dp=2, prefill_tokens=2048), 1000)
    it.add(fake_request(3000, 1))
    assert advance(it).step.rows.counts == ((2048,), (0,))
    it.add(fake_request(3, 10))
    assert advance(it).step.rows.counts == ((952,), (3,))
    it.add(fake_request(3000, 1))
    # Whoever decodes waits for the whole mesh.
    it.parts[0].add(fake_request(3000, 1))
    most = PREFILL_BESIDE_DECODES
    assert advance(it).step.rows.counts == ((most + 1,), (most + 1,))


def test_statistics_add_up_over_ranks() -> None:
    it = mesh(2)
    for request in requests((5, 3), (5, 3), (5, 3)):
        it.add(request)
    advance(it)
    stats = it.stats
    assert (stats.running, stats.waiting, stats.blocks, stats.blocks_held) == (3, 0, 198, 6)


def test_a_configuration_makes_its_schedulers() -> None:
    for shares, config in ((True, EngineConfig()), (False, EngineConfig(prefix_cache=False))):
        it = MeshScheduler.of(config, 10)
        assert it.stats.blocks == 9
        first, second = fake_request(list(range(40)), 1), fake_request(list(range(40)), 1)
        for request in (first, second):
            it.add(request)
            while not request.output_ids:
                advance(it)
            it.remove(request)
        assert second.num_cached == (32 if shares else 0)
    assert MeshScheduler.of(EngineConfig(), 10, shares=False).stats.blocks_idle == 0
