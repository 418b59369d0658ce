"""Scheduling over attention DP: one decision-maker, a queue and a block pool for every DP rank.

Every step is one for the whole mesh: each DP rank decodes, prefills, does both or idles in it.
Where rows of both phases cannot share a step, those that prefer prompts and those that prefer
decodes take turns, so neither can starve the other, and the ranks do the same where they can.
Pure Python; the same arrivals always give the same steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass

from layline.boundary.layout import BatchVariant
from layline.boundary.rows import DpPadding, StepRows
from layline.config import EngineConfig
from layline.engine.blocks import BlockPool
from layline.engine.context_split import split_context
from layline.engine.prefix import PrefixCache
from layline.engine.prompt_chunks import Divide
from layline.engine.reading_plan import reads_of
from layline.engine.request import Request
from layline.engine.scheduler import BLOCK_SIZE, Scheduler
from layline.engine.statistics import SchedulerStats
from layline.engine.step import IDLE, MeshStep, RankStep
from layline.engine.step_plan import StepEntry, StepPlan
from layline.layers.spans import Phase

PREFILL_BESIDE_DECODES = 512
"""Most prompt tokens of a rank's step while requests decode: they wait for it to end."""


@dataclass(frozen=True, slots=True)
class SampleRow:
    """A row that is sampled: whose it is, and how many tokens the request has before it.

    The last ``ahead`` of these are drafts: fed one after the other, and perhaps not its tokens.
    """

    request_id: int
    index: int
    ahead: int = 0


@dataclass(frozen=True, slots=True)
class MeshPlan:
    """What the schedulers decided: a plan or None for each DP rank, and the step they add up to."""

    parts: tuple[StepPlan | None, ...]
    step: MeshStep

    def rows(self) -> list[list[SampleRow]]:
        """By DP rank, the sampled rows in order; before the step begins."""
        return [[_sample_row(entry) for entry in part] for part in self.sampled]

    @property
    def sampling(self) -> list[list[Request]]:
        """By DP rank, the requests whose rows are sampled, in row order."""
        return [[entry.request for entry in part] for part in self.sampled]

    @property
    def sampled(self) -> list[list[StepEntry]]:
        """By DP rank, the entries whose last row is sampled, in row order."""
        return [
            [] if part is None else [entry for entry in part.entries if entry.samples]
            for part in self.parts
        ]


@dataclass(frozen=True, kw_only=True)
class StepRules:
    """What decides the rows and the batch variant of a step."""

    tp: int = 1
    attn_cp: int = 1
    sequence_parallel: bool = False
    input_scattered: bool = False
    quantised_all_reduce: bool = False
    padding: DpPadding = DpPadding.MAX_LEN
    cp_layout: str = "contiguous"

    @classmethod
    def of(cls, engine: EngineConfig) -> StepRules:
        """The rules that a configuration asks for."""
        return cls(
            tp=engine.tp,
            attn_cp=engine.attn_cp,
            sequence_parallel=engine.sequence_parallel,
            input_scattered=engine.input_scattered,
            quantised_all_reduce=engine.quantised_all_reduce,
            padding=DpPadding(engine.dp_padding),
            cp_layout=engine.cp_layout,
        )

    @property
    def mixes(self) -> bool:
        """Whether prompts and decodes can share a step.

        Slices of a prompt's rows, the ranks' shares of its context and sums of rounded rows are
        for steps of prompts alone; a decode among them would have prompts computed otherwise.
        """
        return not (self.sequence_parallel or self.quantised_all_reduce or self.attn_cp > 1)

    def rows(self, parts: Sequence[RankStep]) -> StepRows:
        """Rows and variant of a step made of ``parts``."""
        counts = tuple([(part.num_tokens,) * self.attn_cp for part in parts])
        if not self._has_variants:
            return StepRows(BatchVariant.ORDINARY, counts, self.padding)
        variant = self._variant(parts, sum(part.num_tokens for part in parts))
        if variant is BatchVariant.CONTEXT_PARALLEL:
            counts = tuple(self._divided(part) for part in parts)
        return StepRows(variant, counts, self.padding)

    @property
    def _has_variants(self) -> bool:
        return self.attn_cp > 1 or self.sequence_parallel or self.input_scattered

    def _variant(self, parts: Sequence[RankStep], tokens: int) -> BatchVariant:
        prefills = all(part.num_decode == 0 for part in parts)
        if self.sequence_parallel and prefills:
            return BatchVariant.SEQUENCE_PARALLEL
        if self.input_scattered and tokens % self.tp == 0:
            return BatchVariant.INPUT_SCATTERED
        if self.attn_cp > 1 and prefills:
            return BatchVariant.CONTEXT_PARALLEL
        return BatchVariant.ORDINARY

    def _divided(self, part: RankStep) -> tuple[int, ...]:
        counts = [0] * self.attn_cp
        for span in part.spans:
            for rank, ranges in enumerate(split_context(span.count, self.attn_cp, self.cp_layout)):
                counts[rank] += sum(map(len, ranges))
        return tuple(counts)


class MeshScheduler:
    """Gives each request to a DP rank, and plans the steps of all.

    A request goes where the fewest tokens are to be computed with it: those of the requests there
    and its own, less what that rank's cache holds of its beginning. Ties go to the lowest rank.
    """

    def __init__(self, parts: Sequence[Scheduler], rules: StepRules) -> None:
        self.parts = tuple(parts)
        self._rules = rules
        self._prefer = Phase.PREFILL

    @classmethod
    def of(
        cls,
        engine: EngineConfig,
        num_blocks: int,
        *,
        shares: bool = True,
        num_stages: int = 1,
        divide: Divide | None = None,
    ) -> MeshScheduler:
        """The schedulers that a configuration asks for, each over ``num_blocks`` cache blocks.

        ``shares`` False keeps requests from sharing blocks even where the configuration allows it;
        ``num_stages`` are those of a pipeline with as many steps under way, and ``divide`` gives
        the chunks of its prompts.
        """
        shares = shares and engine.prefix_cache
        parts = [
            Scheduler(
                BlockPool(num_blocks, PrefixCache() if shares else None),
                block_size=BLOCK_SIZE,
                max_running=engine.max_running,
                prefill_tokens=engine.prefill_tokens,
                num_stages=num_stages,
                divide=divide,
            )
            for _ in range(engine.attn_dp)
        ]
        return cls(parts, StepRules.of(engine))

    @property
    def num_unfinished(self) -> int:
        """Requests that wait or run, on all DP ranks."""
        return sum(part.num_unfinished for part in self.parts)

    @property
    def stats(self) -> SchedulerStats:
        """What is going on, over all DP ranks."""
        return SchedulerStats(*map(sum, zip(*(astuple(p.stats) for p in self.parts), strict=True)))

    def add(self, request: Request) -> None:
        """Queue a request and set its ``attn_dp``. Raises PromptError for one that cannot fit."""
        costs = [0]
        if len(self.parts) > 1:
            keys = self.parts[0].block_keys(request)
            costs = [part.load - part.cached_tokens(keys) for part in self.parts]
        request.attn_dp = costs.index(min(costs))
        self.parts[request.attn_dp].add(request)

    def remove(self, request: Request) -> None:
        """Forget a finished or aborted request and free its blocks; a second call does nothing."""
        self.parts[request.attn_dp].remove(request)

    def draft_rooms(self, wants: Callable[[Request], int]) -> list[tuple[Request, int]]:
        """See Scheduler.draft_rooms; those of all DP ranks."""
        return [room for part in self.parts for room in part.draft_rooms(wants)]

    def settle(self, request: Request, drafted: int, accepted: int) -> None:
        """See Scheduler.settle."""
        self.parts[request.attn_dp].settle(request, drafted, accepted)

    def drafted(self, request: Request, count: int) -> None:
        """See DraftLedger.computed."""
        self.parts[request.attn_dp].drafts.computed(request, count)

    def next_step(self) -> MeshPlan | None:
        """The next step of the mesh, or None when no DP rank has anything to run."""
        limit = PREFILL_BESIDE_DECODES if any(part.decodes for part in self.parts) else None
        if self._rules.mixes:
            plans = tuple([part.next_step(limit) for part in self.parts])
        else:
            plans = tuple([part.next_phase(self._prefer, limit) for part in self.parts])
        if not any(plans):
            return None
        parts = tuple([IDLE if plan is None else _rank_step(plan) for plan in plans])
        return MeshPlan(plans, MeshStep(parts, self._rules.rows(parts)))

    def begin(self, plan: MeshPlan) -> None:
        """See Scheduler.begin."""
        # Where phases take turns.
        self._prefer = Phase.DECODE if self._prefer is Phase.PREFILL else Phase.PREFILL
        for scheduler, part in zip(self.parts, plan.parts, strict=True):
            scheduler.begin(part)

    def complete(self, plan: MeshPlan) -> None:
        """See Scheduler.complete."""
        for scheduler, part in zip(self.parts, plan.parts, strict=True):
            scheduler.complete(part)

    def cancel(self, plan: MeshPlan) -> None:
        """See Scheduler.cancel."""
        for scheduler, part in zip(self.parts, plan.parts, strict=True):
            scheduler.cancel(part)

    def forget(self) -> None:
        """See Scheduler.forget."""
        for scheduler in self.parts:
            scheduler.forget()


def _sample_row(entry: StepEntry) -> SampleRow:
    request, ahead = entry.request, entry.ahead
    index = len(request.output_ids) + request.num_pending + ahead
    return SampleRow(request.request_id, index, ahead)


def _rank_step(plan: StepPlan) -> RankStep:
    return RankStep(
        plan.num_decode,
        tuple([entry.span for entry in plan.entries]),
        plan.token_ids,
        tuple([entry.samples for entry in plan.entries]),
        tuple(reads_of(plan.entries)),
    )
