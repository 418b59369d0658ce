"""A model's plan over pipeline stages: cuts, memory, what crosses, the schedule. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate

from layline.boundary.planning.cost import Element
from layline.boundary.planning.cut import CutPlan, CutTensor, plan_cuts
from layline.config import EngineConfig
from layline.engine.pipeline_costs import (
    SHOWN_PROMPT,
    Schedule,
    decode_load,
    decode_schedule,
    prime_schedule,
    stack_shape,
)
from layline.engine.pipeline_memory import (
    Home,
    PipelineMemory,
    device_bytes,
    least_cache,
    stage_memory,
)
from layline.engine.planned import ITEMSIZES, ModelPlan
from layline.pipeline.cuts import StackCost, StageDevice, StageShare, balanced_fence, shares_of
from layline.pipeline.doors import Doors, PipelineFlags
from layline.pipeline.estimate import stack_cost
from layline.pipeline.fence import Fence, boundaries, even_fence
from layline.pipeline.placement import Inventory, Placement
from layline.pipeline.schedule import NUM_SLOTS, prime_chunks


@dataclass(frozen=True)
class PipelinePlan:
    """One model over pipeline stages.

    ``origin`` says who chose the cuts: ``auto``, ``even`` or ``given``. ``cost`` is that of each
    part, ``shares`` of each stage, ``even`` of each stage of even cuts. ``slot_tokens`` is the
    largest step that a slot is made for; ``slots`` are the bytes that each stage receives through.
    """

    model: ModelPlan
    fence: Fence
    placement: Placement
    origin: str
    cost: StackCost
    shares: tuple[StageShare, ...]
    even: tuple[StageShare, ...]
    memory: PipelineMemory
    cuts: tuple[CutPlan, ...]
    slot_tokens: int
    schedules: tuple[Schedule, ...]

    @property
    def assumes_outputs(self) -> bool:
        """True when this machine's kernels and the phase decide an output's dtype."""
        return self.model.spec.topology.tp == 1 and widens_outputs(self.model)

    def tensor_dtype(self, tensor: CutTensor) -> str:
        """The dtype of what crosses, the widest where kernels decide."""
        run = self.model.facts.dtype
        return run if crossing_size(self.model, tensor) == ITEMSIZES[run] else "float32"

    def bytes_per_token(self, tensor: CutTensor) -> float:
        """Bytes of a rank for each token of the step."""
        return crossing_bytes(self.model, tensor)


def widens_outputs(model: ModelPlan) -> bool:
    """True where a linear layer may return what it accumulated in; see layers.linear."""
    return model.room.device == "cpu" and model.facts.dtype == "bfloat16"


def crossing_size(model: ModelPlan, tensor: CutTensor) -> int:
    """Bytes of one value that crosses, the most where kernels decide."""
    if tensor.element is Element.RUN and widens_outputs(model):
        return 4
    return model.sizes.of(tensor.element)


def crossing_bytes(model: ModelPlan, tensor: CutTensor) -> float:
    """Bytes of a rank that cross as ``tensor`` for each token of a step."""
    hidden = model.facts.config.hidden_size
    return tensor.per_token(model.ground, hidden, crossing_size(model, tensor))


def plan_pipeline(
    model: ModelPlan,
    engine: EngineConfig,
    environ: Mapping[str, str],
    report: Callable[[str], None],
    measured: StackCost | None = None,
) -> PipelinePlan | None:
    """The pipeline that flags and doors ask for, None for one stage.

    ``report`` gets warnings about doors. ``measured`` takes the place of the estimated costs.
    Raises UsageError for flags that do not fit, PlacementError for devices that cannot be.
    """
    return _Planner(model, engine, environ, report, measured).plan()


class _Planner:
    """Collects what a pipeline's plan is made of."""

    def __init__(
        self,
        model: ModelPlan,
        engine: EngineConfig,
        environ: Mapping[str, str],
        report: Callable[[str], None],
        measured: StackCost | None,
    ) -> None:
        self._model = model
        self._engine = engine
        self._measured = measured
        self._flags = PipelineFlags.of(engine)
        self._doors = Doors(environ, self._flags, report, self._balanced)
        self._shape = stack_shape(model, engine.device)
        self._balances = False
        self._known: dict[Home, int | None] = {}

    def plan(self) -> PipelinePlan | None:
        num_layers = self._model.facts.config.num_layers
        fence = self._doors.fence(num_layers)
        if fence is None:
            return None
        num_stages = len(fence) - 1
        placement = self._placement(num_stages)
        cost = self._cost(num_stages)
        devices = self._devices(placement)
        even = even_fence(num_layers, num_stages)
        shares = shares_of(fence, cost, devices)
        slots = self._slots(num_stages)
        origin = "even" if fence == even else "given"
        return PipelinePlan(
            model=self._model,
            fence=fence,
            placement=placement,
            origin="auto" if self._balances else origin,
            cost=cost,
            shares=shares,
            even=shares_of(even, cost, devices),
            memory=stage_memory(self._model, fence, placement, slots, self._memory(placement)),
            cuts=self._cuts(fence),
            slot_tokens=self._slot_tokens(),
            schedules=self._schedules(fence, shares, devices),
        )

    def _placement(self, num_stages: int) -> Placement:
        # A plan may be for another machine, so its devices need not be here.
        inventory = Inventory(self._engine.device)
        return self._doors.placement(num_stages, inventory, self._flags.processes)

    def _balanced(self, num_stages: int) -> Fence:
        self._balances = True
        devices = self._devices(self._placement(num_stages))
        return balanced_fence(self._cost(num_stages), devices)

    def _cost(self, num_stages: int) -> StackCost:
        if self._measured is not None:
            return self._measured
        load = decode_load(self._model, self._engine, num_stages)
        return stack_cost(self._shape, load, least_cache(self._model.facts.max_model_len))

    def _devices(self, placement: Placement) -> list[StageDevice]:
        """The stages' devices with what is left of their memory beside slots."""
        left = dict(self._memory(placement))
        slots = self._slots(placement.num_stages)
        for home, needed in zip(placement.homes(), slots, strict=True):
            before = left[home]
            left[home] = None if before is None else max(0, before - needed)
        return [StageDevice(name=home, memory=left[home]) for home in placement.homes()]

    def _memory(self, placement: Placement) -> dict[Home, int | None]:
        if not self._known:
            # On CUDA this asks the driver, which takes a while.
            self._known = device_bytes(self._model, placement)
        return self._known

    def _cuts(self, fence: Fence) -> tuple[CutPlan, ...]:
        counts = [len(layer) for layer in self._model.layers]
        starts = [0, *accumulate(counts)]
        indices = [starts[cut] for cut in boundaries(fence)]
        return tuple(plan_cuts(self._model.stages, self._model.ground, indices))

    def _slot_tokens(self) -> int:
        per_rank = max(self._engine.prefill_tokens, self._engine.max_running)
        return per_rank * self._engine.attn_dp

    def _slots(self, num_stages: int) -> list[int]:
        """Bytes of the slots through which each stage receives; the sender only writes to them."""
        # Layers are alike, so every cut carries the same.
        (cut,) = self._cuts((0, 1, len(self._model.layers)))
        bytes_per_token = sum(crossing_bytes(self._model, tensor) for tensor in cut.tensors)
        needed = round(NUM_SLOTS * bytes_per_token * self._slot_tokens())
        return [0] + [needed] * (num_stages - 1)

    def _schedules(
        self, fence: Fence, shares: tuple[StageShare, ...], devices: list[StageDevice]
    ) -> tuple[Schedule, ...]:
        num_stages = len(shares)
        prompt = min(SHOWN_PROMPT, self._model.facts.max_model_len)
        chunks = prime_chunks(prompt, num_stages, self._doors.prime_chunks)
        # On a shared device the chunk pipeline is refused.
        shared = len({device.name for device in devices}) < num_stages
        pipelined = self._doors.prime_pipe and not shared
        return (
            decode_schedule(shares, devices, num_stages if self._doors.batch else 1),
            prime_schedule(self._shape, fence, devices, chunks, pipelined=pipelined),
        )
