"""Step plans for several pipeline stages: what is under way together. No model is run."""

from __future__ import annotations

from collections import Counter, deque

import pytest

from layline.engine.blocks import BlockPool
from layline.engine.prefix import PrefixCache
from layline.engine.request import Request
from layline.engine.scheduler import Scheduler
from layline.engine.step_plan import StepPlan
from support.fake_requests import fake_request

BLOCK = 4
request = fake_request
STAGES = pytest.mark.parametrize("num_stages", [2, 3, 4, 8])


class Pipe:
    """A scheduler and its steps under way, at most one more than stages."""

    def __init__(
        self,
        num_stages: int,
        *requests: Request,
        blocks: int = 8000,
        budget: int = 64,
        running: int = 64,
        prefix: bool = False,
    ) -> None:
        self.num_stages = num_stages
        self.it = Scheduler(
            BlockPool(blocks + 1, PrefixCache() if prefix else None),
            block_size=BLOCK,
            max_running=running,
            prefill_tokens=budget,
            num_stages=num_stages,
        )
        self.flights: deque[StepPlan] = deque()
        self.add(*requests)

    def add(self, *requests: Request) -> None:
        for each in requests:
            self.it.add(each)

    def launch(self) -> list[StepPlan]:
        """Steps until there is one more than stages, or none to be had."""
        launched: list[StepPlan] = []
        while len(self.flights) <= self.num_stages:
            plan = self.it.next_step()
            if plan is None:
                break
            self.keeps_apart(plan)
            self.it.begin(plan)
            self.flights.append(plan)
            launched.append(plan)
        return launched

    def keeps_apart(self, plan: StepPlan) -> None:
        """Who decodes on before its token is known is fed that of the oldest step; chunks go on."""
        row = 0
        for entry in plan.entries:
            fed = plan.token_ids[row]
            row += entry.span.count
            for number, other in enumerate(self.flights):
                drawn = [each for each in other.entries if each.samples]
                for before in other.entries:
                    if before.request is entry.request:
                        assert before.span.length <= entry.span.start
                        assert not before.samples or (number, fed) == (0, -1 - drawn.index(before))
            if fed < 0:
                assert entry.request in who(self.flights[0])

    def collect(self) -> StepPlan:
        """The oldest step ends, and its requests have their tokens."""
        plan = self.flights.popleft()
        self.it.complete(plan)
        for entry in plan.entries:
            if entry.samples:
                entry.request.output_ids.append(7)
                if len(entry.request.output_ids) == entry.request.most_tokens:
                    self.it.remove(entry.request)
        return plan

    def drain(self) -> None:
        while self.flights:
            self.collect()

    def finish(self, limit: int = 3000) -> None:
        for _ in range(limit):
            self.launch()
            if not self.flights:
                break
            self.collect()
        assert not self.it.num_unfinished
        assert self.it.stats.blocks_held == 0


def decoding(
    num_stages: int, count: int, most: int = 50, **flags: int
) -> tuple[Pipe, list[Request]]:
    """As many requests that have their first token, and nothing under way."""
    requests = [request(3, most) for _ in range(count)]
    pipe = Pipe(num_stages, *requests, **flags)
    while not all(each.output_ids for each in requests):
        pipe.launch()
        pipe.collect()
    pipe.drain()
    return pipe, requests


def who(plan: StepPlan) -> list[Request]:
    return [entry.request for entry in plan.entries]


@STAGES
@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 17])
def test_those_that_decode_are_shared_over_the_steps(num_stages: int, count: int) -> None:
    pipe, requests = decoding(num_stages, count)
    share = -(-count // num_stages)
    plans = pipe.launch()
    groups = -(-count // share)
    assert len(plans) == groups + 1
    assert [len(plan.entries) for plan in plans[: groups - 1]] == [share] * (groups - 1)
    assert [each for plan in plans[:groups] for each in who(plan)] == requests
    # The first go on while the others are on later stages, and so all the time.
    for number in range(3 * num_stages):
        assert who(pipe.flights[-1]) == who(pipe.flights[0]), number
        assert set(pipe.flights[-1].token_ids) == {*range(-share, 0)} or number % groups
        pipe.collect()
        assert len(pipe.launch()) == 1


def test_one_token_under_way_is_fed_and_the_next_waited_for() -> None:
    pipe, (only,) = decoding(3, 1)
    first, second = pipe.launch()
    assert (who(first), who(second), only.num_pending) == ([only], [only], 2)
    assert (first.token_ids, second.token_ids) == ((7,), (-1,))
    assert second.entries[0].span.start == first.entries[0].span.length
    assert pipe.it.next_step() is None
    pipe.collect()
    assert [plan.token_ids for plan in pipe.launch()] == [(-1,)]


def test_what_is_under_way_on_a_later_step_is_not_fed() -> None:
    """It would keep the first stage waiting for the others."""
    pipe, requests = decoding(2, 2)
    first, second, third = pipe.launch()
    assert [who(each) for each in (first, second, third)] == [[r] for r in (*requests, requests[0])]
    pipe.flights.popleft()
    pipe.it.complete(first)
    pipe.it.remove(requests[0])
    (fourth,) = pipe.launch()
    assert who(fourth) == [requests[1]]
    assert pipe.it.next_step() is None, "its own step is not the oldest"


def test_steps_that_nobody_waits_for_are_none() -> None:
    pipe, (only,) = decoding(2, 1)
    pipe.launch()
    pipe.it.remove(only)
    pipe.it.forget()
    pipe.flights.clear()
    pipe.add(request(3, 9))
    pipe.finish()


@STAGES
def test_nobody_starves(num_stages: int) -> None:
    pipe, requests = decoding(num_stages, 5, most=1000)
    for arrival in range(12):
        late = [request(2 + arrival, 1000) for _ in range(arrival % 4)]
        pipe.add(*late)
        requests += late
        if arrival % 3 == 2:
            pipe.it.remove(requests.pop(arrival % len(requests)))
        before = [len(each.output_ids) for each in requests]
        for _ in range(2 * num_stages):
            pipe.launch()
            pipe.collect()
        counts = [len(each.output_ids) for each in requests]
        assert all(now > then for now, then in zip(counts, before, strict=True))


@STAGES
def test_everybody_is_as_fast_as_the_others(num_stages: int) -> None:
    pipe, requests = decoding(num_stages, 11, most=1000)
    for _ in range(40 * num_stages):
        pipe.launch()
        pipe.collect()
    counts = Counter(len(each.output_ids) for each in requests)
    assert max(counts) - min(counts) <= 1


def test_chunks_of_a_prompt_follow_each_other() -> None:
    pipe = Pipe(4, request(40, 2), budget=8)
    plans = pipe.launch()
    spans = [(plan.entries[0].span.start, plan.entries[0].span.count) for plan in plans]
    assert spans == [(0, 8), (8, 8), (16, 8), (24, 8), (32, 8)]
    assert [plan.entries[0].samples for plan in plans] == [False] * 4 + [True]
    for _ in range(4):
        assert pipe.collect().num_decode == 0
        launched = pipe.launch()
    # Its first token is under way on the oldest step now.
    assert [plan.token_ids for plan in launched] == [(-1,)]
    pipe.finish()


def test_prompts_go_on_beside_decodes_and_hold_up_none() -> None:
    pipe, talking = decoding(3, 6, budget=6)
    late = request(30, 2)
    pipe.add(late)
    plans = pipe.launch()
    for number, plan in enumerate(plans):
        assert plan.num_decode == 2
        group = 2 * (number % 3)
        assert who(plan) == [*talking[group : group + 2], late]
        # One budget: two decode, and four tokens of the prompt.
        assert (plan.entries[2].span.start, plan.entries[2].span.count) == (4 * number, 4)
    before = [len(each.output_ids) for each in talking]
    for _ in range(6):
        pipe.collect()
        pipe.launch()
    assert [len(each.output_ids) - 2 for each in talking] == before
    pipe.finish()
    assert len(late.output_ids) == 2


def test_steps_that_gave_nothing_are_as_if_they_had_not_begun() -> None:
    pipe, requests = decoding(3, 7, budget=8)
    late = request(30, 3)
    pipe.add(late)
    pipe.launch()
    pipe.collect()
    first = pipe.launch()
    known = [list(each.output_ids) for each in requests]
    assert late.num_computed > 0
    waiting = [*pipe.flights]
    while pipe.flights:
        pipe.it.cancel(pipe.flights.pop())
    assert all(each.num_pending == 0 for each in (*requests, late))
    assert [each.output_ids for each in requests] == known
    assert late.num_computed == waiting[0].entries[-1].span.start
    assert first
    # Each of them is decoded where it was.
    for plan in pipe.launch()[:3]:
        for entry in plan.entries[: plan.num_decode]:
            assert entry.span.length == entry.request.num_tokens
    pipe.finish()
    assert len(late.output_ids) == 3


@STAGES
@pytest.mark.parametrize("prefix", [False, True])
def test_who_loses_its_place_in_mid_flight_computes_it_again(num_stages: int, prefix: bool) -> None:
    requests = [request(5 + n, 20) for n in range(6)]
    pipe = Pipe(num_stages, *requests, blocks=16, budget=7, prefix=prefix)
    pipe.finish()
    assert pipe.it.stats.preemptions > 0
    assert all(len(each.output_ids) == 20 for each in requests)


def test_who_is_removed_in_mid_flight_leaves_its_share() -> None:
    pipe, requests = decoding(2, 4)
    pipe.launch()
    gone = requests[0]
    pipe.it.remove(gone)
    assert gone.blocks == []
    kept = requests[1:]
    for _ in range(4):
        plan = pipe.flights.popleft()
        pipe.it.complete(plan)
        for entry in plan.entries:
            if entry.request is not gone:
                entry.request.output_ids.append(7)
        (following,) = pipe.launch()
        assert gone not in who(following)
        assert len(following.entries) <= 2
    assert min(len(each.output_ids) for each in kept) == 4


def test_one_stage_feeds_what_is_under_way() -> None:
    pipe, (only,) = decoding(1, 1)
    pipe.num_stages = 2
    pipe.it.begin(plan := pipe.it.next_step())  # type: ignore[arg-type]
    following = pipe.it.next_step()
    assert plan is not None
    assert following is not None
    assert (following.token_ids, only.num_pending) == ((-1,), 1)
