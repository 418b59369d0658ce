"""Run canaries: each once with the failure re-created, and once without."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from layline.gates.arms import FixedDoors, one_stage
from layline.gates.canaries import Canary
from layline.gates.mutations import Bench
from layline.gates.run import Outcome, refuses, run_way
from layline.gates.scenarios import Scenario, ScenarioMaker
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


def why_absent(bench: Bench, canary: Canary, scenario: Scenario, doors: FixedDoors) -> str | None:
    """Why a canary cannot exist here, or None."""
    plan = bench.model.plan
    if canary.absent is not None:
        return canary.absent
    if refuses(scenario, doors, plan):
        return "stages share a device, where what would overlap is refused"
    if canary.needs_devices and len(set(plan.placement.devices)) == 1:
        return "all stages are on one device"
    if plan.engine.device == "cpu":
        return None
    return canary.cpu_only


def run_canary(
    bench: Bench, canary: Canary, make: ScenarioMaker, doors: LoopDoors
) -> CanaryOutcome:
    """Both arms of a canary against one reference."""
    scenario = canary.scenario(make)
    absent = why_absent(bench, canary, scenario, FixedDoors.of(doors))
    if absent is not None:
        return CanaryOutcome(canary, absent=absent)
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
