"""What each pipeline stage holds, and what its device has for it. No torch here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from layline.engine.planned import ITEMSIZES, ModelPlan
from layline.engine.room import cuda_sizes
from layline.engine.scheduler import BLOCK_SIZE
from layline.layers.kv_types import head_bytes
from layline.models.footprint import part_values
from layline.pipeline.fence import Fence, layers_of
from layline.pipeline.placement import Placement

Home = tuple[int, int]
"""(process, device)"""


@dataclass(frozen=True)
class StageMemory:
    """Bytes of one stage on one rank.

    ``device_bytes`` is what its device has, None if unknown; ``on_device`` is what all stages on
    that device hold together.
    """

    weights: int
    kv: int
    slots: int
    device_bytes: int | None
    on_device: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.kv + self.slots

    @property
    def fits(self) -> bool | None:
        """Whether the device has room for its stages, None where its memory is unknown."""
        return None if self.device_bytes is None else self.on_device <= self.device_bytes


@dataclass(frozen=True)
class PipelineMemory:
    """Memory of every stage. ``cached_tokens`` is the cache's size, the same on each stage;
    ``holds_longest`` whether a sequence of the longest length fits, None where unknown.
    """

    stages: tuple[StageMemory, ...]
    cached_tokens: int
    holds_longest: bool | None

    @property
    def weights(self) -> int:
        """Bytes of weights on all stages."""
        return sum(stage.weights for stage in self.stages)

    @property
    def kv(self) -> int:
        """Bytes of keys and values on all stages."""
        return sum(stage.kv for stage in self.stages)

    @property
    def slots(self) -> int:
        """Bytes of the slots between them."""
        return sum(stage.slots for stage in self.stages)

    @property
    def fits(self) -> bool | None:
        """Whether everything fits, None where a device's memory is unknown."""
        verdicts = [stage.fits for stage in self.stages]
        if False in verdicts or self.holds_longest is False:
            return False
        return None if None in verdicts else True


def least_cache(max_model_len: int) -> int:
    """Tokens of the smallest cache that a run starts with: one longest sequence."""
    return (-(-max_model_len // BLOCK_SIZE) + 1) * BLOCK_SIZE


def device_bytes(model: ModelPlan, placement: Placement) -> dict[Home, int | None]:
    """The memory of each device in use.

    Virtual devices of a process share its part of the machine evenly.
    """
    homes = dict.fromkeys(placement.homes())
    if model.room.device == "cpu":
        share = model.room.device_bytes
        counts = {process: 0 for process, _ in homes}
        for process, _ in homes:
            counts[process] += 1
        return {home: None if share is None else share // counts[home[0]] for home in homes}
    sizes = dict(enumerate(cuda_sizes()))
    return {home: sizes.get(home[1]) for home in homes}


def stage_memory(
    model: ModelPlan,
    fence: Fence,
    placement: Placement,
    slots: Sequence[int],
    known: Mapping[Home, int | None],
) -> PipelineMemory:
    """What every stage holds with the largest cache that all stages have room for.

    ``slots`` are the bytes of the slots that each stage receives through, ``known`` is what
    :func:`device_bytes` says.
    """
    itemsize = ITEMSIZES[model.facts.dtype]
    cached = head_bytes(model.facts.kv_dtype, model.facts.config.head_dim)
    parts = part_values(model.facts.config, model.spec.topology)
    homes = placement.homes()
    last = placement.num_stages - 1
    weights, per_token = [], []
    for stage in range(placement.num_stages):
        num_layers = len(layers_of(fence, stage))
        values = num_layers * parts.layer
        # A tied table is on both ends.
        values += parts.table * (stage == 0) + (parts.norm + parts.table) * (stage == last)
        weights.append(values * itemsize)
        per_token.append(num_layers * parts.cached_heads * cached)
    tokens, holds = _cached_tokens(model, homes, weights, per_token, known)
    totals = [
        weight + each * tokens + slot
        for weight, each, slot in zip(weights, per_token, slots, strict=True)
    ]
    stages = tuple(
        StageMemory(
            weights=weights[stage],
            kv=per_token[stage] * tokens,
            slots=slots[stage],
            device_bytes=known[home],
            on_device=sum(
                total for total, other in zip(totals, homes, strict=True) if other == home
            ),
        )
        for stage, home in enumerate(homes)
    )
    return PipelineMemory(stages, tokens, holds)


def _cached_tokens(
    model: ModelPlan,
    homes: Sequence[Home],
    weights: Sequence[int],
    per_token: Sequence[int],
    known: Mapping[Home, int | None],
) -> tuple[int, bool | None]:
    """The least that any device, or any process with ``--kv-memory``, has room for."""
    limited = model.room.kv_memory is not None
    groups: dict[Home, tuple[int, int]] = {}
    for stage, home in enumerate(homes):
        # --kv-memory is for all stages of a process.
        key = (home[0], 0) if limited else home
        held, each = groups.get(key, (0, 0))
        groups[key] = (held + weights[stage], each + per_token[stage])
    found = []
    for key, (held, each) in groups.items():
        room = model.room if limited else model.room.on(known[key])
        cache = room.cache(each, model.facts.max_model_len, held)
        found.append((cache.num_bytes // each, cache.holds_longest))
    verdicts = [holds for _, holds in found]
    holds = False if False in verdicts else None if None in verdicts else True
    return min(tokens for tokens, _ in found), holds
