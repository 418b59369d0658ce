"""How prompts are divided into chunks, and which stage does what when. No torch here.

Items (chunks of a prompt, microbatches of a decoding step) go through the stages in order. The
geometry of chunks follows the pipeline document; cuts of the dynamic schedule are exact integers.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isqrt

DEFAULT_CHUNK = 4096
LEAST_AUTO_CHUNK = 128
LEAST_FIRST_CHUNK = 64
AUTO_FROM = 256
"""Shorter prompts are not divided by the automatic rule."""
CHUNKS_PER_STAGE = 4
"""Eight chunks for two stages, as the document has it; deeper pipelines need more to fill."""
LEAST_TAIL = 16
DYNAMIC_FROM = 3
"""With fewer chunks there is nothing to make even."""
NUM_SLOTS = 2


@dataclass(frozen=True, kw_only=True)
class ChunkRule:
    """How a prompt is divided: ``size`` None chooses, 0 does not divide, else tokens of a chunk.

    A ``dynamic`` schedule makes the chosen chunks cost the same, ``size`` is kept as it is.
    """

    size: int | None = None
    dynamic: bool = True


def prime_chunks(num_tokens: int, num_stages: int, rule: ChunkRule) -> tuple[int, ...]:
    """Tokens of each chunk of a prompt, in order.

    Chosen sizes: a ``1 / (4 num_stages)`` of the prompt, at least 128 and at most 4096 tokens,
    from two stages and 256 tokens on; else 4096.
    """
    assert num_tokens > 0, "a prompt has a token"
    if rule.size is not None:
        return fixed_chunks(num_tokens, rule.size or num_tokens)
    if num_stages < 2 or num_tokens < AUTO_FROM:
        return fixed_chunks(num_tokens, DEFAULT_CHUNK)
    share = -(-num_tokens // (CHUNKS_PER_STAGE * num_stages))
    nominal = min(DEFAULT_CHUNK, max(LEAST_AUTO_CHUNK, share))
    chunks = fixed_chunks(num_tokens, nominal)
    if rule.dynamic and len(chunks) >= DYNAMIC_FROM:
        return dynamic_chunks(num_tokens, len(chunks), max(LEAST_FIRST_CHUNK, nominal // 2))
    return chunks


def fixed_chunks(num_tokens: int, size: int) -> tuple[int, ...]:
    """Chunks of ``size`` tokens; a tail of fewer than 16 joins the chunk before it."""
    count, tail = divmod(num_tokens, size)
    if tail == 0:
        return (size,) * count
    if count and tail < LEAST_TAIL:
        return (*(size,) * (count - 1), size + tail)
    return (*(size,) * count, tail)


def dynamic_chunks(num_tokens: int, count: int, first: int) -> tuple[int, ...]:
    """``count`` chunks, the first of ``first`` tokens, the others of equal cost.

    The cost up to a length L is L^2 + 8 T L: attention over what is before, and the layers' own
    matrices. Each cut is the least length that has its share of the cost.
    """

    def cost(length: int) -> int:
        return length * length + 8 * num_tokens * length

    start, rest = cost(first), cost(num_tokens) - cost(first)
    cuts = [0, first]
    for index in range(1, count - 1):
        # The least L with cost(L) >= start + rest * index / (count - 1).
        target = -(-(start * (count - 1) + rest * index) // (count - 1))
        half = 4 * num_tokens
        length = isqrt(target + half * half) - half
        cuts.append(length if cost(length) >= target else length + 1)
    cuts.append(num_tokens)
    return tuple(stop - begin for begin, stop in pairwise(cuts))


@dataclass(frozen=True)
class Turn:
    """One stage's work on one item, in the order in which a host issues it."""

    tick: int
    stage: int
    item: int


def wavefront(num_stages: int, num_items: int) -> Iterator[Turn]:
    """Items one after the other through the stages: stage ``s`` has item ``i`` in tick ``s + i``.

    Within a tick later stages come first: a receiver's read of a slot is issued before the send
    that uses the slot again, as waits bind to what is recorded by then.
    """
    for tick in range(num_stages + num_items - 1):
        for stage in reversed(range(num_stages)):
            item = tick - stage
            if 0 <= item < num_items:
                yield Turn(tick, stage, item)


def decode_wavefront(num_stages: int, num_microbatches: int, num_steps: int) -> Iterator[Turn]:
    """Microbatches of consecutive steps; item ``step * num_microbatches + microbatch``.

    A microbatch enters its next step when its tokens are back from the last stage, so fewer
    microbatches than stages leave ticks without an entry.
    """
    period = max(num_stages, num_microbatches)
    for tick in range(period * (num_steps - 1) + num_microbatches + num_stages - 1):
        for stage in reversed(range(num_stages)):
            step, microbatch = divmod(tick - stage, period)
            if tick >= stage and step < num_steps and microbatch < num_microbatches:
                yield Turn(tick, stage, step * num_microbatches + microbatch)


def ideal_bubble(num_stages: int, num_items: int) -> float:
    """Idle share of a filled and drained pipeline of equal stages: (N - 1) / (M + N - 1)."""
    return (num_stages - 1) / (num_items + num_stages - 1)


def ideal_speedup(num_stages: int, num_items: int) -> float:
    """How many times faster than one stage after the other: N M / (M + N - 1)."""
    return num_stages * num_items / (num_items + num_stages - 1)


def steady_bubble(
    stage_costs: Sequence[float], num_microbatches: int, devices: Sequence[Hashable]
) -> float:
    """Idle share while decoding goes on: the slowest device or a token's way round limits it."""
    busy: dict[Hashable, float] = {}
    for device, cost in zip(devices, stage_costs, strict=True):
        busy[device] = busy.get(device, 0.0) + cost
    period = max(num_microbatches * max(busy.values()), sum(stage_costs))
    return 1 - num_microbatches * sum(stage_costs) / (len(stage_costs) * period)


@dataclass(frozen=True)
class Bar:
    """A stage's work on one item, in the unit of the costs.

    ``released`` is when its output has left: later than ``stop`` while both slots are full.
    """

    stage: int
    item: int
    start: float
    stop: float
    released: float


@dataclass(frozen=True)
class Timeline:
    """A schedule with its costs."""

    bars: tuple[Bar, ...]
    num_stages: int

    @property
    def length(self) -> float:
        """When the last stage is done; the first starts at 0."""
        return max(bar.stop for bar in self.bars)

    @property
    def bubble(self) -> float:
        """The idle share of all stages from the first start to the last end."""
        busy = sum(bar.stop - bar.start for bar in self.bars)
        return 1 - busy / (self.num_stages * self.length)

    def idle(self, stage: int) -> list[tuple[float, float]]:
        """When one stage has nothing to do, as (start, stop)."""
        gaps, free = [], 0.0
        for bar in sorted((b for b in self.bars if b.stage == stage), key=lambda b: b.start):
            if bar.start > free:
                gaps.append((free, bar.start))
            free = bar.stop
        if free < self.length:
            gaps.append((free, self.length))
        return gaps


def timeline(
    costs: Sequence[Sequence[float]],
    *,
    devices: Sequence[Hashable] | None = None,
    in_flight: int | None = None,
) -> Timeline:
    """When each stage works on which item, as early as order and slots allow.

    ``costs[item][stage]`` is how long it takes. Stages on equal ``devices`` take turns there.
    Between two stages there are two slots, so a stage keeps its output until the next one has
    taken the item before last. ``in_flight`` lets an item enter only when the one that many before
    it has left the last stage: a decoding step needs the tokens of the step before.
    """
    num_stages = len(costs[0])
    homes = range(num_stages) if devices is None else devices
    free: dict[Hashable, float] = dict.fromkeys(homes, 0.0)
    bars: list[list[Bar]] = []
    for item, per_stage in enumerate(costs):
        ready = 0.0
        if in_flight is not None and item >= in_flight:
            ready = bars[item - in_flight][-1].stop
        row: list[Bar] = []
        for stage, cost in enumerate(per_stage):
            start = max(ready, free[homes[stage]])
            stop = released = start + cost
            if stage + 1 < num_stages and item >= NUM_SLOTS:
                released = max(stop, bars[item - NUM_SLOTS][stage + 1].start)
            row.append(Bar(stage, item, start, stop, released))
            free[homes[stage]] = ready = released
        bars.append(row)
    return Timeline(tuple(bar for row in bars for bar in row), num_stages)
