"""One pipeline stage of a model as a program that the pipeline's runtime runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch

from layline.boundary.rows import rank_rows
from layline.engine.drawing import DrawnRows, draw_rows
from layline.engine.executor import Crossed, TakenRows
from layline.engine.outcome import FailedRow
from layline.engine.pass_clock import TimedPass
from layline.engine.reading import Reading
from layline.engine.runner import Prepared, Runner
from layline.engine.step import MeshStep
from layline.engine.step_times import PassTimes, joined_passes
from layline.errors import CollectiveError, RunError
from layline.layers.sampler import Sampler
from layline.pipeline.payload import Payload, room_for
from layline.pipeline.readback import PendingResult
from layline.pipeline.stages import StageHome

SAMPLED = "sampled ids"
"""What enters the first stage, where a step goes on from tokens that the host does not know yet."""
Finish = Callable[[Runner, torch.Tensor], Any]
"""What the last stage makes of its normalised hidden states [tokens, hidden]."""


@dataclass(frozen=True, slots=True)
class StagePass:
    """What one stage took, and from when to when by the machine's monotonic clock, in seconds."""

    timed: TimedPass
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class StagedStep:
    """One step for all stages.

    By a stage's number ``prepared`` gets its own, ``passes`` what it took, and ``crossed`` what
    it handed on.
    """

    step: MeshStep
    finish: Finish
    prepared: dict[int, tuple[MeshStep, Prepared]] = field(default_factory=dict)
    crossed: dict[int, tuple[Crossed, ...]] = field(default_factory=dict)
    passes: dict[int, StagePass] = field(default_factory=dict)

    def times(self) -> PassTimes:
        """The stages' passes as one, once the step is done."""
        found = []
        for stage, done in sorted(self.passes.items()):
            times = done.timed.times()
            seconds = [(stage, seconds) for _, seconds in times.stages]
            found.append(PassTimes(times.prepare, times.execute, times.sample, seconds))
        return joined_passes(found)

    def spans(self) -> list[tuple[int, float, float]]:
        """(stage, begin, end) of the stages that are done."""
        return [(stage, done.begin, done.end) for stage, done in sorted(self.passes.items())]


class ModelStage:
    """Implements pipeline.stages.StageProgram for stage ``index``; ``runner`` has its layers."""

    def __init__(self, index: int, runner: Runner) -> None:
        self._index = index
        self._runner = runner

    def room(self, step: StagedStep) -> int:
        """The residual and one contribution, FP32 at most, for every row of the step."""
        if self._runner.model.part.is_last:
            return 0
        # Slices of the rows may be padded to equal ones.
        topology = self._runner.topology
        tokens = rank_rows(step.step.rows, topology).total + topology.attn_tp - 1
        return room_for((tokens, self._runner.model.config.hidden_size), torch.float32)

    def prepare(self, step: StagedStep) -> None:
        """The stage's batch, made while the stages before it run."""
        with self._named_errors():
            step.prepared[self._index] = (step.step, self._runner.prepare(step.step))

    def run(self, step: StagedStep, entering: Payload | None) -> Any:
        """The stage's part of the step; of the last stage what ``finish`` makes of it.

        Raises RunError with the stage's number for whatever goes wrong in it.
        """
        with self._named_errors():
            return self._run(step, entering)

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except CollectiveError as error:
            # Perhaps another rank's end is why: whoever supervises them tells by the class.
            raise CollectiveError(f"pipeline stage {self._index} failed: {error}") from error
        except Exception as error:
            words = " ".join(f"{type(error).__name__}: {error}".split())
            raise RunError(f"pipeline stage {self._index} failed: {words}") from error

    def _run(self, step: StagedStep, entering: Payload | None) -> Any:
        begin = perf_counter()
        clock = self._runner.clock
        clock.start()
        of, prepared = step.prepared.pop(self._index, (None, None))
        if of is not step.step:
            prepared = None
        sampled = None
        if self._runner.model.part.is_first and entering is not None:
            sampled, entering = entering[SAMPLED], None
        crossing = self._runner.walk(step.step, entering, sampled, prepared)
        if isinstance(crossing, torch.Tensor):
            result = step.finish(self._runner, crossing)
        else:
            result = crossing
            step.crossed[self._index] = tuple(
                Crossed(name, len(tensor), tensor.nbytes) for name, tensor in crossing.items()
            )
        clock.lap("execute")
        step.passes[self._index] = StagePass(clock.take(), begin, perf_counter())
        return result


@dataclass(frozen=True, slots=True)
class DrawnStep:
    """What the last stage leaves of a step where tokens are drawn."""

    drawn: DrawnRows
    readings: list[Reading | FailedRow]


@dataclass(frozen=True, slots=True)
class Drawing:
    """How the rows of a step are drawn.

    ``before`` is what it goes on from, if the plan says so; ``post`` is given the ids.
    """

    sampler: Sampler
    step: MeshStep
    rows: TakenRows
    before: PendingResult | None = None
    post: Callable[[torch.Tensor], None] | None = None

    def __call__(self, runner: Runner, hidden: torch.Tensor) -> DrawnStep:
        """On the last stage's stream: score the rows that sample, draw, read what is asked for."""
        logits, readings = runner.finish(hidden, self.step)
        # The step before was drawn on this stream.
        read = None if self.before is None else self.before.value.get().drawn.read_ids
        drawn = draw_rows(self.sampler, logits, self.rows.states(read))
        if self.post is not None:
            self.post(drawn.token_ids)
        return DrawnStep(drawn, readings)


def sampled_ids(found: DrawnStep) -> Payload:
    """What the first stage is fed of a step that was drawn."""
    return {SAMPLED: found.drawn.token_ids}


def score_step(step: MeshStep, runner: Runner, hidden: torch.Tensor) -> None:
    """This rank's share of scoring and reading, where another rank of the last stage draws."""
    runner.finish(hidden, step)


def waits_of(stages: Iterable[StageHome]) -> list[tuple[int, float]]:
    """What each stage's stream has waited for others so far, in seconds, where streams tell."""
    found = [(stage.index, getattr(stage.stream, "blocked_s", None)) for stage in stages]
    return [(index, seconds) for index, seconds in found if seconds is not None]
