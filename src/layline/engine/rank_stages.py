"""A rank's run of pipeline stages: a stream each, and links to the processes before and after.

The thread that takes messages only issues. Activations come from the process before through its
link, walk the stages here, and go on to the process after; of the last, tokens go to the driver.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from functools import partial

import msgspec

from layline.engine.executor import SamplingRows
from layline.engine.meeting import PATIENCE_S, Neighbour, StageGroups
from layline.engine.model import LoadedModel
from layline.engine.pipeline_load import StagePlan, fitting_blocks, stage_homes
from layline.engine.rank import Answer
from layline.engine.rank_codec import packed_tokens
from layline.engine.stage_program import Finish, StagedStep, draw_step, score_step, waits_of
from layline.engine.step_codec import StepDecoder
from layline.engine.wire import Step, Tokens
from layline.errors import RunError
from layline.layers.sampler import Sampler
from layline.pipeline.process_link import LinkReceiver, LinkSender
from layline.pipeline.readback import PendingResult
from layline.pipeline.runtime import PipelineRuntime
from layline.pipeline.streams import make_streams
from layline.pipeline.torch_wire import LinkEnds, TorchWire
from layline.pipeline.transport import CutOptions

CLOSE_S = 1.0
SWITCH_S = 1e-4
"""How long a thread here may keep the interpreter from another one, in seconds.

The link's threads have microseconds of work each, and a neighbour that waits for it.
"""


class StagedModel:
    """Implements rank.RankModel; see there. ``stages`` are those of this process, in order."""

    answers_later = True

    def __init__(self, plan: StagePlan, stages: Sequence[LoadedModel], ends: StageGroups) -> None:
        here = plan.facts.spec.topology.coordinates
        self._plan = plan
        self._stages = tuple(stages)
        self._attn_dp = here.attn_dp
        self._leads = here.attn_cp == 0 and here.attn_tp == 0
        self._steps = StepDecoder()
        self._sampler = Sampler()
        sys.setswitchinterval(SWITCH_S)
        self._streams = streams = make_streams(plan.engine.device)
        options = CutOptions(PATIENCE_S)
        homes = stage_homes(plan, stages, streams)
        # Nobody else here uses results or writes caches, so no stream stands for a caller.
        self._runtime = PipelineRuntime(homes, homes[0].stream, streams, options=options)
        self._before: LinkReceiver | None = None
        self._after: LinkSender | None = None
        if ends.before is not None:
            cut, wire = _wire(plan.stages.start - 1, ends.before)
            self._before = LinkReceiver(cut, homes[0].stream, streams, wire)
        if ends.after is not None:
            cut, wire = _wire(plan.stages.stop - 1, ends.after)
            self._after = LinkSender(cut, homes[-1].stream, streams, wire, options=options)

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
        """See RankModel. The plan knows every token, so no step waits for the one before."""
        step, sampled = self._steps.decode(message)
        part = step.parts[self._attn_dp]
        finish: Finish = partial(score_step, step)
        if self._after is None and self._leads:
            states = rows.at(part, sampled[self._attn_dp])
            finish = partial(draw_step, self._sampler, step, states)
        staged = StagedStep(step, finish)
        return partial(self._answer, message.number, staged, self._issue(staged))

    def close(self) -> None:
        """See RankModel."""
        # A neighbour that is gone leaves a transfer that never ends.
        with contextlib.suppress(RunError):
            self._streams.close(CLOSE_S)

    def _issue(self, staged: StagedStep) -> PendingResult:
        entering = None if self._before is None else self._before.receive()
        result = self._runtime.walk(staged, entering, overlap=True)
        last = self._runtime.last
        if self._after is None:
            return self._runtime.outcome(result, last.stream)
        self._after.send(result, last.program.room(staged), overlap=True)
        assert self._after.taken is not None, "it has just been issued"
        return PendingResult(self._after.taken, self._after.stream, self._streams)

    def _answer(self, number: int, staged: StagedStep, pending: PendingResult) -> Tokens | None:
        found = pending.wait(PATIENCE_S)
        if not self._leads:
            return None
        reply = Tokens(number, [], [])
        if self._after is None:
            reply = packed_tokens(number, found.drawn.read(), found.readings)
        waits = waits_of(self._runtime.stages)
        return msgspec.structs.replace(
            reply, times=staged.times(), spans=staged.spans(), waits=waits
        )


def _wire(cut: int, neighbour: Neighbour) -> tuple[str, TorchWire]:
    """The name of the cut after stage ``cut``, and this process's end of it."""
    ends = LinkEnds(f"cut {cut}", cut, cut + 1, neighbour.rank)
    return ends.cut, TorchWire(ends, neighbour.group, timeout_s=PATIENCE_S)
