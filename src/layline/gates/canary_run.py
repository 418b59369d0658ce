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
    """``broken`` and ``control`` are None for a canary that cannot exist here, for a reason."""

    canary: Canary
    broken: Outcome | None = None
    control: Outcome | None = None
    absent: str | None = None

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
            return self.absent or ""
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


def why_absent(bench: Bench, canary: Canary) -> str | None:
    """Why a canary cannot exist here, or None."""
    if canary.absent is not None or bench.model.plan.engine.device == "cpu":
        return canary.absent
    if canary.kills_device:
        return "the device would assert, and no other canary could run after it"
    if canary.build(bench, False).controller is not None:
        return "needs streams that advance in a chosen order, which are the CPU's"
    return None


def run_canary(
    bench: Bench, canary: Canary, make: ScenarioMaker, doors: LoopDoors
) -> CanaryOutcome:
    """Both arms of a canary against one reference."""
    absent = why_absent(bench, canary)
    if absent is not None:
        return CanaryOutcome(canary, absent=absent)
    scenario = canary.scenario(make)
    bench.model.fresh_caches(scenario.num_blocks)
    expected = one_stage(bench.model, scenario)
    way = scenario.ways[0]
    outcomes = []
    for breaks in (True, False):
        changed = replace(way, doors=canary.doors) if breaks else way
        options = canary.build(bench, breaks)
        outcomes.append(run_way(bench.model, scenario, changed, doors, expected, options))
    broken, control = outcomes
    return CanaryOutcome(canary, broken, control)
