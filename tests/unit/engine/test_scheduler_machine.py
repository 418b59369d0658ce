"""Random submissions, aborts, failed steps and shortages: what must hold after each of them."""

from __future__ import annotations

from collections import Counter, deque
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from layline.engine.balance import MeshPlan, MeshScheduler, StepRules
from layline.engine.blocks import BlockPool
from layline.engine.prefix import PrefixCache
from layline.engine.request import Request
from layline.engine.scheduler import Scheduler
from layline.engine.speculation.draft import DraftProposer
from layline.engine.speculation.speculation import Speculation
from layline.engine.speculation.verify import is_verified
from layline.engine.step_plan import StepPlan, sampled_row
from layline.errors import PromptError
from support.fake_drafts import CheckedDraftModel, Guesses, known_tokens
from support.fake_requests import fake_request

BLOCK = 4
# Steps in which everything that is left must finish.
MOST_STEPS = 5000


def next_token(known: tuple[int, ...]) -> int:
    """What a deterministic model would say: the same whoever else runs."""
    return (sum(known) * 31 + len(known)) % 3


# Half of them begin alike, or blocks would hardly ever be shared.
PROMPTS = st.one_of(
    st.lists(st.integers(0, 2), min_size=1, max_size=30),
    st.integers(1, 30).map(lambda length: ([0, 1, 2, 2, 1, 0] * 5)[:length]),
)
LOST = ("what a failed step left", ())
"""In a slot: contents that nobody may attend to."""


class SchedulerMachine(RuleBasedStateMachine):
    """A mesh of schedulers beside a cache that remembers which tokens each slot was written for."""

    requests: Bundle[Request] = Bundle("requests")

    @initialize(
        blocks=st.integers(1, 14),
        running=st.integers(1, 5),
        budget=st.integers(1, 12),
        ranks=st.integers(1, 2),
        shares=st.booleans(),
        mixes=st.booleans(),
        ahead=st.integers(1, 2),
        stages=st.integers(1, 4),
        proposes=st.sampled_from(["nobody", "guesses", "draft model"]),
    )
    def start(
        self,
        *,
        blocks: int,
        running: int,
        budget: int,
        ranks: int,
        shares: bool,
        mixes: bool,
        ahead: int,
        stages: int,
        proposes: str,
    ) -> None:
        self.pools = [
            BlockPool(blocks + 1, PrefixCache() if shares else None) for _ in range(ranks)
        ]
        # Over stages one more step is under way, and the latest may be fed what the oldest draws.
        # Guessing needs the tokens.
        self.ahead = 1 if proposes != "nobody" else ahead if stages == 1 else stages + 1
        self.spreads = stages > 1 and proposes == "nobody"
        self.stages = stages
        parts = [
            Scheduler(
                pool,
                block_size=BLOCK,
                max_running=running,
                prefill_tokens=budget,
                num_stages=stages if self.spreads else 1,
            )
            for pool in self.pools
        ]
        self.mesh = MeshScheduler(parts, StepRules(quantised_all_reduce=not mixes))
        self.running, self.budget, self.mixes = running, budget, mixes
        # Steps under way, the oldest first, each with what it will say; and how many there may be.
        self.flights: deque[tuple[MeshPlan, list[list[int]]]] = deque()
        self.live: dict[int, Request] = {}
        # By request, the tokens that were drawn for it, known to the host or not.
        self.drawn: dict[int, list[int]] = {}
        self.stopping: set[int] = set()
        self.speculation = self.speculate(proposes, ranks)
        # By DP rank and slot: the tokens and the salt on which its keys and values depend.
        self.cache: list[dict[int, tuple[str, tuple[int, ...]]]] = [{} for _ in range(ranks)]

    def speculate(self, proposes: str, ranks: int) -> Speculation | None:
        """Whoever proposes is right twice and wrong once, as long as it is asked."""
        if proposes == "nobody":
            return None
        if proposes == "guesses":
            return Speculation(Guesses(next_token), self.mesh, 5)
        model = CheckedDraftModel(ranks, BLOCK, next_token)
        model.live = self.live
        facts: Any = SimpleNamespace(config=SimpleNamespace(vocab_size=3), max_model_len=40)
        return Speculation(DraftProposer(facts, self.mesh, model, StepRules()), self.mesh, 5)

    @rule(
        target=requests,
        prompt=PROMPTS,
        most=st.integers(1, 20),
        priority=st.integers(-1, 1),
        salt=st.sampled_from(["", "", "a"]),
        stops=st.booleans(),
    )
    def submit(
        self, prompt: list[int], most: int, priority: int, salt: str, stops: bool
    ) -> Request:
        request = fake_request(prompt, most, priority=priority, salt=salt)
        fits = -(-(len(prompt) + most - 1) // BLOCK) <= self.pools[0].capacity
        if fits:
            self.mesh.add(request)
            self.live[request.request_id] = request
            self.drawn[request.request_id] = []
            if stops:
                self.stopping.add(request.request_id)
        else:
            with pytest.raises(PromptError, match="but the cache holds"):
                self.mesh.add(request)
        return request

    @rule(request=requests)
    def abort(self, request: Request) -> None:
        self.mesh.remove(request)
        self.mesh.remove(request)
        self.live.pop(request.request_id, None)

    @rule(count=st.integers(1, 12))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    @rule()
    def step_that_was_not_launched(self) -> None:
        """A step that is planned and not begun can be followed by anything."""
        self.propose()
        self.mesh.next_step()

    @rule()
    def launch(self) -> None:
        """Steps under way while others come and go."""
        while len(self.flights) < self.ahead and self.launch_one():
            pass

    @rule()
    def failed_steps(self) -> None:
        """Steps that gave no tokens are as if they had not begun."""
        while self.flights:
            plan, _ = self.flights.pop()
            self.mesh.cancel(plan)
            for part, cache in zip(plan.parts, self.cache, strict=True):
                for entry in () if part is None else part.entries:
                    for position in range(entry.span.start, entry.span.length):
                        block = entry.span.blocks[position // BLOCK]
                        # Nobody knows what the device got done.
                        cache[block * BLOCK + position % BLOCK] = LOST
        for request in self.live.values():
            assert request.num_pending == 0
            self.drawn[request.request_id] = list(request.output_ids)

    def step(self) -> None:
        self.launch()
        assert self.flights or not self.live, "work that no step takes up"
        if not self.flights:
            return
        plan, tokens = self.flights.popleft()
        self.mesh.complete(plan)
        drafted: Counter[Request] = Counter()
        accepted: Counter[Request] = Counter()
        for entries, ids in zip(plan.sampled, tokens, strict=True):
            for entry, token_id in zip(entries, ids, strict=True):
                request = entry.request
                drafted[request] += entry.ahead > 0
                if request.request_id in self.live and is_verified(entry):
                    accepted[request] += entry.ahead > 0
                    self.take(request, token_id)
        for request, count in drafted.items():
            if count and self.speculation is not None:
                self.speculation.settle(request, count, accepted[request])
            request.drafts = ()
            if request.request_id not in self.live:
                self.mesh.remove(request)

    def take(self, request: Request, token_id: int) -> None:
        """Give a request one token; it ends with its last, or at will."""
        drawn = self.drawn[request.request_id]
        if len(drawn) == len(request.output_ids):
            drawn.append(token_id)  # That of a draft's row.
        request.output_ids.append(token_id)
        assert drawn[: len(request.output_ids)] == request.output_ids
        assert token_id == next_token(known_tokens(request)[:-1])
        ends = token_id == 2 and request.request_id in self.stopping
        if ends or len(request.output_ids) == request.most_tokens:
            del self.live[request.request_id]

    def propose(self) -> None:
        if self.speculation is not None and not self.flights:
            lost = self.mesh.stats.preemptions
            self.speculation.propose()
            assert self.mesh.stats.preemptions == lost, "somebody is preempted for drafts"

    def launch_one(self) -> bool:
        ready = [
            (r, r.num_preempted)
            for r in self.live.values()
            if r.blocks and r.is_prefilled and not r.must_end
        ]
        self.propose()
        plan = self.mesh.next_step()
        if plan is None:
            return False
        self.check(plan, ready)
        rows = plan.rows()
        self.mesh.begin(plan)
        tokens: list[list[int]] = []
        for entries, asked in zip(plan.sampled, rows, strict=True):
            tokens.append([])
            for entry, row in zip(entries, asked, strict=True):
                request, drafts = entry.request, entry.request.drafts[: entry.ahead]
                drawn = self.drawn[request.request_id]
                if entry.ahead:
                    known = (*request.prompt_ids, *request.output_ids, *drafts)
                else:
                    known = (*request.prompt_ids, *drawn)
                assert row.request_id == request.request_id
                assert (row.index, row.ahead) == (len(known) - len(request.prompt_ids), entry.ahead)
                tokens[-1].append(next_token(known))
                if not entry.ahead:
                    drawn.append(tokens[-1][-1])
                    assert len(drawn) <= request.most_tokens
        self.flights.append((plan, tokens))
        return True

    def fed(self, part: StepPlan, rank: int) -> tuple[int, ...]:
        """The ids of the rows as a device has them."""
        before = self.flights[0][1][rank] if self.flights else []
        return tuple([i if i >= 0 else before[sampled_row(i)] for i in part.token_ids])

    def check(self, plan: MeshPlan, ready: list[tuple[Request, int]]) -> None:
        for rank, (part, cache) in enumerate(zip(plan.parts, self.cache, strict=True)):
            if part is None:
                continue
            assert part.entries
            assert len({id(e.request) for e in part.entries}) <= self.running
            prompt_tokens = len(part.token_ids) - part.num_decode
            if part.num_decode:
                assert prompt_tokens <= max(1, self.budget - part.num_decode)
            assert prompt_tokens <= self.budget
            if self.mixes:
                decoded = {id(e.request) for e in part.entries[: part.num_decode]}
                # Those that recompute generated tokens share a limit far above what is tried here.
                kept = [r for r, losses in ready if r.attn_dp == rank and r.num_preempted == losses]
                missed = [r for r in kept if id(r) not in decoded]
                if self.spreads:
                    share = -(-len(kept) // self.stages)
                    assert len(kept) - len(missed) <= share
                    waits = len(decoded) < share and not all(r.num_pending for r in missed)
                    assert not waits, "a decode waits for a prompt"
                else:
                    assert not missed, "a decode waits for a prompt"
            else:
                assert part.num_decode in (0, len(part.token_ids))
            written: Counter[int] = Counter()
            row, token_ids = 0, self.fed(part, rank)
            for number, entry in enumerate(part.entries):
                request, span = entry.request, entry.span
                assert request.request_id in self.live
                drawn = self.drawn[request.request_id]
                known = (*request.prompt_ids, *drawn, *request.drafts[: entry.ahead])
                stop = row + span.count
                assert token_ids[row:stop] == known[span.start : span.length]
                row = stop
                prefills = number >= part.num_decode
                assert prefills == (span.start < len(request.prompt_ids))
                assert prefills or span.count == 1
                assert entry.samples == (span.length == len(known))
                assert 0 not in span.blocks
                for position in range(span.start, span.length):
                    slot = span.blocks[position // BLOCK] * BLOCK + position % BLOCK
                    written[slot] += 1
                    cache[slot] = (request.cache_salt, known[: position + 1])
                # Everything that the row attends to is what it should be.
                for position in range(span.start):
                    slot = span.blocks[position // BLOCK] * BLOCK + position % BLOCK
                    assert cache[slot] == (request.cache_salt, known[: position + 1])
            assert row == len(token_ids)
            assert all(count == 1 for count in written.values()), "two rows write one slot"

    @invariant()
    def blocks_are_accounted(self) -> None:
        for rank, pool in enumerate(self.pools):
            mine = [r for r in self.live.values() if r.attn_dp == rank]
            held = Counter(block for request in mine for block in request.blocks)
            assert all(pool.holders(b) == held[b] for b in range(pool.capacity + 1))
            assert pool.num_free + pool.num_idle + len(held) == pool.capacity
            assert pool.num_held == len(held)
            assert held[0] == 0
            for request in mine:
                assert len(request.blocks) == len(set(request.blocks))
                assert request.num_computed <= len(request.blocks) * BLOCK

    @invariant()
    def nobody_is_lost(self) -> None:
        stats = self.mesh.stats
        assert stats.waiting + stats.running == self.mesh.num_unfinished == len(self.live)
        assert all(part.stats.running <= self.running for part in self.mesh.parts)

    def teardown(self) -> None:
        if not hasattr(self, "mesh"):
            return
        left = list(self.live.values())
        for _ in range(MOST_STEPS):
            if not self.live:
                break
            self.step()
            self.blocks_are_accounted()
            self.nobody_is_lost()
        assert not self.live, "requests starve"
        for request in left:
            known = request.prompt_ids
            for token in request.output_ids:
                assert token == next_token(known)
                known = (*known, token)
            whole = len(request.output_ids) == request.most_tokens
            assert whole or (request.request_id in self.stopping and known[-1] == 2)
        assert all(pool.num_available == pool.capacity for pool in self.pools)


SchedulerMachine.TestCase.settings = settings(
    max_examples=120, stateful_step_count=30, deadline=None
)
TestSchedulerMachine = SchedulerMachine.TestCase
