"""Where everything of a pipeline is, and where it should be.

Bits do not tell: memory on another device is read just as exactly, and slowly.
"""

from __future__ import annotations

from layline.engine.pipeline_load import StagePlan
from layline.pipeline.access import Buffer
from layline.pipeline.loops import Site
from layline.pipeline.runtime import PipelineRuntime


def misplaced(plan: StagePlan, runtime: PipelineRuntime, site: Site) -> list[str]:
    """What is on another device than the stage that uses it; a line each."""
    found = []
    for stage in runtime.stages:
        for name, buffer in (("cache", stage.cache), ("scratch", stage.scratch)):
            if buffer.device != stage.device:
                found.append(_line(f"the {name}", stage.index, buffer, stage.device))
        expected = plan.weights_on(stage.index)
        if stage.weights.device != expected:
            found.append(_line("the weights", stage.index, stage.weights, expected))
    last = runtime.last
    if runtime.caller.device != last.device:
        found.append(
            f"the caller is on device {runtime.caller.device.ordinal} and the head on "
            f"{last.device.ordinal}: every step's logits would cross"
        )
    actual = {stage.weights.device.ordinal for stage in runtime.stages}
    recorded = set(site.residency.layers)
    if actual != recorded:
        found.append(
            f"layers are recorded on devices {_listed(recorded)} and are on {_listed(actual)}: "
            "refusals would look at the wrong ones"
        )
    return found


def _line(what: str, stage: int, buffer: Buffer, device: object) -> str:
    return f"{what} of stage {stage} is on {buffer.device}; expected {device}"


def _listed(devices: set[int]) -> str:
    return ", ".join(map(str, sorted(devices)))
