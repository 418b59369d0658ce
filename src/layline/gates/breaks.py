"""Arms with one thing undone, for canaries: a builder gives one broken, or as it should be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from layline.engine.model import LoadedModel
from layline.engine.step import RankStep
from layline.gates.arms import Arm, ArmOptions, GateModel, Hooks
from layline.gates.mutations import (
    Arena,
    ByRowCount,
    FromTheCaller,
    InArena,
    Latest,
    OfTheLatest,
    Sentinel,
    StuckCounters,
    caches_with_the_first,
    of_programs,
    other_part,
    scripted,
    with_fault,
)
from layline.gates.scenarios import Call
from layline.pipeline.faults import Fault
from layline.pipeline.loops import Site
from layline.pipeline.placement import Residency
from layline.pipeline.readback import PendingLogits
from layline.pipeline.stages import StageHome


@dataclass(frozen=True)
class Bench:
    """What canaries are built on. ``flipped`` loads the last stage with the other exactness."""

    model: GateModel
    flipped: Callable[[], LoadedModel]


Build = Callable[[Bench, bool], ArmOptions]
"""An arm, broken or not."""


def with_script(fault: Fault, *first: str, stalled: str | None = None) -> Build:
    """A fault in a cut, with streams that advance in a chosen order."""

    def build(_: Bench, broken: bool) -> ArmOptions:
        options = scripted(*first, stalled=stalled)
        return with_fault(options, fault) if broken else options

    return build


def freely(fault: Fault) -> Build:
    """A fault, with streams that run freely."""
    return lambda _, broken: with_fault(ArmOptions(), fault) if broken else ArmOptions()


def from_the_latest(mixed: Callable[[RankStep, RankStep], RankStep]) -> Build:
    """Later stages look at what the host says last, instead of at their own step."""

    def build(_: Bench, broken: bool) -> ArmOptions:
        latest = Latest()
        hooks = Hooks(before_step=latest.note)

        def program(home: StageHome) -> OfTheLatest:
            return OfTheLatest(home.program, latest, mixed)

        if not broken:
            return scripted("stage 0", hooks=hooks)
        return scripted("stage 0", hooks=hooks, homes=of_programs(program))

    return build


def shared_scratch(_: Bench, broken: bool) -> ArmOptions:
    """Each stage has memory for what enters and leaves it, or all have the same."""
    shared = Arena()

    def program(home: StageHome) -> InArena:
        return InArena(home.program, shared if broken else Arena())

    return scripted(turns=True, homes=of_programs(program))


def slow_load(bench: Bench, broken: bool) -> ArmOptions:
    """The first stage's norm is uploaded by another stream, which is slow."""
    weight, _ = bench.model.stages[0].runner.model.layers[0].input_layernorm.constants
    kept = weight.clone()

    @torch.inference_mode()
    def upload() -> None:
        weight.copy_(kept)

    @torch.inference_mode()
    def start(arm: Arm) -> None:
        weight.fill_(torch.nan)
        buffers = (arm.runtime.stages[0].weights,)
        arm.runtime.last.stream.run(upload, writes=buffers, label="load")
        arm.runtime.load_barrier()

    hooks = Hooks(start=start, end=upload)
    options = scripted("stage 0", stalled=_last(bench), hooks=hooks)
    return with_fault(options, Fault.DROP_LOAD_BARRIER) if broken else options


def admission(_: Bench, broken: bool) -> ArmOptions:
    """Blocks are cleared for another request while a step still reads them."""

    def after_call(arm: Arm, call: Call) -> None:
        if call.loop == "deferred":
            arm.runtime.admit(lambda: _clear(arm.model))

    options = scripted("caller", hooks=Hooks(after_call=after_call))
    return with_fault(options, Fault.DROP_BIRTH_BARRIER) if broken else options


def _clear(model: GateModel) -> None:
    for stage in model.stages:
        for layer in stage.runner.model.layers:
            cache = layer.self_attn.cache
            assert cache is not None
            for tensor in cache.tensors:
                tensor.zero_()


def unpublished(_: Bench, broken: bool) -> ArmOptions:
    """The caller's stream uses each step's logits."""

    def after_step(arm: Arm, pending: PendingLogits) -> None:
        cell = pending.value
        arm.runtime.caller.run(cell.get, reads=cell.buffers, label="use the logits")

    options = scripted("caller", hooks=Hooks(after_step=after_step))
    return with_fault(options, Fault.DROP_PUBLISH) if broken else options


def entry(_: Bench, broken: bool) -> ArmOptions:
    """The first stage runs what a task of the caller leaves for it."""
    box = Latest()
    programs = of_programs(lambda home: FromTheCaller(home.program, box))
    hooks = Hooks(before_step=box.leave)
    options = scripted("stage 0", stalled="caller", hooks=hooks, homes=programs)
    return with_fault(options, Fault.DROP_ENTRY_FENCE) if broken else options


def sentinel(bench: Bench, broken: bool) -> ArmOptions:
    """The first stage is fed the id of a row that is all NaN."""
    first = bench.model.stages[0]
    return ArmOptions(homes=of_programs(lambda home: Sentinel(home.program, first, not broken)))


def exactness(bench: Bench, broken: bool) -> ArmOptions:
    """The last stage is as exact as the others, or not."""
    if not broken:
        return ArmOptions()
    index = bench.model.plan.num_stages - 1
    flipped = bench.flipped()
    flipped.bind_cache(bench.model.stages[index].num_blocks)
    return ArmOptions(homes=other_part(index, flipped))


def by_row_count(_: Bench, broken: bool) -> ArmOptions:
    """Each stage takes the kernel of a step's phase, or of its row count."""
    if not broken:
        return ArmOptions()
    return ArmOptions(homes=of_programs(lambda home: ByRowCount(home.program)))


def first_serves(_: Bench, broken: bool) -> ArmOptions:
    """The caller is on the last stage's device, or on the first's."""
    return ArmOptions(caller_on=0) if broken else ArmOptions()


def wrong_card(_: Bench, broken: bool) -> ArmOptions:
    """Caches are with their stages, or with the first."""
    return ArmOptions(homes=caches_with_the_first) if broken else ArmOptions()


def stuck_counters(_: Bench, broken: bool) -> ArmOptions:
    """Counters move, or do not."""
    return ArmOptions(counters=StuckCounters) if broken else ArmOptions()


def stale_residency(_: Bench, broken: bool) -> ArmOptions:
    """Where weights are is recorded by layer, or once."""

    def site(before: Site) -> Site:
        layers = before.residency.layers
        return replace(before, residency=Residency(layers[:1] * len(layers), layers[0]))

    return ArmOptions(site=site) if broken else ArmOptions()


def empty_burst(_: Bench, broken: bool) -> ArmOptions:
    """A prefill without chunks comes first."""

    def start(arm: Arm) -> None:
        arm.loops.prime([])

    options = ArmOptions(hooks=Hooks(start=start))
    return with_fault(options, Fault.EMPTY_UNDERFLOW) if broken else options


def _last(bench: Bench) -> str:
    return f"stage {bench.model.plan.num_stages - 1}"
