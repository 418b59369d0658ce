"""Captured walks: one step's work over all stages, issued once and replayed for every later step.

What a replay reads of its step lies in one place for each stage, which is written in that stage's
order before its part of the replay: a stage never sees what a later step says.

On the CPU a capture is the list of what was issued. It stands in for device graphs: the same
rules hold for what may be in one (no growth, no wait of the host), and so do its counters.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import TYPE_CHECKING, Any

from layline.pipeline.cells import Cell

if TYPE_CHECKING:
    from layline.pipeline.runtime import PipelineRuntime
    from layline.pipeline.streams import Capture


class StaticStep:
    """A step as a captured walk knows it: one for each stage, exchanged before each replay."""

    def __init__(self, step: Any, num_stages: int) -> None:
        self._own = [step] * num_stages

    def of(self, stage: int) -> Any:
        """What the stage runs now."""
        return self._own[stage]

    def load(self, runtime: PipelineRuntime, step: Any) -> None:
        """Give every stage ``step``, in its stream's order."""
        for stage in runtime.stages:
            stage.stream.run(
                partial(self._own.__setitem__, stage.index, step),
                label=f"load a step on stage {stage.index}",
            )


def own_step(step: Any, stage: int) -> Any:
    """The step as ``stage`` runs it, captured or not."""
    return step.of(stage) if isinstance(step, StaticStep) else step


class CapturedWalk:
    """One walk, captured; replays are in order."""

    def __init__(
        self, static: StaticStep, capture: Capture, result: Cell[Any], copy: Callable[[Any], Any]
    ) -> None:
        self._static = static
        self._capture = capture
        self._result = result
        self._copy = copy

    def replay(self, runtime: PipelineRuntime, step: Any) -> Cell[Any]:
        """Run the walk for another step; its result, which later replays leave alone."""
        self._static.load(runtime, step)
        self._capture.replay()
        return runtime.last.stream.run(
            lambda: self._copy(self._result.get()), reads=self._result.buffers, label="take result"
        )


class WalkCache:
    """The captured walks of a runtime, by what a step's work depends on."""

    def __init__(self, runtime: PipelineRuntime, copy: Callable[[Any], Any]) -> None:
        """``copy`` makes a result that a replay does not overwrite."""
        self._runtime = runtime
        self._copy = copy
        self._walks: dict[Hashable, CapturedWalk] = {}

    def __contains__(self, key: Hashable) -> bool:
        return key in self._walks

    def run(self, step: Any, key: Hashable) -> Cell[Any]:
        """Replay the walk for ``key``; capture it where there is none."""
        if key not in self._walks:
            self._walks[key] = self._captured(step)
            self._runtime.counters.add("graph_captures")
        return self._walks[key].replay(self._runtime, step)

    def _captured(self, step: Any) -> CapturedWalk:
        runtime = self._runtime
        # A cut cannot grow in a capture, and must not hold what an uncaptured step has sent.
        for cut, stage in zip(runtime.cuts, runtime.stages, strict=False):
            cut.prewarm(stage.program.room(step))
        static = StaticStep(step, len(runtime.stages))
        with runtime.capture() as capture:
            result = runtime.walk(static, overlap=False)
        return CapturedWalk(static, capture, result, self._copy)
