"""How long the parts of a step take on the host, and each pipeline stage where it runs.

No torch here. One thread writes; others may read and see numbers that are at most a step old.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from time import perf_counter

import msgspec

from layline.engine.statistics import Histogram
from layline.pipeline.handovers import Handover

PARTS = ("draft", "schedule", "prepare", "execute", "sample", "wire", "deliver")
"""``wire`` is what a step of other processes takes besides their own three parts, ``draft`` all
that guessing tokens takes."""
PART_BOUNDS = (
    *(0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005),
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)
"""Upper bounds in seconds: the host's parts take some ten microseconds."""


class PassTimes(msgspec.Struct, array_like=True, frozen=True):
    """Seconds of one rank's pass: the batch built, the layers and the head run, tokens drawn.

    ``stages`` has (pipeline stage, seconds on its device) of the stages that the rank runs. On a
    CUDA device the three parts are the host's: ``execute`` launches, ``sample`` waits for the ids.
    """

    prepare: float = 0.0
    execute: float = 0.0
    sample: float = 0.0
    stages: list[tuple[int, float]] = []

    @property
    def total(self) -> float:
        """All three parts."""
        return self.prepare + self.execute + self.sample


def joined_passes(passes: Sequence[PassTimes]) -> PassTimes:
    """Passes over pipeline stages as one: what they took together, and each stage's own."""
    return PassTimes(
        prepare=sum(each.prepare for each in passes),
        execute=sum(each.execute for each in passes),
        sample=sum(each.sample for each in passes),
        stages=[stage for each in passes for stage in each.stages],
    )


class StepTimes:
    """Histograms of the parts of steps, by name, and of stages, by number; all in seconds."""

    def __init__(self) -> None:
        self.parts = {name: Histogram(PART_BOUNDS) for name in PARTS}
        self.stages: dict[int, Histogram] = {}
        self.use = StageUse()
        self._open: dict[str, float] = {}

    def add(self, part: str, seconds: float) -> None:
        """More time of a part of the step that runs; a part may come in several pieces."""
        self._open[part] = self._open.get(part, 0.0) + seconds

    def since(self, part: str, begin: float) -> None:
        """As :meth:`add`, from a value of ``perf_counter`` until now."""
        self.add(part, perf_counter() - begin)

    def add_passes(self, passes: Iterable[PassTimes], waited: float | None = None) -> None:
        """What the ranks of this step report; of several the slowest counts.

        ``waited`` is how long this process waited for ranks in other processes.
        """
        found = list(passes)
        if not found:
            return
        slowest = max(found, key=lambda each: each.total)
        for part in ("prepare", "execute", "sample"):
            self.add(part, getattr(slowest, part))
        if waited is not None:
            self.add("wire", max(0.0, waited - slowest.total))
        stages: dict[int, float] = {}
        for each in found:
            for stage, seconds in each.stages:
                stages[stage] = max(seconds, stages.get(stage, 0.0))
        for stage, seconds in stages.items():
            self.stages.setdefault(stage, Histogram(PART_BOUNDS)).observe(seconds)

    def end_step(self) -> None:
        """Count what was added since the last call as one step's."""
        ended, self._open = self._open, {}
        for part, seconds in ended.items():
            self.parts[part].observe(seconds)


class StageUse:
    """What pipeline stages do with their time, by number, in seconds.

    ``busy`` is spent in steps, ``bubble`` beside them while any step was under way; ``slot_wait``
    is the part of it in which work was there and waited for another stage, where that is known.
    """

    def __init__(self) -> None:
        self.busy: dict[int, float] = {}
        self.bubble: dict[int, float] = {}
        self.slot_wait: dict[int, float] = {}
        self._since = 0.0
        self._ends: dict[int, float] = {}

    def launched(self, *, alone: bool) -> None:
        """A step begins; ``alone`` where none was under way."""
        if alone:
            self._since = perf_counter()

    def done(
        self, spans: Iterable[tuple[int, float, float]], waits: Iterable[tuple[int, float]]
    ) -> None:
        """A step is done: (stage, begin, end) of its parts, and what stages have waited so far."""
        for stage, begin, end in spans:
            idle = begin - max(self._since, self._ends.get(stage, 0.0))
            self.busy[stage] = self.busy.get(stage, 0.0) + end - begin
            self.bubble[stage] = self.bubble.get(stage, 0.0) + max(0.0, idle)
            self._ends[stage] = end
        self.slot_wait.update(waits)

    def handed(self, handovers: Sequence[Handover]) -> None:
        """What stages handed over to other processes and waited for, for a timeline."""


class OverlapCount:
    """Counts steps that one pipeline stage began before a later one was done with those before.

    Times are comparable where all stages are on one machine.
    """

    def __init__(self) -> None:
        self.count = 0
        self._done_at = 0.0

    def note(self, spans: Sequence[tuple[int, float, float]]) -> None:
        """The next step's (stage, begin, end), in the order of stages."""
        if not spans:
            return
        self.count += spans[0][1] < self._done_at
        self._done_at = spans[-1][2]
