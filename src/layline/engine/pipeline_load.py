"""Load a model as pipeline stages into this process, each with its stream, weights and cache."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from layline.boundary.mesh import Mesh
from layline.config import EngineConfig, default_threads
from layline.engine import kv
from layline.engine.facts import ModelFacts
from layline.engine.model import LoadedModel, load_part
from layline.engine.pipelined import PipelinedExecutor
from layline.engine.stage_program import ModelStage
from layline.engine.step_times import StepTimes
from layline.errors import UsageError
from layline.models.stack import LayerRange
from layline.pipeline.device import StageDevice
from layline.pipeline.doors import SHARD, Doors
from layline.pipeline.fence import Fence, layers_of
from layline.pipeline.loops import Loops, Site
from layline.pipeline.placement import Inventory, Placement, Residency, resident_devices
from layline.pipeline.runtime import PipelineRuntime
from layline.pipeline.stages import StageHome, stage_home
from layline.pipeline.streams import Streams, make_streams, thread_share
from layline.weights.checkpoint import Checkpoint


@dataclass(frozen=True)
class StagePlan:
    """Which layers each stage of a run has, where it is, and which of them this process has.

    ``num_threads`` are the process's, None for all of the run; ``local_ranks`` processes share the
    machine. Not ``sharded``, all weights are on the primary device.
    """

    engine: EngineConfig
    facts: ModelFacts
    fence: Fence
    placement: Placement
    process: int = 0
    num_threads: int | None = None
    local_ranks: int = 1
    sharded: bool = True

    @property
    def num_stages(self) -> int:
        """Pipeline stages."""
        return len(self.fence) - 1

    @property
    def stages(self) -> range:
        """The stages of this process."""
        processes = self.placement.processes
        first = processes.index(self.process)
        return range(first, first + processes.count(self.process))

    @property
    def most_stages(self) -> int:
        """Most stages that a process has."""
        return max(map(self.placement.processes.count, self.placement.processes))

    @property
    def threads(self) -> int:
        """Of torch, for each stage."""
        whole = self.num_threads or self.engine.threads or default_threads()
        return thread_share(whole, len(self.stages))

    def part(self, index: int) -> LayerRange:
        """The layers of one stage."""
        layers = layers_of(self.fence, index)
        return LayerRange(layers.start, layers.stop, self.facts.config.num_layers)

    def device(self, index: int) -> torch.device:
        """Where a stage's tensors are."""
        if self.engine.device == "cpu":
            return torch.device("cpu")
        return torch.device(self.engine.device, self.placement.devices[index])

    def weights_on(self, index: int) -> StageDevice:
        """Where a stage's weights are."""
        ordinal = self.placement.devices[index] if self.sharded else self.placement.primary
        return StageDevice(self.engine.device, ordinal)

    @property
    def reads_remotely(self) -> bool:
        """True when a stage reads its weights from another device."""
        return any(self.weights_on(stage).ordinal != device for stage, device in self._homes())

    def _homes(self) -> Iterator[tuple[int, int]]:
        return ((stage, self.placement.devices[stage]) for stage in self.stages)

    def site(self) -> Site:
        """Where stages and weights are, for the loops' refusals."""
        layers = resident_devices(self.fence, self.placement, sharded=self.sharded)
        return Site(self.placement, Residency(layers, self.placement.primary))


def load_stages(
    plan: StagePlan, checkpoint: Checkpoint, meshes: Sequence[Mesh] | None = None
) -> list[LoadedModel]:
    """The weights of this process's stages, from the tensors of their own layers.

    Caches are bound later. ``meshes`` has each stage's, where a stage is on several ranks.
    """
    meshes = meshes or [Mesh(plan.facts.spec)] * len(plan.stages)
    return [
        load_part(plan.facts, checkpoint, mesh, plan.device(index), plan.part(index))
        for index, mesh in zip(plan.stages, meshes, strict=True)
    ]


def fitting_blocks(plan: StagePlan, stages: Sequence[LoadedModel]) -> int:
    """Blocks that every stage can have: on each device its stages' caches share the room.

    Raises UsageError when that is too few.
    """
    by_device: dict[torch.device, int] = defaultdict(int)
    for stage in stages:
        by_device[stage.device] += stage.slot_bytes
    if plan.engine.kv_memory is not None:
        # What was given is for the whole rank.
        by_device = defaultdict(int, {stages[0].device: sum(by_device.values())})
    length = plan.facts.max_model_len
    return min(
        kv.num_blocks(plan.engine, kv.Room(slot, length, device, plan.local_ranks))
        for device, slot in by_device.items()
    )


def stage_homes(
    plan: StagePlan, stages: Sequence[LoadedModel], streams: Streams
) -> list[StageHome]:
    """Each stage on a stream of its own."""
    return [
        stage_home(
            index,
            streams.stream(
                f"stage {index}",
                plan.placement.devices[index],
                num_threads=plan.threads,
            ),
            ModelStage(index, stage.runner),
            weights_on=plan.weights_on(index),
            weight_bytes=stage.weight_bytes,
        )
        for index, stage in zip(plan.stages, stages, strict=True)
    ]


def inventory(device: str) -> Inventory:
    """This machine's devices as the pipeline counts them."""
    if device == "cpu":
        return Inventory()
    count = torch.cuda.device_count()
    blocked = frozenset(
        (a, b)
        for a in range(count)
        for b in range(count)
        if a != b and not torch.cuda.can_device_access_peer(a, b)
    )
    return Inventory("cuda", count, blocked)


def check_sharding(engine: EngineConfig, doors: Doors) -> None:
    """Raise UsageError where all weights on one device could not be computed with."""
    if engine.device != "cpu" and doors.streams and not doors.shard:
        raise UsageError(
            f"{SHARD}=0 keeps all weights on one device, and torch computes with those of a "
            f"stage's own on {engine.device}; expected {SHARD} unset, or device cpu"
        )


def load_pipeline(
    engine: EngineConfig,
    facts: ModelFacts,
    checkpoint: Checkpoint,
    fence: Fence,
    doors: Doors,
    times: StepTimes | None = None,
) -> PipelinedExecutor:
    """Load the stages that ``fence`` cuts, and start their streams.

    Raises PlacementError for devices that cannot be used, CheckpointError for a bad file.
    """
    placement = doors.placement(len(fence) - 1, inventory(engine.device))
    doors.freeze(placement)
    check_sharding(engine, doors)
    plan = StagePlan(engine, facts, fence, placement, sharded=doors.shard)
    stages = load_stages(plan, checkpoint)
    num_blocks = fitting_blocks(plan, stages)
    for stage in stages:
        stage.bind_cache(num_blocks)
    with ExitStack() as stack:
        streams = make_streams(engine.device)
        stack.callback(streams.close)
        caller = streams.stream("caller", placement.primary, num_threads=plan.threads)
        runtime = PipelineRuntime(stage_homes(plan, stages, streams), caller, streams)
        runtime.load_barrier()
        loops = Loops(runtime, doors, plan.site(), doors.warn, runtime.outcome)
        stack.pop_all()
    return PipelinedExecutor(stages, loops, streams, times)
