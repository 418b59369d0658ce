"""What drafts take of a step's rows and of the cache, and who is asked for how many."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from layline.engine.balance import MeshScheduler, StepRules
from layline.engine.blocks import BlockPool
from layline.engine.drafts import VERIFIED_ROWS
from layline.engine.prefix import PrefixCache
from layline.engine.request import Request
from layline.engine.scheduler import Scheduler
from layline.engine.speculation.draft import CATCH_UP_TOKENS, DraftProposer
from layline.engine.speculation.pace import LONGEST_REST, Pace
from layline.engine.speculation.proposer import DraftRoom
from layline.engine.speculation.speculation import Speculation
from layline.engine.speculation.verify import is_verified
from layline.engine.step_plan import StepEntry, StepPlan
from layline.layers.spans import SequenceSpan
from support.fake_drafts import CheckedDraftModel, Guesses, known_tokens
from support.fake_requests import fake_request

BLOCK = 4


def one(blocks: int, running: int = 8, budget: int = 400) -> Scheduler:
    pool = BlockPool(blocks + 1, PrefixCache())
    return Scheduler(pool, block_size=BLOCK, max_running=running, prefill_tokens=budget)


def begun(it: Scheduler, *requests: Request) -> None:
    """Prefill ``requests`` and give each its first token."""
    for request in requests:
        it.add(request)
    while any(not request.output_ids for request in requests):
        plan = it.next_step()
        assert plan is not None
        advance(it, plan)


def advance(it: Scheduler, plan: StepPlan) -> None:
    """Complete a step whose rows say 7, and take all of them that are verified."""
    it.begin(plan)
    it.complete(plan)
    for entry in plan.entries:
        if entry.samples and is_verified(entry):
            entry.request.output_ids.append(7)
    for entry in plan.entries:
        if entry.ahead == len(entry.request.drafts) > 0:
            accepted = entry.request.num_tokens - (entry.span.length - entry.ahead) - 1
            it.settle(entry.request, entry.ahead, accepted)
            entry.request.drafts = ()


def decode(it: Scheduler) -> list[StepEntry]:
    plan = it.next_step()
    assert plan is not None
    assert plan.num_decode == len(plan.entries)
    advance(it, plan)
    return list(plan.entries)


def test_a_request_has_a_row_for_its_last_token_and_each_draft() -> None:
    it, request = one(10), fake_request(3, 20)
    begun(it, request)
    ((asked, count),) = it.draft_rooms(lambda _: 3)
    assert (asked, count) == (request, 3)
    request.drafts = (7, 7, 9)
    assert it.draft_rooms(lambda _: 3) == [], "who has drafts is not asked again"
    plan = it.next_step()
    assert plan is not None
    assert plan.token_ids == (7, 7, 7, 9)
    assert [(e.span.start, e.span.length, e.ahead, e.samples) for e in plan.entries] == [
        (3, 4, 0, True),
        (4, 5, 1, True),
        (5, 6, 2, True),
        (6, 7, 3, True),
    ]
    # Run again as if nothing had happened, a step is the same.
    assert it.next_step() == plan
    advance(it, plan)
    # Two drafts were right; what came after the second is a token of its own.
    assert request.output_ids == [7, 7, 7, 7]
    assert request.num_computed == 6
    assert (it.stats.drafted, it.stats.accepted) == (3, 2)
    (entry,) = decode(it)
    assert entry.span.start == 6, "the rejected draft's place is written again"


def test_only_accepted_tokens_reach_the_prefix_cache() -> None:
    it, request = one(10), fake_request([1, 2, 3], 20)
    begun(it, request)
    it.draft_rooms(lambda _: 6)
    request.drafts = (7, 7, 7, 7, 0, 7)
    decode(it)
    assert request.output_ids == [7] * 6
    it.remove(request)
    follower = fake_request([1, 2, 3, *[7] * 20], 2)
    it.add(follower)
    it.next_step()
    assert follower.num_cached == 8
    other = fake_request([1, 2, 3, 7, 7, 7, 7, 7, 0, 7, 7, 7, 7], 2)
    it.add(other)
    it.next_step()
    assert other.num_cached == 8


def test_rows_are_divided_and_a_full_batch_gets_none() -> None:
    it = one(200, running=VERIFIED_ROWS + 1)
    requests = [fake_request(3, 20) for _ in range(VERIFIED_ROWS - 5)]
    begun(it, *requests[:10])
    rooms = it.draft_rooms(lambda _: 4)
    assert sum(count for _, count in rooms) == VERIFIED_ROWS - 10
    assert {count for _, count in rooms} == {2, 3}
    for request, count in rooms:
        request.drafts = (7,) * count
    assert len(decode(it)) == VERIFIED_ROWS
    begun(it, *requests[10:])
    assert [count for _, count in it.draft_rooms(lambda _: 4)] == [1] * 5
    for request in requests:
        request.drafts = ()
    begun(it, *[fake_request(3, 20) for _ in range(6)])
    assert it.draft_rooms(lambda _: 4) == []


def test_drafts_take_no_block_that_another_needs() -> None:
    it = one(4)
    first, second = fake_request(4, 9), fake_request(3, 9)
    begun(it, first, second)
    # The first needs a block for its last token, and each keeps one to grow into.
    assert [len(r.blocks) for r in (first, second)] == [1, 1]
    assert it.draft_rooms(lambda _: 3) == [], "two are left and both are spoken for"
    decode(it)
    assert it.stats.preemptions == 0
    it.remove(second)
    ((asked, count),) = it.draft_rooms(lambda _: 7)
    assert (asked, count) == (first, 6), "of the three that are left one is kept"


def test_blocks_that_only_drafts_use_are_given_up_before_anybody_is_preempted() -> None:
    it = one(12)
    first, second, third = fake_request(3, 30), fake_request(7, 30), fake_request(11, 30)
    begun(it, first, second)
    assert it.draft_rooms(lambda request: 12 if request is first else 0) == [(first, 12)]
    first.drafts = (0,) * 12
    decode(it)
    assert (first.num_tokens, len(first.blocks)) == (5, 4)
    begun(it, third)
    before = first.blocks
    while third.num_tokens < 18:
        decode(it)
        held = [*first.blocks, *second.blocks, *third.blocks]
        assert len(held) == len(set(held)) == it.stats.blocks_held
    assert it.stats.preemptions == 0
    assert first.blocks is not before, "a table that may grow otherwise is another table"
    assert first.blocks == before[:3]
    for request in (first, second, third):
        it.remove(request)
    assert it.stats.blocks_held == 0


def test_drafts_that_lost_their_slots_are_left_out() -> None:
    it, request = one(10), fake_request(3, 20)
    begun(it, request)
    it.draft_rooms(lambda _: 6)
    request.drafts = (7,) * 6
    assert it.drafts.take_back([request])
    assert not it.drafts.take_back([request])
    plan = it.next_step()
    assert plan is not None
    assert len(plan.entries) == 1, "the last token stands in the last slot"


def test_verification_compares_token_by_token() -> None:
    request = fake_request([1, 2], 9)
    request.output_ids.append(5)
    request.drafts = (6, 7)

    def entry(ahead: int) -> StepEntry:
        return StepEntry(request, SequenceSpan(2 + ahead, 1, [1], 3 + ahead), True, ahead=ahead)

    assert is_verified(entry(0))
    assert not is_verified(entry(1)), "nothing has come after the last token yet"
    request.output_ids.append(6)
    assert is_verified(entry(1))
    assert not is_verified(entry(2))
    request.output_ids.append(8)
    assert not is_verified(entry(2)), "the second draft was 7"
    request.output_ids[-1] = 7
    assert is_verified(entry(2))


def test_pace_follows_what_was_accepted() -> None:
    pace = Pace.of(4)
    assert pace.wants(1) == 4
    pace.observe(4, 4, 6)
    assert pace.wants(6) == 4
    pace.observe(4, 1, 8)
    assert pace.wants(8) == 3
    pace.observe(3, 0, 9)
    assert pace.wants(9) == 2
    pace.observe(2, 0, 10)
    assert (pace.wants(10), pace.wants(11)) == (0, 1)
    produced, rests = 10, []
    for _ in range(16):
        pace.observe(1, 0, produced)
        wait = 0
        while not pace.wants(produced + wait):
            wait += 1
        rests.append(wait)
        produced += wait
    assert rests == sorted(rests)
    assert rests[-1] == LONGEST_REST, "nobody is given up for good"
    pace.observe(1, 1, produced)
    assert pace.wants(produced) == 3


class Mesh:
    """One rank, with a draft model that checks what it is fed."""

    def __init__(self, blocks: int, context: int = 1000, vocabulary: int = 1 << 30) -> None:
        self.part = one(blocks)
        self.mesh = MeshScheduler([self.part], StepRules())
        self.model = CheckedDraftModel(1, BLOCK, lambda known: 7)
        facts: Any = SimpleNamespace(
            config=SimpleNamespace(vocab_size=vocabulary), max_model_len=context
        )
        self.proposer = DraftProposer(facts, self.mesh, self.model, StepRules())
        self.speculation = Speculation(self.proposer, self.mesh, 4)

    def begin(self, request: Request) -> Request:
        self.model.live[request.request_id] = request
        begun(self.part, request)
        return request


def test_a_found_prefix_is_computed_by_the_draft_model_only_where_it_lacks_it() -> None:
    it = Mesh(40)
    prompt = list(range(1, 22))
    # Nobody drafted for the first: what it leaves in the cache is the model's alone.
    it.part.remove(it.begin(fake_request(prompt, 3)))
    second = it.begin(fake_request(prompt, 9))
    assert second.num_cached == 20
    assert second.num_drafted == 0
    it.speculation.propose()
    assert len(second.drafts) == 4
    assert it.model.computed == 21 + 4
    assert second.num_drafted == 22
    it.part.remove(second)
    third = it.begin(fake_request(prompt, 9))
    assert third.num_cached == third.num_drafted == 20
    it.speculation.propose()
    assert it.model.computed == 21 + 4 + 2 + 3


def test_a_block_that_is_taken_anew_is_the_draft_models_no_more() -> None:
    it = Mesh(6)
    first = it.begin(fake_request(list(range(1, 14)), 6))
    it.speculation.propose()
    it.part.remove(first)
    # Nine further prompt tokens take the blocks; what they hold is not in the draft's cache.
    prompt = list(range(30, 51))
    it.part.remove(it.begin(fake_request(prompt, 3)))
    again = it.begin(fake_request(prompt, 3))
    assert again.num_cached == 20
    assert again.num_drafted == 0


def test_catching_up_is_bounded_and_nothing_is_drafted_before() -> None:
    it = Mesh(300)
    long = it.begin(fake_request([1 + n % 90 for n in range(CATCH_UP_TOKENS + 30)], 9))
    short = it.begin(fake_request(5, 9))
    it.speculation.propose()
    assert long.drafts == ()
    assert long.num_drafted == CATCH_UP_TOKENS
    assert short.drafts == (), "the budget of this step is spent"
    it.speculation.propose()
    assert len(long.drafts) == len(short.drafts) == 4


@pytest.mark.parametrize("context", [9, 10, 12])
def test_no_draft_beyond_the_draft_models_context(context: int) -> None:
    it = Mesh(40, context=context)
    request = it.begin(fake_request(9, 9))
    it.speculation.propose()
    # Ten tokens are known: with a context of ten it can be fed the last of them.
    assert len(request.drafts) == max(0, context - 9)


def test_ids_that_the_draft_model_lacks_get_no_drafts() -> None:
    it = Mesh(40, vocabulary=5000)
    request = it.begin(fake_request([1, 5000, 2], 9))
    it.speculation.propose()
    assert request.drafts == ()
    assert it.model.computed == 0


def test_no_more_drafts_than_tokens_may_come() -> None:
    it, asked = one(40), []

    class Noting(Guesses):
        def propose(self, rooms: Any, /) -> list[tuple[int, ...]]:
            asked.append([room.count for room in rooms])
            return [(7,) * room.count for room in rooms]

    mesh = MeshScheduler([it], StepRules())
    speculation = Speculation(Noting(lambda known: 7), mesh, 4)
    request = fake_request(3, 4)
    begun(it, request)
    speculation.propose()
    assert asked == [[2]]
    decode(it)
    assert known_tokens(request)[3:] == (7, 7, 7, 7)


def test_a_request_with_a_grammar_gets_none() -> None:
    it = Mesh(40)
    request, other = it.begin(fake_request(9, 9)), it.begin(fake_request(9, 9))
    params: Any = SimpleNamespace(grammar="a grammar")
    request.params = params
    it.speculation.propose()
    assert request.drafts == ()
    assert len(other.drafts) == 4


def test_a_proposer_that_breaks_off_can_be_asked_again() -> None:
    it = Mesh(40)
    request = it.begin(fake_request(20, 9))
    assert it.mesh.draft_rooms(lambda _: 3) == [(request, 3)]
    run, calls = it.model.draft, []

    def failing(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return run(*arguments)

    it.model.draft = failing  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        it.proposer.propose([DraftRoom(request, 3)])
    assert request.drafts == ()
    ((*drafts,),) = it.proposer.propose([DraftRoom(request, 3)])
    assert len(drafts) == 3
