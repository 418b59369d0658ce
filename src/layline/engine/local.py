"""Running steps in this process, which is the only rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import torch

from layline.comm.groups import CollectiveRecord
from layline.engine.balance import SampleRow
from layline.engine.drawing import DrawnRows, draw_rows
from layline.engine.executor import Launched, MemoryUse, RowSpec, SamplingRows
from layline.engine.model import LoadedModel
from layline.engine.outcome import FailedRow, StepResult
from layline.engine.pass_clock import TimedPass
from layline.engine.reading import Reading
from layline.engine.runner import Runner
from layline.engine.step import MeshStep
from layline.engine.step_times import StepTimes
from layline.errors import LaylineError
from layline.layers.sampler import Sampler


@dataclass(frozen=True, slots=True)
class _LocalStep(Launched):
    drawn: DrawnRows
    readings: list[Reading | FailedRow]
    timed: TimedPass


class LocalExecutor:
    """The whole model in this process: one rank."""

    def __init__(self, loaded: LoadedModel, times: StepTimes | None = None) -> None:
        self.loaded = loaded
        self._times = times or StepTimes()
        self.num_blocks = loaded.num_blocks
        self._runner = loaded.runner
        self._sampler = Sampler()
        self._rows = SamplingRows()

    def admit(self, request_id: int, _: int, spec: RowSpec, /) -> None:
        """See Executor."""
        self._rows.admit(request_id, spec)

    def release(self, request_id: int, _: int, /) -> None:
        """See Executor."""
        self._rows.release(request_id)

    @torch.inference_mode()
    def launch(
        self, step: MeshStep, rows: Sequence[Sequence[SampleRow]], before: Launched | None, /
    ) -> Launched:
        """See Executor. On the CPU the step is done when this returns."""
        return self._run(self._runner, step, rows, before)

    @torch.inference_mode()
    def draft(self, step: MeshStep, rows: Sequence[Sequence[SampleRow]], /) -> StepResult:
        """See Executor."""
        done = self._run(self.loaded.draft_model().runner, step, rows, None)
        return StepResult([done.drawn.read()], [done.readings])

    def _run(
        self,
        runner: Runner,
        step: MeshStep,
        rows: Sequence[Sequence[SampleRow]],
        before: Launched | None,
    ) -> _LocalStep:
        (part,) = step.parts
        clock = runner.clock
        clock.start()
        fed = before.drawn if isinstance(before, _LocalStep) else None
        ids = None if fed is None else fed.token_ids
        logits, readings = runner.run_reading(step, ids)
        clock.lap("execute")
        states = self._rows.at(part, rows[0], None if fed is None else fed.read_ids)
        drawn = draw_rows(self._sampler, logits, states)
        clock.lap("sample")
        return _LocalStep(drawn, readings, clock.take())

    def collect(self, launched: Launched, /) -> StepResult:
        """See Executor."""
        assert isinstance(launched, _LocalStep)
        timed = launched.timed
        begin = perf_counter()
        outcomes = launched.drawn.read()
        timed.add("sample", perf_counter() - begin)
        self._times.add_passes([timed.times()])
        return StepResult([outcomes], [launched.readings])

    def memory(self) -> MemoryUse:
        """See Executor."""
        return MemoryUse(self.loaded.weight_bytes, self.loaded.cache_bytes)

    def collectives(self) -> list[list[CollectiveRecord]]:
        """See Executor. One rank communicates with nobody."""
        return [[]]

    def failure(self) -> LaylineError | None:
        """See Executor. There is no other process that could be gone."""
        return None

    def close(self, _: int = 0, /) -> None:
        """Nothing runs elsewhere."""
