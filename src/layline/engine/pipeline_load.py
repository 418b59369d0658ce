"""Load a model as pipeline stages into this process, each with its stream, weights and cache."""

from __future__ import annotations

from collections import defaultdict
from contextlib import ExitStack

import torch

from layline.boundary.mesh import Mesh
from layline.config import EngineConfig, default_threads
from layline.engine import kv
from layline.engine.facts import ModelFacts
from layline.engine.model import LoadedModel, load_part
from layline.engine.pass_clock import PassClock
from layline.engine.pipelined import PipelinedExecutor
from layline.engine.stage_program import ModelStage
from layline.engine.step_times import StepTimes
from layline.models.stack import LayerRange
from layline.pipeline.doors import Doors
from layline.pipeline.fence import Fence, layers_of
from layline.pipeline.loops import Loops, Site
from layline.pipeline.placement import Inventory, Residency, resident_devices
from layline.pipeline.runtime import PipelineRuntime
from layline.pipeline.stages import stage_home
from layline.pipeline.streams import Stream, Streams, make_streams, thread_share
from layline.pipeline.transport import CutOptions
from layline.weights.checkpoint import Checkpoint


class StageLoader:
    """Makes the stages of one run: where they are, and what is on them."""

    def __init__(
        self, engine: EngineConfig, facts: ModelFacts, fence: Fence, doors: Doors, streams: Streams
    ) -> None:
        self.fence = fence
        self._engine = engine
        self._facts = facts
        self._doors = doors
        self._streams = streams
        self.num_stages = len(fence) - 1
        self.placement = doors.placement(self.num_stages, inventory(engine.device))
        doors.freeze(self.placement)

    def load(self, checkpoint: Checkpoint) -> list[LoadedModel]:
        """Every stage's weights, from the tensors of its own layers, and its cache."""
        total = self._facts.config.num_layers
        mesh = Mesh(self._facts.spec)
        stages = []
        for index in range(self.num_stages):
            layers = layers_of(self.fence, index)
            part = LayerRange(layers.start, layers.stop, total)
            device = self._device(index)
            stage = load_part(self._facts, checkpoint, mesh, device, part)
            stage.runner.clock = PassClock(device, index)
            stages.append(stage)
        num_blocks = self._fitting_blocks(stages)
        for stage in stages:
            stage.bind_cache(num_blocks)
        return stages

    def runtime(self, stages: list[LoadedModel], options: CutOptions) -> PipelineRuntime:
        """The stages on streams of their own, and the caller's stream on the primary device."""
        threads = thread_share(self._engine.threads or default_threads(), self.num_stages)

        def stream(name: str, ordinal: int) -> Stream:
            return self._streams.stream(name, ordinal, num_threads=threads)

        homes = [
            stage_home(
                index,
                stream(f"stage {index}", self.placement.devices[index]),
                ModelStage(index, stage.runner),
                weight_bytes=stage.weight_bytes,
            )
            for index, stage in enumerate(stages)
        ]
        caller = stream("caller", self.placement.primary)
        return PipelineRuntime(homes, caller, self._streams, options=options)

    def site(self) -> Site:
        """Where stages and weights are, for the loops' refusals."""
        layers = resident_devices(self.fence, self.placement, sharded=True)
        return Site(self.placement, Residency(layers, self.placement.primary))

    def _device(self, index: int) -> torch.device:
        if self._engine.device == "cpu":
            return torch.device("cpu")
        return torch.device(self._engine.device, self.placement.devices[index])

    def _fitting_blocks(self, stages: list[LoadedModel]) -> int:
        """Blocks that every stage can have: on each device its stages' caches share the room."""
        by_device: dict[torch.device, int] = defaultdict(int)
        for stage in stages:
            by_device[stage.device] += stage.slot_bytes
        if self._engine.kv_memory is not None:
            by_device = defaultdict(int, {stages[0].device: sum(by_device.values())})
        length = self._facts.max_model_len
        return min(
            kv.num_blocks(self._engine, kv.Room(slot, length, device))
            for device, slot in by_device.items()
        )


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
    with ExitStack() as stack:
        streams = make_streams(engine.device)
        stack.callback(streams.close)
        loader = StageLoader(engine, facts, fence, doors, streams)
        stages = loader.load(checkpoint)
        runtime = loader.runtime(stages, CutOptions())
        runtime.load_barrier()
        loops = Loops(runtime, doors, loader.site(), doors.warn, runtime.outcome)
        stack.pop_all()
    return PipelinedExecutor(stages, loops, streams, times)
