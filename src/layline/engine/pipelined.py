"""Running steps over pipeline stages in this process, as many at a time as there are stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import torch

from layline.comm.groups import CollectiveRecord
from layline.engine.balance import SampleRow
from layline.engine.executor import Crossed, Launched, MemoryUse, RowSpec, SamplingRows
from layline.engine.model import LoadedModel
from layline.engine.outcome import StepResult
from layline.engine.stage_program import (
    SAMPLED,
    Drawing,
    DrawnStep,
    StagedStep,
    sampled_ids,
    waits_of,
)
from layline.engine.step import MeshStep
from layline.engine.step_times import StepTimes
from layline.errors import LaylineError, RunError
from layline.layers.sampler import Sampler
from layline.pipeline.cells import Cell
from layline.pipeline.loops import Loops
from layline.pipeline.payload import Payload
from layline.pipeline.readback import PendingResult
from layline.pipeline.runtime import WAIT_S
from layline.pipeline.streams import Stream, Streams


@dataclass(frozen=True, slots=True)
class _StagedFlight(Launched):
    staged: StagedStep
    pending: PendingResult

    @property
    def crossed(self) -> list[tuple[Crossed, ...]]:
        """See Launched."""
        return [found for _, found in sorted(self.staged.crossed.items())]


def _brought_to(stream: Stream, found: DrawnStep) -> Payload:
    """The ids that the last stage drew, on the device of ``stream``; the host does not see them."""
    ids = sampled_ids(found)[SAMPLED]
    stream.adopt(ids)
    if ids.device.type == "cuda":
        ids = ids.to(torch.device("cuda", stream.device.ordinal), non_blocking=True)
    return {SAMPLED: ids}


class PipelinedExecutor:
    """The whole model in this process, its stages on streams of their own.

    Steps in flight have no request in common, are chunks of one prompt, or go on from the tokens of
    the oldest: each stage takes them in order. The last stage draws, and the first takes the ids
    from there. An error in a stage ends the run: the steps behind it are lost.
    """

    def __init__(
        self,
        stages: Sequence[LoadedModel],
        loops: Loops[PendingResult],
        streams: Streams,
        times: StepTimes | None = None,
    ) -> None:
        self.stages = tuple(stages)
        self.loops = loops
        self.num_blocks = stages[0].num_blocks
        self._streams = streams
        self._times = times or StepTimes()
        self._sampler = Sampler()
        self._rows = SamplingRows()
        self._failure: RunError | None = None

    def admit(self, request_id: int, _: int, spec: RowSpec, /) -> None:
        """See Executor."""
        self._check()
        self._rows.admit(request_id, spec)

    def release(self, request_id: int, _: int, /) -> None:
        """See Executor."""
        self._rows.release(request_id)

    def launch(
        self, step: MeshStep, rows: Sequence[Sequence[SampleRow]], before: Launched | None, /
    ) -> Launched:
        """See Executor."""
        self._check()
        self._times.use.launched(alone=before is None)
        (part,) = step.parts
        fed: PendingResult | None = None
        entering: Callable[[], Cell[Payload]] | None = None
        if part.num_fed:
            assert isinstance(before, _StagedFlight), "a step goes on from one that is not there"
            fed = before.pending
            first = self.loops.runtime.stages[0].stream
            entering = partial(fed.on, first, partial(_brought_to, first), SAMPLED)
        drawing = Drawing(self._sampler, step, self._rows.take(part, rows[0]), fed)
        staged = StagedStep(step, drawing)
        verifies = any(row.ahead for row in rows[0])
        loop = self.loops.verify if verifies else self.loops.microbatch
        try:
            return _StagedFlight(staged, loop(staged, entering))
        except RunError as error:
            # A cut that grows waits for a stage, which may have failed meanwhile.
            self._failure = error
            raise

    def collect(self, launched: Launched, /) -> StepResult:
        """See Executor."""
        assert isinstance(launched, _StagedFlight)
        self._check()
        begin = perf_counter()
        try:
            found: DrawnStep = launched.pending.wait(WAIT_S)
        except RunError as error:
            # What followed the step in the stages cannot be told apart from it any more.
            self._failure = error
            raise
        except Exception as error:
            self._failure = RunError(f"the pipeline failed: {type(error).__name__}: {error}")
            raise self._failure from error
        outcomes = found.drawn.read()
        self._times.add_passes([launched.staged.times()], perf_counter() - begin)
        self._times.use.done(launched.staged.spans(), waits_of(self.loops.runtime.stages))
        return StepResult([outcomes], [found.readings])

    def draft(self, step: MeshStep, rows: Sequence[Sequence[SampleRow]], /) -> StepResult:
        """See Executor. Refused at launch."""
        raise AssertionError("a pipeline runs without a draft model")

    def memory(self) -> MemoryUse:
        """See Executor."""
        self._check()
        return MemoryUse(
            sum(stage.weight_bytes for stage in self.stages),
            sum(stage.cache_bytes for stage in self.stages),
        )

    def collectives(self) -> list[list[CollectiveRecord]]:
        """See Executor. One rank communicates with nobody."""
        return [[]]

    def failure(self) -> LaylineError | None:
        """See Executor."""
        return self._failure

    def close(self, _: int = 0, /) -> None:
        """End the stages' streams."""
        self._streams.close()

    def _check(self) -> None:
        if self._failure is not None:
            # A new object: one that is raised twice collects both tracebacks.
            raise RunError(*self._failure.args) from self._failure
