"""A small stack cut into stages: each layer mixes its cache into the residual, so order shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from layline.pipeline.device import StageDevice
from layline.pipeline.faults import Fault, Faults
from layline.pipeline.fence import Fence, even_fence, layers_of
from layline.pipeline.loops import Loops, Site
from layline.pipeline.payload import Payload, room_for
from layline.pipeline.placement import Inventory, Placement, Residency, place, resident_devices
from layline.pipeline.runtime import PipelineRuntime
from layline.pipeline.stages import stage_home
from layline.pipeline.streams import Streams
from layline.pipeline.transport import CutOptions

NUM_LAYERS, HIDDEN, SLOTS = 8, 16, 64
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class ToyStep:
    """Rows with ids and the slots of their cache."""

    ids: tuple[int, ...]
    slots: tuple[int, ...]


@dataclass
class ToyDoors:
    """Doors that a test opens and shuts."""

    streams: bool = True
    overlap: bool = False
    batch: bool = True
    verify: bool = True
    prime: bool = True
    prime_pipe: bool = True
    allow_unsplit_batch: bool = False
    force_same_device_pipelined: bool = False


class ToyStage:
    """Layers ``first`` .. ``stop - 1`` of the stack, with their cache."""

    def __init__(self, layers: range, num_layers: int) -> None:
        draw = torch.Generator().manual_seed(7)
        shape = (num_layers, HIDDEN, HIDDEN)
        weights = torch.randn(shape, generator=draw, dtype=torch.float64) / HIDDEN**0.5
        self.table = torch.randn((32, HIDDEN), generator=draw, dtype=torch.float64)
        self.weights = weights[layers.start : layers.stop]
        self.is_first, self.is_last = layers.start == 0, layers.stop == num_layers
        self.cache = torch.zeros((len(layers), SLOTS, HIDDEN), dtype=torch.float64)
        # Called before the layers run: a test makes stages meet here.
        self.at_start: Callable[[ToyStep], object] = lambda step: None

    def room(self, step: ToyStep) -> int:
        return 0 if self.is_last else room_for((len(step.ids), HIDDEN), torch.float64)

    def prepare(self, step: ToyStep) -> None:
        pass

    def run(self, step: ToyStep, entering: Payload | None) -> Payload | Tensor:
        self.at_start(step)
        if entering is None:
            hidden = residual = self.table[list(step.ids)]
        else:
            hidden, residual = entering["hidden_states"], entering["residual"]
        slots = torch.tensor(step.slots)
        for weight, cache in zip(self.weights, self.cache, strict=True):
            residual = residual + hidden
            cache[slots] = cache[slots] * 0.5 + residual
            hidden = torch.tanh((residual + cache[slots]) @ weight)
        if self.is_last:
            return residual + hidden
        return {"hidden_states": hidden, "residual": residual}


@dataclass
class ToyPipeline:
    """A runtime with its loops over streams."""

    streams: Streams
    num_stages: int
    doors: ToyDoors = field(default_factory=ToyDoors)
    devices: tuple[int, ...] | None = None
    fence: Fence | None = None
    sharded: bool = True
    options: CutOptions = field(default_factory=lambda: CutOptions(TIMEOUT_S, poison=True))

    def __post_init__(self) -> None:
        fence = self.fence or even_fence(NUM_LAYERS, self.num_stages)
        placement = place(self.num_stages, Inventory(), self.devices)
        self.warnings: list[str] = []
        self.runtime = self._runtime(fence, placement)
        layers = resident_devices(fence, placement, sharded=self.sharded)
        site = Site(placement, Residency(layers, placement.primary))
        runtime = self.runtime
        self.loops = Loops(runtime, self.doors, site, self.warnings.append, runtime.pending)

    def _runtime(self, fence: Fence, placement: Placement) -> PipelineRuntime:
        stages = []
        for index in range(self.num_stages):
            stream = self.streams.stream(f"stage {index}", placement.devices[index])
            program = ToyStage(layers_of(fence, index), NUM_LAYERS)
            on = None if self.sharded else StageDevice("cpu", placement.primary)
            stages.append(stage_home(index, stream, program, weights_on=on, weight_bytes=100))
        caller = self.streams.stream("caller", placement.primary)
        return PipelineRuntime(stages, caller, self.streams, options=self.options)


def toy_steps(seed: int, count: int, *, rows: int = 3) -> list[ToyStep]:
    """Steps of the same sequences, one after the other."""
    draw = torch.Generator().manual_seed(seed)
    slots = tuple(torch.randperm(SLOTS, generator=draw)[:rows].tolist())
    ids = torch.randint(0, 32, (count, rows), generator=draw).tolist()
    return [ToyStep(tuple(row), slots) for row in ids]


def one_stage(steps: Sequence[ToyStep]) -> list[Tensor]:
    """What one stage without streams makes of the steps."""
    stage = ToyStage(range(NUM_LAYERS), NUM_LAYERS)
    found = [stage.run(step, None) for step in steps]
    assert all(isinstance(each, Tensor) for each in found)
    return found  # type: ignore[return-value]


def with_faults(*faults: Fault) -> CutOptions:
    """Options that re-create failure classes."""
    return CutOptions(TIMEOUT_S, poison=True, faults=Faults(frozenset(faults)))


def same_bits(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> bool:
    """Whether every value is the same, NaN included nowhere."""
    pairs = zip(found, wanted, strict=True)
    return all(torch.equal(one, other) for one, other in pairs)
