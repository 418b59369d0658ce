"""A rank's run of pipeline stages: a stream each, and links to the processes before and after.

The thread that takes messages only issues. Activations come from the process before through its
link, walk the stages here, and go on to the process after. Of the last, tokens go to the driver,
and to the first process the ids that a step goes on from before the driver knows them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import msgspec

from layline.cores import CoreKeeper
from layline.engine.executor import SamplingRows
from layline.engine.meeting import PATIENCE_S, Neighbour, StageGroups
from layline.engine.model import LoadedModel
from layline.engine.pipeline_load import StagePlan, fitting_blocks, stage_homes
from layline.engine.rank import Answer
from layline.engine.rank_codec import packed_tokens
from layline.engine.sampled_ids import IdsIn, IdsOut
from layline.engine.stage_program import (
    SAMPLED,
    Drawing,
    Finish,
    StagedStep,
    sampled_ids,
    score_step,
    waits_of,
)
from layline.engine.step_codec import StepDecoder, in_series
from layline.engine.wire import Step, Tokens
from layline.errors import RunError
from layline.layers.sampler import Sampler
from layline.pipeline.link_choice import LinkPlan, Receiver, Sender
from layline.pipeline.process_link import LinkEnds, LinkSender
from layline.pipeline.readback import PendingResult
from layline.pipeline.runtime import Entry, PipelineRuntime
from layline.pipeline.shared_link import HandingOn, SharedSender
from layline.pipeline.streams import make_streams
from layline.pipeline.transport import CutOptions

CLOSE_S = 1.0


class StagedModel:
    """Implements rank.RankModel; see there. ``stages`` are those of this process, in order."""

    answers_later = True

    def __init__(
        self,
        plan: StagePlan,
        stages: Sequence[LoadedModel],
        ends: StageGroups,
        *,
        keeper: CoreKeeper,
        shares: bool = True,
    ) -> None:
        """``keeper`` places the threads beside the stages'.

        ``shares`` False has neighbours on this machine exchange messages all the same.
        """
        self._keeper = keeper
        here = plan.facts.spec.topology.coordinates
        self._plan = plan
        self._stages = tuple(stages)
        self._attn_dp = here.attn_dp
        self._leads = here.attn_cp == 0 and here.attn_tp == 0
        self._steps = StepDecoder()
        self._sampler = Sampler()
        self._streams = streams = make_streams(plan.engine.device)
        options = CutOptions(PATIENCE_S)
        homes = stage_homes(plan, stages, streams)
        self._before: Receiver | None = None
        self._after: Sender | None = None
        self._ids_in: IdsIn | None = None
        self._ids_out: IdsOut | None = None
        # By number, the latest steps: those that others may go on from are among them.
        self._latest: dict[int, PendingResult] = {}
        if ends.before is not None:
            link = _link(plan.stages.start - 1, ends.before, shares)
            self._before = link.receiver(homes[0].stream, streams)
        if ends.after is not None:
            link = _link(plan.stages.stop - 1, ends.after, shares)
            self._after = link.sender(homes[-1].stream, streams)
            if isinstance(self._after, SharedSender):
                homes[-1] = replace(homes[-1], program=HandingOn(homes[-1].program, self._after))
        if ends.ids is not None:
            back = LinkEnds("sampled ids", plan.num_stages - 1, 0, ends.ids.rank)
            link = LinkPlan(back, ends.ids.group, shares, PATIENCE_S)
            if self._before is None:
                self._ids_in = IdsIn(link, homes[0], streams)
            else:
                # Each request may have guesses to verify, too.
                most = plan.engine.max_running * (1 + plan.engine.speculative_tokens)
                depth = plan.num_stages + 3
                self._ids_out = IdsOut(link, homes[-1], streams, depth=depth, most_ids=most)
        # Nobody else here uses results or writes caches, so no stream stands for a caller.
        self._runtime = PipelineRuntime(homes, homes[0].stream, streams, options=options)

    @property
    def weight_bytes(self) -> int:
        """See RankModel."""
        return sum(stage.weight_bytes for stage in self._stages)

    @property
    def cache_bytes(self) -> int:
        """See RankModel."""
        return sum(stage.cache_bytes for stage in self._stages)

    def fitting_blocks(self) -> int:
        """See RankModel."""
        return fitting_blocks(self._plan, self._stages)

    def bind_cache(self, num_blocks: int) -> None:
        """See RankModel."""
        for stage in self._stages:
            stage.bind_cache(num_blocks)
        self._runtime.load_barrier()

    def step(self, message: Step, rows: SamplingRows) -> Answer:
        """See RankModel."""
        step, sampled = self._steps.decode(message)
        takes_turns = in_series(message.number, message.before, step)
        self._keeper.keep(takes_turns)
        part = step.parts[self._attn_dp]
        before = self._latest.get(message.before) if part.num_fed else None
        finish: Finish = partial(score_step, step)
        if self._after is None and self._leads:
            if before is None and part.num_fed:
                raise RunError(f"step {message.before} has no tokens to go on from")
            taken = rows.take(part, sampled[self._attn_dp])
            post = None if self._ids_out is None else self._ids_out.poster(message.number)
            finish = Drawing(self._sampler, step, taken, before, post)
        staged = StagedStep(step, finish)
        pending = self._issue(staged, part.num_fed > 0, message.before)
        self._latest[message.number] = pending
        if len(self._latest) > self._plan.num_stages + 1:
            del self._latest[next(iter(self._latest))]
        return partial(self._answer, message.number, staged, pending, takes_turns)

    def close(self) -> None:
        """See RankModel."""
        # A neighbour that is gone leaves a transfer that never ends.
        for link in (self._before, self._after, self._ids_in, self._ids_out):
            if link is not None:
                link.close()
        with contextlib.suppress(RunError):
            self._streams.close(CLOSE_S)

    def _issue(self, staged: StagedStep, goes_on: bool, number: int) -> PendingResult:
        """Walk the stages here; the step may go on from what step ``number`` drew."""
        entering: Callable[[], Entry] | None = None
        if self._before is not None:
            entering = self._before.receive
        elif goes_on and self._ids_in is not None:
            entering = partial(self._ids_in.entering, number)
        elif goes_on and self._leads and self._after is None:
            first = self._runtime.stages[0].stream
            entering = partial(self._latest[number].on, first, sampled_ids, SAMPLED)
        if goes_on and self._ids_out is not None:
            self._ids_out.wanted(self._latest[number])
        result = self._runtime.walk(staged, entering, overlap=True)
        last = self._runtime.last
        if not isinstance(self._after, LinkSender):
            return self._runtime.outcome(result, last.stream)
        self._after.send(result, last.program.room(staged), overlap=True)
        assert self._after.taken is not None, "it has just been issued"
        return PendingResult(self._after.taken, self._after.stream, self._streams)

    def _waits(self) -> list[tuple[int, float]]:
        """What each stage has waited for others so far, those in other processes included."""
        waits = dict(waits_of(self._runtime.stages))
        ends = (
            (self._plan.stages[0], self._before),
            (self._plan.stages[-1], self._after),
            (self._plan.stages[0], self._ids_in),
        )
        for stage, link in ends:
            if link is not None:
                waits[stage] = waits.get(stage, 0.0) + link.waited_s
        return sorted(waits.items())

    def _answer(
        self, number: int, staged: StagedStep, pending: PendingResult, takes_turns: bool
    ) -> Tokens | None:
        self._keeper.keep(takes_turns)
        found = pending.wait(PATIENCE_S)
        if not self._leads:
            return None
        reply = Tokens(number, [], [])
        if self._after is None:
            reply = packed_tokens(number, found.drawn.read(), found.readings)
        waits = self._waits()
        return msgspec.structs.replace(
            reply, times=staged.times(), spans=staged.spans(), waits=waits
        )


def _link(cut: int, neighbour: Neighbour, shares: bool) -> LinkPlan:
    """The link that is the cut after stage ``cut``."""
    ends = LinkEnds(f"cut {cut}", cut, cut + 1, neighbour.rank)
    return LinkPlan(ends, neighbour.group, shares, PATIENCE_S)
