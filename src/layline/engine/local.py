"""Running steps in this process, which is the only rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from layline.comm.groups import CollectiveRecord
from layline.engine.balance import SampleRow
from layline.engine.drawing import draw_rows
from layline.engine.executor import MemoryUse, RowSpec, SamplingRows
from layline.engine.model import LoadedModel
from layline.engine.outcome import StepResult
from layline.engine.runner import Runner
from layline.engine.step import MeshStep
from layline.engine.step_times import PassTimes, StepTimes
from layline.errors import LaylineError
from layline.layers.sampler import Sampler


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
    def execute(self, step: MeshStep, rows: Sequence[Sequence[SampleRow]], /) -> StepResult:
        """See Executor."""
        result, times = self._run(self._runner, step, rows)
        self._times.add_passes([times])
        return result

    @torch.inference_mode()
    def draft(self, step: MeshStep, rows: Sequence[Sequence[SampleRow]], /) -> StepResult:
        """See Executor."""
        result, _ = self._run(self.loaded.draft_model().runner, step, rows)
        return result

    def _run(
        self, runner: Runner, step: MeshStep, rows: Sequence[Sequence[SampleRow]]
    ) -> tuple[StepResult, PassTimes]:
        (part,) = step.parts
        clock = runner.clock
        clock.start()
        if part.reads:
            logits, readings = runner.run_reading(step)
        else:
            logits, readings = runner.run(step), []
        clock.lap("execute")
        drawn = draw_rows(self._sampler, logits, self._rows.at(part, rows[0])).read()
        clock.lap("sample")
        return StepResult([drawn], [readings]), clock.times()

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
