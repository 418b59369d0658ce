"""One pipeline stage of a model as a program that the pipeline's runtime runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from layline.engine.executor import Crossed
from layline.engine.pass_clock import TimedPass
from layline.engine.runner import Runner
from layline.engine.step import MeshStep
from layline.errors import RunError
from layline.pipeline.payload import Payload, room_for

Finish = Callable[[Runner, torch.Tensor], Any]
"""What the last stage makes of its normalised hidden states [tokens, hidden]."""


@dataclass(frozen=True, slots=True)
class StagedStep:
    """One step for all stages.

    By a stage's number ``timed`` gets what it took, and ``crossed`` what it handed on.
    """

    step: MeshStep
    finish: Finish
    crossed: dict[int, tuple[Crossed, ...]] = field(default_factory=dict)
    timed: dict[int, TimedPass] = field(default_factory=dict)


class ModelStage:
    """Implements pipeline.stages.StageProgram for stage ``index``; ``runner`` has its layers."""

    def __init__(self, index: int, runner: Runner) -> None:
        self._index = index
        self._runner = runner

    def room(self, step: StagedStep) -> int:
        """The residual and one contribution, FP32 at most, for every row of the step."""
        if self._runner.model.part.is_last:
            return 0
        tokens = sum(part.num_tokens for part in step.step.parts)
        return room_for((tokens, self._runner.model.config.hidden_size), torch.float32)

    def run(self, step: StagedStep, entering: Payload | None) -> Any:
        """The stage's part of the step; of the last stage what ``finish`` makes of it.

        Raises RunError with the stage's number for whatever goes wrong in it.
        """
        try:
            return self._run(step, entering)
        except Exception as error:
            words = " ".join(f"{type(error).__name__}: {error}".split())
            raise RunError(f"pipeline stage {self._index} failed: {words}") from error

    def _run(self, step: StagedStep, entering: Payload | None) -> Any:
        clock = self._runner.clock
        clock.start()
        crossing = self._runner.walk(step.step, entering)
        if isinstance(crossing, torch.Tensor):
            result = step.finish(self._runner, crossing)
        else:
            result = crossing
            step.crossed[self._index] = tuple(
                Crossed(name, len(tensor), tensor.nbytes) for name, tensor in crossing.items()
            )
        clock.lap("execute")
        step.timed[self._index] = clock.take()
        return result
