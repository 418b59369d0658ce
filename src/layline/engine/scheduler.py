"""What runs in the next step. Pure Python without torch or a clock; the same calls always give the
same steps.

A step decodes every request whose prompt is in the cache, and fills what is left of its token
budget with chunks of prompts. A caller whose steps must have one phase asks for whole phases.

Blocks are taken as they are needed: those of the whole prompt at admission, one more whenever a
decode fills its last. When none is left, the request that stands last loses its place: its blocks
go back and it waits again, keeping its tokens. Readmitted, it computes what the cache does not hold
any more, prompt tokens by prefill and generated ones by decode, as they were computed at first.
With drafts, guesses at its next tokens, it decodes a row for each; nobody is preempted for them.

A step may be planned while the one before it still runs: :meth:`Scheduler.begin` counts a step's
tokens as computed, :meth:`Scheduler.complete` comes when those that it samples are known. Requests
decode on in between, each with the token that is under way, unless that must be their last. Devices
run steps one after the other, so blocks that are given back while a step still writes to them may
be taken at once: whoever writes to them next does so in a later step. Blocks are shared by the
tokens in them, so those of tokens that are not known yet are not offered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from layline.engine.blocks import BlockPool
from layline.engine.drafts import DraftLedger
from layline.engine.microbatches import Microbatches
from layline.engine.prefix import extend_keys
from layline.engine.prompt_chunks import Divide, chunks_of_step
from layline.engine.request import Request
from layline.engine.statistics import SchedulerStats
from layline.engine.step_plan import EntryRows, StepEntry, StepPlan, joined_plan, sampled_row
from layline.engine.waiting import Ticket, WaitingQueue
from layline.errors import PromptError
from layline.layers.spans import Phase, SequenceSpan

BLOCK_SIZE = 16
"""Tokens in a block of the key-value cache."""
REPLAYED_ROWS = 64
"""Most generated tokens that a decode step computes once more for readmitted requests."""
EXPECTED_TOKENS = 256
"""What a request is expected to generate at most where loads are compared."""


class Scheduler:
    """Holds waiting and running requests and the blocks they own."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        block_size: int,
        max_running: int,
        prefill_tokens: int,
        num_stages: int = 1,
        divide: Divide | None = None,
    ) -> None:
        """On several pipeline stages as many steps are under way, each with other requests."""
        self._pool = pool
        self._divide = divide
        self._block_size = block_size
        self._max_running = max_running
        self._prefill_tokens = prefill_tokens
        self._waiting = WaitingQueue()
        self._tickets: dict[int, Ticket] = {}
        self._running: dict[int, Ticket] = {}
        self._nothing_fits = False
        self._microbatches = Microbatches(num_stages)
        self._lookups = self._hits = self._preemptions = 0
        self.drafts = DraftLedger(pool, block_size)

    @property
    def num_unfinished(self) -> int:
        """Requests that wait or run."""
        return len(self._tickets)

    @property
    def decodes(self) -> bool:
        """True when a running request has its prompt in the cache."""
        return any(ticket.request.is_prefilled for ticket in self._running.values())

    @property
    def load(self) -> int:
        """Tokens of the waiting and running requests, those to come included."""
        total = 0
        for ticket in self._tickets.values():
            request = ticket.request
            total += min(request.most_length, request.num_tokens + EXPECTED_TOKENS)
        return total

    @property
    def stats(self) -> SchedulerStats:
        """What is going on."""
        return SchedulerStats(
            waiting=len(self._waiting),
            running=len(self._running),
            blocks=self._pool.capacity,
            blocks_held=self._pool.num_held,
            blocks_idle=self._pool.num_idle,
            prefix_lookups=self._lookups,
            prefix_hits=self._hits,
            preemptions=self._preemptions,
            drafted=self.drafts.drafted,
            accepted=self.drafts.accepted,
        )

    def blocks_for(self, length: int) -> int:
        """Blocks that a sequence of ``length`` tokens takes."""
        return -(-length // self._block_size)

    def cached_tokens(self, keys: list[bytes]) -> int:
        """Tokens of a sequence with these block keys that need not be computed here."""
        prefix = self._pool.prefix
        return 0 if prefix is None else prefix.count(keys) * self._block_size

    def block_keys(self, request: Request) -> list[bytes]:
        """The keys of the blocks that the request could share now."""
        if self._pool.prefix is None:
            return []
        keys: list[bytes] = []
        extend_keys(keys, request, self._sharable(request), self._block_size)
        return keys

    def add(self, request: Request) -> None:
        """Queue a request. Raises PromptError for one that the cache could not even hold alone."""
        # The last token that it generates is never fed, so it needs no place.
        longest = max(request.most_length - 1, len(request.prompt_ids))
        needed, capacity = self.blocks_for(longest), self._pool.capacity
        if needed > capacity:
            raise PromptError(
                f"the prompt has {len(request.prompt_ids)} tokens and max_tokens lets it grow to "
                f"{request.most_length}, but the cache holds {capacity * self._block_size}; "
                f"expected at most {capacity * self._block_size + 1} together"
            )
        self._tickets[request.request_id] = self._waiting.enter(request)
        self._nothing_fits = False

    def remove(self, request: Request) -> None:
        """Forget a finished or aborted request and free its blocks; a second call does nothing."""
        ticket = self._tickets.pop(request.request_id, None)
        if ticket is None:
            return
        if self._running.pop(request.request_id, None) is None:
            self._waiting.leave(ticket, admitted=False)
        else:
            if request.error is not None:
                # What it computed may be why it failed: nobody is to begin with it.
                self._pool.disown(request.blocks)
            self._release(request)
        self._nothing_fits = False

    def next_step(self, prompt_tokens: int | None = None) -> StepPlan | None:
        """All requests that can decode, and prompts with what they leave of the token budget.

        None without any work. Prompts have at most ``prompt_tokens`` tokens, and at least one
        however many requests decode: neither waits for the other.
        """
        decodes = self._decode()
        budget = self._budget(prompt_tokens)
        left = min(budget, max(1, self._prefill_tokens - len(decodes[0])))
        return joined_plan(decodes, self._prefill(left)) or self._late_decode()

    def next_phase(self, prefer: Phase, prompt_tokens: int | None = None) -> StepPlan | None:
        """A step of one phase: the preferred one where there is work of it, else the other.

        None without any work.
        """
        if prefer is Phase.DECODE:
            plan = self._late_decode()
            if plan is not None:
                return plan
        prompts = self._prefill(self._budget(prompt_tokens))
        return joined_plan(([], []), prompts) or self._late_decode()

    def begin(self, plan: StepPlan | None) -> None:
        """Record that the step is under way, so that the next one can be planned.

        Its prompts count as cached from here on: only later steps can read them. None is a step in
        which nothing runs here.
        """
        number = self._microbatches.begin()
        if plan is None:
            return
        row = 0
        for entry in plan.entries:
            if entry.ahead:
                row += 1
                continue  # Whether a draft is a token of the request is not known yet.
            request = entry.request
            request.num_computed = entry.span.length
            request.num_read = max(request.num_read, entry.span.length)
            if entry.samples:
                request.num_pending += 1
                request.pending_row, request.pending_step = row, number
                row += 1
        prompts = plan.entries[plan.num_decode :]
        for entry in prompts:
            self._offer(entry)
        if prompts:
            self._nothing_fits = False  # A waiting request may share what is computed.

    def complete(self, plan: StepPlan | None) -> None:
        """Record that the oldest step is done; its requests are given its tokens next."""
        self._microbatches.complete()
        if plan is None:
            return
        for number, entry in enumerate(plan.entries):
            if entry.ahead:
                continue
            request = entry.request
            request.num_pending -= entry.samples
            # Only now are all tokens known that a decode has fed.
            if number < plan.num_decode and entry.span.length % self._block_size == 0:
                self._offer(entry)

    def cancel(self, plan: StepPlan | None) -> None:
        """Undo the beginning of a step that gave no tokens; of several, the latest comes first."""
        self._microbatches.cancel()
        if plan is None:
            return
        for number, entry in reversed(list(enumerate(plan.entries))):
            if entry.ahead:
                continue
            request = entry.request
            request.num_pending -= entry.samples
            if number >= plan.num_decode:
                request.num_read = entry.num_read
            if request.blocks is entry.span.blocks:  # Else it has lost them in between.
                request.num_computed = entry.span.start
        self._withdraw(plan.entries[plan.num_decode :])

    def forget(self) -> None:
        """Nobody waits for the steps under way any more: their requests have ended."""
        self._microbatches.forget()

    def _withdraw(self, prompts: Sequence[StepEntry]) -> None:
        """Take back the blocks that a failed step's prompts were to fill.

        Who counts on one of them begins again: its request may be gone, and fill it no more.
        """
        size = self._block_size
        stale: set[int] = set()
        for entry in prompts:
            span = entry.span
            stale.update(span.blocks[span.start // size : span.length // size])
            ticket = self._running.get(entry.request.request_id)
            if ticket is not None and ticket.request.blocks is span.blocks:
                ticket.num_kept = min(ticket.num_kept, span.start // size)
        self._pool.disown(stale)
        for ticket in list(self._running.values()):
            request = ticket.request
            if not stale.isdisjoint(request.blocks[: request.num_computed // size]):
                self._preempt(ticket)

    def _offer(self, entry: StepEntry) -> None:
        ticket = self._running.get(entry.request.request_id)
        if ticket is not None and ticket.request.blocks is entry.span.blocks:
            self._keep_blocks(ticket, entry.span.length)

    def draft_rooms(self, wants: Callable[[Request], int]) -> list[tuple[Request, int]]:
        """Requests that may bring drafts to the next step, and how many; see DraftLedger.rooms."""
        ready = [each.request for each in self._running.values() if each.request.is_prefilled]
        return self.drafts.rooms(ready, len(self._running), wants)

    def settle(self, request: Request, drafted: int, accepted: int) -> None:
        """Record that ``accepted`` of ``drafted`` drafts are tokens; the request knows them."""
        self.drafts.count(drafted, accepted)
        request.num_computed += accepted
        ticket = self._running.get(request.request_id)
        if ticket is not None and accepted:
            self._keep_blocks(ticket, request.num_computed)

    def _budget(self, prompt_tokens: int | None) -> int:
        return min(self._prefill_tokens, prompt_tokens or self._prefill_tokens)

    def _late_decode(self) -> StepPlan | None:
        """Decodes alone. Who has just been admitted may have all of its prompt in the cache."""
        return joined_plan(self._decode(), ([], []))

    def _prefill(self, budget: int) -> EntryRows:
        filling: set[bytes] = set()
        prompts = self._prompts(filling)
        chunks = chunks_of_step(prompts, budget, filling, self._block_size, self._divide)
        entries: list[StepEntry] = []
        token_ids: list[int] = []
        for request, count in chunks:
            start, total = request.num_computed, len(request.prompt_ids)
            span = SequenceSpan(start, count, request.blocks, rope_length=total)
            # A readmitted request has further tokens, to be computed by decode.
            samples = span.length == total and not request.output_ids and request.most_tokens > 0
            entries.append(StepEntry(request, span, samples, request.num_read))
            token_ids.extend(request.prompt_ids[start : start + count])
        return entries, token_ids

    def _prompts(self, filling: set[bytes]) -> Iterator[tuple[Ticket, bool]]:
        """Requests to prefill, running ones first, and whether others are behind.

        Each further one is admitted when it is asked for, with ``filling`` as it is by then.
        """
        begun = [each for each in self._running.values() if not each.request.is_prefilled]
        for number, ticket in enumerate(begun, start=1):
            yield ticket, number < len(begun) or self._may_admit
        while self._may_admit:
            admitted = self._admit(filling)
            if admitted is None:
                return
            if not admitted.request.is_prefilled:
                yield admitted, self._may_admit

    @property
    def _may_admit(self) -> bool:
        return (
            not self._nothing_fits
            and len(self._waiting) > 0
            and len(self._running) < self._max_running
        )

    def _admit(self, filling: set[bytes]) -> Ticket | None:
        """Let the first waiting request run that fits; those that do not may be overtaken."""
        postponed = False
        for ticket in self._waiting:
            found = self._found(ticket)
            # Who lost its place gets the token that was under way first: it is to be fed, too.
            if ticket.request.num_pending or self._is_being_filled(ticket, len(found), filling):
                postponed = True
            elif self._fits(ticket.request, found):
                self._start(ticket, found)
                return ticket
            if ticket.is_aged:
                break
        self._nothing_fits = not postponed
        return None

    def _found(self, ticket: Ticket) -> list[int]:
        """Cached blocks of the request's beginning; the last known token is always computed."""
        prefix = self._pool.prefix
        if prefix is None:
            return []
        sharable = self._sharable(ticket.request)
        extend_keys(ticket.keys, ticket.request, sharable, self._block_size)
        return prefix.match(ticket.keys[:sharable])

    def _is_being_filled(self, ticket: Ticket, found: int, filling: set[bytes]) -> bool:
        shared = self._sharable(ticket.request)
        return bool(filling) and found < shared and ticket.keys[found] in filling

    def _fits(self, request: Request, found: list[int]) -> bool:
        """Whether the blocks are there, and beside other requests one for each to grow into."""
        spare = len(self._running)
        missing = self.blocks_for(request.num_tokens) - len(found)
        return self._pool.num_available - self._pool.idle_among(found) >= missing + spare

    def _start(self, ticket: Ticket, found: list[int]) -> None:
        request = ticket.request
        self._pool.share(found)
        fresh = self._pool.take(self.blocks_for(request.num_tokens) - len(found))
        assert fresh is not None, "what fits can be taken"
        # A new list: tables that were sent to ranks are told apart by their identity.
        request.blocks = [*found, *fresh]
        request.num_computed = len(found) * self._block_size
        request.num_drafted = self.drafts.found(found)
        if not request.num_preempted:
            request.num_cached = request.num_computed
        ticket.num_kept = len(found)
        self._lookups += request.num_tokens
        self._hits += request.num_computed
        self._waiting.leave(ticket, admitted=True)
        self._running[request.request_id] = ticket

    def _decode(self) -> EntryRows:
        running = [each.request for each in self._running.values()]
        ready = [each for each in running if each.is_prefilled and not each.must_end]
        ready = self._grow(list(self._microbatches.next_of(ready)))
        entries: list[StepEntry] = []
        token_ids: list[int] = []
        replayed = 0
        for request in ready:
            known, start = request.num_tokens, request.num_computed
            pending = request.num_pending
            if pending or known - start == 1:
                latest = sampled_row(request.pending_row) if pending else request.output_ids[-1]
                drafts = request.drafts[: self.drafts.free_slots(request)]
                for ahead, token_id in enumerate((latest, *drafts)):
                    length = known + pending + ahead
                    span = SequenceSpan(start + ahead, 1, request.blocks, length)
                    entries.append(StepEntry(request, span, True, ahead=ahead))
                    token_ids.append(token_id)
                continue
            stop = min(known, start + REPLAYED_ROWS - replayed)
            replayed += max(0, stop - start)
            for position in range(start, stop):
                span = SequenceSpan(position, 1, request.blocks, position + 1)
                entries.append(StepEntry(request, span, position + 1 == known))
            token_ids.extend(request.token_ids(start, stop))
        return entries, token_ids

    def _grow(self, ready: list[Request]) -> list[Request]:
        """Give a block to each request that has filled its last; those of ``ready`` that go on."""
        full = [request for request in ready if self.drafts.free_slots(request) < 0]
        running = (ticket.request for ticket in self._running.values())
        if len(full) > self._pool.num_available and self.drafts.take_back(running):
            self._nothing_fits = False
        if len(full) <= self._pool.num_available:
            for request in full:
                self._grow_one(request)
            return ready
        # Those that stand first take what there is.
        full.sort(key=lambda request: self._running[request.request_id].rank)
        for request in full:
            while request.request_id in self._running and not self._grow_one(request):
                self._preempt(max(self._running.values(), key=lambda ticket: ticket.rank))
        return [request for request in ready if request.request_id in self._running]

    def _grow_one(self, request: Request) -> bool:
        blocks = self._pool.take(1)
        if blocks is None:
            return False
        request.blocks.extend(blocks)
        return True

    def _preempt(self, ticket: Ticket) -> None:
        request = ticket.request
        del self._running[request.request_id]
        self._release(request)
        request.num_computed = 0
        request.num_preempted += 1
        self._preemptions += 1
        self._waiting.reenter(ticket)
        self._nothing_fits = False

    def _release(self, request: Request) -> None:
        self._pool.give_back(request.blocks)
        request.blocks = []

    def _sharable(self, request: Request) -> int:
        """Full blocks before the last known token, and before what is still to be read."""
        tokens = request.num_tokens - 1
        if request.reading is not None:
            tokens = min(tokens, request.reading.cacheable(request.num_read, tokens))
        return tokens // self._block_size

    def _keep_blocks(self, ticket: Ticket, length: int) -> None:
        """Offer the full blocks of the request's first ``length`` tokens to the prefix cache."""
        prefix, request = self._pool.prefix, ticket.request
        full = length // self._block_size
        if prefix is None or full <= ticket.num_kept:
            return
        extend_keys(ticket.keys, request, full, self._block_size)
        for number in range(ticket.num_kept, full):
            prefix.keep(ticket.keys[number], request.blocks[number])
        ticket.num_kept = full
