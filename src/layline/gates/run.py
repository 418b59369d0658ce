"""Run a gate: every scenario on one stage, and on the stages in every way that it names."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from layline.engine.pipeline_load import StagePlan
from layline.errors import LaylineError, UnsplitError
from layline.gates.arms import (
    WAIT_S,
    ArmOptions,
    FixedDoors,
    GateModel,
    one_stage,
    opened,
    staged,
)
from layline.gates.compare import Difference, first_difference
from layline.gates.meeting import meeting_stages
from layline.gates.residency import misplaced
from layline.gates.scenarios import Scenario, Way
from layline.pipeline.loops import LoopDoors
from layline.pipeline.trace import Timeline


@dataclass(frozen=True)
class Outcome:
    """What one arm did. ``problems`` are lines: an error, counters, what is on a wrong device."""

    scenario: str
    way: str
    num_steps: int
    num_values: int
    seconds: float
    difference: Difference | None = None
    problems: tuple[str, ...] = ()
    counters: Mapping[str, int] = field(default_factory=dict)
    refusal: str | None = None

    @property
    def verdict(self) -> str:
        """``green``, ``RED``, or ``refused`` where that is what must happen."""
        if not self.is_green:
            return "RED"
        return "green" if self.refusal is None else "refused"

    @property
    def is_green(self) -> bool:
        """Every bit is equal, and everything happened that must."""
        return self.difference is None and not self.problems

    @property
    def reasons(self) -> list[str]:
        """Why it is red."""
        return [*([] if self.difference is None else [str(self.difference)]), *self.problems]

    def as_data(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "scenario": self.scenario,
            "way": self.way,
            "verdict": self.verdict.lower(),
            "steps": self.num_steps,
            "values": self.num_values,
            "reasons": self.reasons,
            "refusal": self.refusal,
            "counters": {name: count for name, count in self.counters.items() if count},
            "seconds": round(self.seconds, 3),
        }


def run_scenario(
    model: GateModel,
    scenario: Scenario,
    doors: LoopDoors,
    report: Callable[[Outcome], None],
    timeline: Timeline | None = None,
) -> list[Outcome]:
    """All ways of a scenario against one reference; ``report`` gets each outcome as it comes.

    A split that differs is followed by the unsplit walk over the same caches, which tells the walk
    from the caches.
    """
    model.fresh_caches(scenario.num_blocks)
    expected = one_stage(model, scenario)
    found = []
    for way in scenario.ways:
        recorder = None if timeline is None else timeline.run(f"{scenario.name}, {way.name}")
        options = ArmOptions(recorder=recorder)
        outcome = run_way(model, scenario, way, doors, expected, options)
        if outcome.difference is not None and way is scenario.ways[0]:
            outcome = replace(outcome, problems=(*outcome.problems, _located(model, scenario)))
        report(outcome)
        found.append(outcome)
    return found


def run_way(
    model: GateModel,
    scenario: Scenario,
    way: Way,
    doors: LoopDoors,
    expected: Sequence[torch.Tensor],
    options: ArmOptions,
) -> Outcome:
    """One arm over fresh caches. Raises nothing that a stage raised: that is an outcome.

    Short steps may miss each other: where nothing else is wrong, an overlap that was not seen is
    looked for once more with stages that wait for each other.
    """
    outcome = run_once(model, scenario, way, doors, expected, options)
    missed = {unmoved(name) for name in way.expected.overlaps}
    if outcome.difference is None and outcome.problems and missed.issuperset(outcome.problems):
        before = options.homes
        meets = replace(options, homes=lambda homes: meeting_stages(before(homes)))
        return run_once(model, scenario, way, doors, expected, meets)
    return outcome


def run_once(
    model: GateModel,
    scenario: Scenario,
    way: Way,
    doors: LoopDoors,
    expected: Sequence[torch.Tensor],
    options: ArmOptions,
) -> Outcome:
    """One run of an arm."""
    model.fresh_caches(scenario.num_blocks)
    begin = time.perf_counter()
    problems: list[str] = []
    difference, counters, refusal = None, dict[str, int](), None
    fixed = FixedDoors.of(doors, **way.doors)
    must_refuse = refuses(scenario, fixed, model.plan)
    try:
        with opened(model, fixed, options) as arm:
            before = arm.runtime.counters.snapshot()
            found = arm.run(scenario)
            counters = arm.runtime.counters.since(before)
            problems += misplaced(model.plan, arm.runtime, arm.site)
        difference = first_difference(found, expected)
        free = options.controller is None and model.plan.engine.device == "cpu"
        problems += counter_problems(way, counters, free=free, remote=model.plan.reads_remotely)
        if must_refuse:
            problems.append("what must be refused here was not refused")
    except UnsplitError as error:
        refusal = str(error)
        if not must_refuse:
            problems.append(f"refused: {refusal}")
    except (LaylineError, ArithmeticError, LookupError, RuntimeError, ValueError) as error:
        problems.append(f"{type(error).__name__}: {' '.join(str(error).split())}")
    return Outcome(
        scenario.name,
        way.name,
        len(expected),
        sum(each.numel() for each in expected),
        time.perf_counter() - begin,
        difference,
        tuple(problems),
        counters,
        refusal,
    )


def refuses(scenario: Scenario, doors: FixedDoors, plan: StagePlan) -> bool:
    """Whether loops must refuse the scenario.

    Steps would overlap on one device, or all layers be walked over weights of several CUDA devices.
    """
    loops, placement = {call.loop for call in scenario.calls}, plan.placement
    if not placement.multi_stream_same_device:
        unsplit = not doors.streams or ("prime" in loops and not doors.prime)
        return unsplit and plan.engine.device != "cpu"
    defers = "deferred" in loops and not doors.force_same_device_pipelined
    return defers or ("prime" in loops and doors.prime and doors.prime_pipe)


def counter_problems(
    way: Way, counters: Mapping[str, int], *, free: bool, remote: bool
) -> Iterable[str]:
    """A line for each counter that did not do what it must.

    Where weights are ``remote`` on purpose, reading them must be counted.
    """
    wanted = way.expected
    moving = (*wanted.moving, *(wanted.overlaps if free else ()))
    for name in moving:
        if not counters.get(name, 0):
            yield unmoved(name)
    for name in wanted.still:
        if name == "remote_reads" and remote:
            if not counters.get(name, 0):
                yield unmoved(name)
        elif counters.get(name, 0):
            yield f"counter {name} moved by {counters[name]} and must stay"


def unmoved(name: str) -> str:
    """What is said of a counter that should have moved."""
    return f"counter {name} has not moved"


def _located(model: GateModel, scenario: Scenario) -> str:
    """Where the fault of a split is: in the walk, or in what the stages hold."""
    model.fresh_caches(scenario.num_blocks)
    expected = one_stage(model, scenario)
    doors = FixedDoors(
        streams=False,
        overlap=False,
        batch=False,
        verify=False,
        prime=False,
        prime_pipe=False,
        allow_unsplit_batch=True,
        force_same_device_pipelined=True,
    )
    model.fresh_caches(scenario.num_blocks)
    with opened(model, doors, ArmOptions()) as arm:
        steps = [staged(step, whole=call.whole) for call, step in scenario.steps]
        found = [arm.loops.eager(step).wait(WAIT_S) for step in steps]
    if first_difference(found, expected) is None:
        return "the unsplit walk over the same caches is equal: the walk over the stages differs"
    return "the unsplit walk over the same caches differs too: so do the stages' weights or caches"
