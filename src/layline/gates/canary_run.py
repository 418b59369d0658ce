"""Run canaries: each once with the failure re-created, and once without."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from layline.gates.arms import one_stage
from layline.gates.breaks import Bench
from layline.gates.canaries import Canary
from layline.gates.run import Outcome, run_way
from layline.gates.scenarios import ScenarioMaker
from layline.pipeline.loops import LoopDoors


@dataclass(frozen=True)
class CanaryOutcome:
    """``broken`` and ``control`` are None for a canary that cannot exist here."""

    canary: Canary
    broken: Outcome | None = None
    control: Outcome | None = None

    @property
    def is_red(self) -> bool:
        """The failure is seen, and nothing is seen without it."""
        if self.broken is None or self.control is None:
            return False
        return not self.broken.is_green and self.control.is_green

    @property
    def verdict(self) -> str:
        """``red``, ``n/a``, or what is wrong with the gate."""
        if self.broken is None or self.control is None:
            return "n/a"
        if not self.control.is_green:
            return "red without the failure too"
        return "green" if self.broken.is_green else "red"

    @property
    def reason(self) -> str:
        """How it was seen, or why there is nothing to see."""
        if self.broken is None or self.control is None:
            return self.canary.absent or ""
        shown = self.broken if self.control.is_green else self.control
        return shown.reasons[0] if shown.reasons else ""

    def as_data(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "canary": self.canary.name,
            "class": self.canary.number,
            "what": self.canary.what,
            "verdict": self.verdict,
            "reason": self.reason,
        }


def run_canary(
    bench: Bench, canary: Canary, make: ScenarioMaker, doors: LoopDoors
) -> CanaryOutcome:
    """Both arms of a canary against one reference."""
    if canary.absent is not None:
        return CanaryOutcome(canary)
    scenario = canary.scenario(make)
    bench.model.fresh_caches(scenario.num_blocks)
    expected = one_stage(bench.model, scenario)
    way = scenario.ways[0]
    outcomes = []
    for broken in (True, False):
        changed = replace(way, doors=canary.doors) if broken else way
        options = canary.build(bench, broken)
        outcomes.append(run_way(bench.model, scenario, changed, doors, expected, options))
    return CanaryOutcome(canary, *outcomes)
