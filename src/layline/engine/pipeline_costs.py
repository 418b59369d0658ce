"""What a model's layers cost over pipeline stages, and the schedules that follow. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from layline.config import EngineConfig
from layline.engine.planned import ITEMSIZES, PREFILL_TOKENS, ModelPlan
from layline.layers.kv_types import head_bytes
from layline.models.footprint import part_values
from layline.models.parallel import Shards
from layline.pipeline.cuts import StageDevice, StageShare
from layline.pipeline.estimate import (
    OPERATIONS_PER_BYTE,
    Load,
    PartShape,
    StackShape,
    chunk_load,
    cost_of,
)
from layline.pipeline.fence import Fence, layers_of
from layline.pipeline.schedule import Timeline, steady_bubble, timeline

SHOWN_STEPS = 3
SHOWN_PROMPT = 4096
"""Tokens of the prompt whose chunks are shown, where the context has so many."""


@dataclass(frozen=True)
class Schedule:
    """A schedule to show: what its items are called, and the idle share in the long run.

    ``numbers`` says what the items' names are.
    ``groups`` gives items that belong together, such as one microbatch's steps, one number.
    """

    title: str
    numbers: str
    items: tuple[str, ...]
    groups: tuple[int, ...]
    timeline: Timeline
    steady: float | None = None


def stack_shape(model: ModelPlan, device: str) -> StackShape:
    """The shapes of one rank's part of the model."""
    facts = model.facts
    config = facts.config
    parts = part_values(config, model.spec.topology)
    # A query is multiplied with each key and each value that it sees.
    attended = 2 * Shards(config, model.spec.topology).q_size
    layers = tuple(
        PartShape(
            weights=parts.layer,
            multiplied=parts.layer,
            attended=attended,
            cached=parts.cached_heads,
            window=window,
        )
        for window in config.windows
    )
    return StackShape(
        layers=layers,
        embedding=PartShape(weights=parts.table, multiplied=0),
        head=PartShape(weights=parts.norm + parts.table, multiplied=parts.table, scored_only=True),
        itemsize=ITEMSIZES[facts.dtype],
        cached_itemsize=head_bytes(facts.kv_dtype, config.head_dim),
        operations_per_byte=OPERATIONS_PER_BYTE[device],
    )


def decode_load(model: ModelPlan, engine: EngineConfig, num_stages: int) -> Load:
    """A microbatch of a full decoding step: as many microbatches as stages."""
    rows = max(1, engine.max_running // num_stages)
    context = min(model.facts.max_model_len, PREFILL_TOKENS)
    return Load(rows=rows, sequences=rows, context=context)


def decode_schedule(
    shares: Sequence[StageShare], devices: Sequence[StageDevice], num_microbatches: int
) -> Schedule:
    """Some steps of decoding with this many microbatches in flight."""
    times = [share.time for share in shares]
    homes = [device.name for device in devices]
    count = SHOWN_STEPS * num_microbatches
    groups = tuple(item % num_microbatches for item in range(count))
    several = "microbatches" if num_microbatches > 1 else "microbatch"
    return Schedule(
        title=f"decode: {num_microbatches} {several}, {SHOWN_STEPS} steps",
        numbers="microbatch",
        items=tuple(f"{item % num_microbatches}" for item in range(count)),
        groups=groups,
        timeline=timeline([times] * count, devices=homes, in_flight=num_microbatches),
        steady=steady_bubble(times, num_microbatches, homes),
    )


def prime_schedule(
    stack: StackShape,
    fence: Fence,
    devices: Sequence[StageDevice],
    chunks: Sequence[int],
    *,
    pipelined: bool,
) -> Schedule:
    """One prompt in chunks; without ``pipelined`` a chunk enters when the one before is done."""
    homes = [device.name for device in devices]
    costs = []
    start = 0
    for size in chunks:
        is_last = start + size == sum(chunks)
        costs.append(
            [
                _chunk_cost(stack, fence, stage, (start, start + size), is_last) / device.speed
                for stage, device in enumerate(devices)
            ]
        )
        start += size
    several = "chunks" if len(chunks) > 1 else "chunk"
    serial = "" if pipelined else ", one at a time"
    return Schedule(
        title=f"prime: {sum(chunks)} tokens in {len(chunks)} {several}{serial}",
        numbers="tokens of the chunk",
        items=tuple(map(str, chunks)),
        groups=tuple(range(len(chunks))),
        timeline=timeline(costs, devices=homes, in_flight=None if pipelined else 1),
    )


def _chunk_cost(
    stack: StackShape, fence: Fence, stage: int, chunk: tuple[int, int], is_last: bool
) -> float:
    load = chunk_load(*chunk)
    cost = sum(cost_of(stack.layers[layer], stack, load) for layer in layers_of(fence, stage))
    # One row of a prompt is scored, with its last chunk.
    ends = stage == len(fence) - 2 and is_last
    return cost + (cost_of(stack.head, stack, load) if ends else 0.0)
