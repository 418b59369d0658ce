"""Cuts chosen by cost: the fence whose slowest stage is fastest, within memory. No torch here.

Costs are data: measured seconds, or the estimate of :mod:`layline.pipeline.estimate`. The search is
exact. It follows the classic dynamic programme for dividing a chain into contiguous parts.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from layline.errors import PlacementError
from layline.pipeline.fence import Fence, check_stages, listed

Usage = tuple[int, ...]
"""Bytes used so far of each device that several stages share."""
Value = Callable[[float, float, int, int], float | None]
"""From a search's value so far, a stage's time, the bytes on its device and the stage's number to
the value with this stage, or None where it must not be."""


@dataclass(frozen=True, kw_only=True)
class PartCost:
    """What one layer or one end costs, in any unit that all parts share, and its memory."""

    cost: float
    num_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class StackCost:
    """The costs of a model: the embedding goes with stage 0, norm and head with the last.

    ``unit`` is that of the costs, ``source`` says in words where they come from.
    """

    layers: tuple[PartCost, ...]
    embedding: PartCost = PartCost(cost=0)
    head: PartCost = PartCost(cost=0)
    unit: str = ""
    source: str = "given"


@dataclass(frozen=True, kw_only=True)
class StageDevice:
    """What a stage runs on. Stages with equal ``name`` share the memory.

    ``speed`` is relative: a device of speed 2 takes half the cost. ``memory`` None is no limit.
    """

    name: Hashable
    speed: float = 1.0
    memory: int | None = None


@dataclass(frozen=True)
class StageShare:
    """One stage of a fence: its layers, what they cost and hold, and how long they take."""

    layers: range
    cost: float
    time: float
    num_bytes: int


def shares_of(
    fence: Fence, stack: StackCost, devices: Sequence[StageDevice]
) -> tuple[StageShare, ...]:
    """What each stage of ``fence`` has."""
    sums = _Sums(stack)
    shares = []
    for stage, device in enumerate(devices):
        first, stop = fence[stage], fence[stage + 1]
        cost, num_bytes = sums.of(first, stop)
        shares.append(StageShare(range(first, stop), cost, cost / device.speed, num_bytes))
    return tuple(shares)


def slowest(shares: Sequence[StageShare]) -> float:
    """The time of the slowest stage: what a full pipeline takes for each item."""
    return max(share.time for share in shares)


def balanced_fence(stack: StackCost, devices: Sequence[StageDevice]) -> Fence:
    """The fence with the least slowest stage; among those, the most even one.

    There is a device for each stage. Raises PlacementError, with numbers, when no cuts fit into
    memory, and UsageError for more stages than layers.
    """
    check_stages(len(devices), len(stack.layers))
    search = _Search(stack, devices)

    def fits(used: int, stage: int) -> bool:
        memory = devices[stage].memory
        return memory is None or used <= memory

    def longest(before: float, time: float, used: int, stage: int) -> float | None:
        return max(before, time) if fits(used, stage) else None

    found = search.best(longest)
    if found is None:
        raise PlacementError(_nothing_fits(stack, devices, search))
    least = found[0]

    def squares(before: float, time: float, used: int, stage: int) -> float | None:
        return before + time * time if time <= least and fits(used, stage) else None

    even = search.best(squares)
    assert even is not None, "the fence of the first search is one"
    return (0, *even[1])


class _Sums:
    """Costs and bytes of any run of layers, with the ends where it has them."""

    def __init__(self, stack: StackCost) -> None:
        self._stack = stack
        self._costs = [0.0, *accumulate(part.cost for part in stack.layers)]
        self._bytes = [0, *accumulate(part.num_bytes for part in stack.layers)]

    def of(self, first: int, stop: int) -> tuple[float, int]:
        cost = self._costs[stop] - self._costs[first]
        num_bytes = self._bytes[stop] - self._bytes[first]
        if first == 0:
            cost += self._stack.embedding.cost
            num_bytes += self._stack.embedding.num_bytes
        if stop == len(self._stack.layers):
            cost += self._stack.head.cost
            num_bytes += self._stack.head.num_bytes
        return cost, num_bytes


class _Search:
    """Every fence in the order of its stages, keeping the best for each position.

    Stages that share a device share its memory, so what they used is part of the position.
    """

    def __init__(self, stack: StackCost, devices: Sequence[StageDevice]) -> None:
        self._sums = _Sums(stack)
        self._num_layers = len(stack.layers)
        self._devices = devices
        names = [device.name for device in devices]
        limited = {device.name for device in devices if device.memory is not None}
        self._shared = [
            name for name in dict.fromkeys(names) if name in limited and names.count(name) > 1
        ]

    def best(self, value: Value) -> tuple[float, tuple[int, ...]] | None:
        """The least value, and where its stages stop; None when no fence is allowed.

        Adding a layer to a stage must not make a value that is not allowed allowed.
        """
        states: dict[tuple[int, Usage], tuple[float, tuple[int, ...]]]
        states = {(0, (0,) * len(self._shared)): (0.0, ())}
        for stage in range(len(self._devices)):
            following: dict[tuple[int, Usage], tuple[float, tuple[int, ...]]] = {}
            for (first, usage), (before, stops) in states.items():
                for stop in self._stops(stage, first):
                    cost, num_bytes = self._sums.of(first, stop)
                    used, usage_after = self._used(stage, num_bytes, usage)
                    time = cost / self._devices[stage].speed
                    after = value(before, time, used, stage)
                    if after is None:
                        break
                    key, candidate = (stop, usage_after), (after, (*stops, stop))
                    if key not in following or candidate < following[key]:
                        following[key] = candidate
            states = following
        return min(states.values(), default=None)

    def _stops(self, stage: int, first: int) -> range:
        later = len(self._devices) - 1 - stage
        if later == 0:
            return range(self._num_layers, self._num_layers + 1)
        return range(first + 1, self._num_layers - later + 1)

    def _used(self, stage: int, num_bytes: int, usage: Usage) -> tuple[int, Usage]:
        """Bytes on the stage's device with this stage, and the usage that follows."""
        name = self._devices[stage].name
        if name not in self._shared:
            return num_bytes, usage
        index = self._shared.index(name)
        used = usage[index] + num_bytes
        return used, (*usage[:index], used, *usage[index + 1 :])


def _nothing_fits(stack: StackCost, devices: Sequence[StageDevice], search: _Search) -> str:
    """The refusal, with the fence that comes nearest."""

    def missing(before: float, time: float, used: int, stage: int) -> float | None:
        memory = devices[stage].memory
        return before if memory is None else max(before, used - memory)

    nearest = search.best(missing)
    assert nearest is not None, "every fence is allowed here"
    fence = (0, *nearest[1])
    shares = shares_of(fence, stack, devices)
    held: dict[Hashable, int] = {}
    for device, share in zip(devices, shares, strict=True):
        held[device.name] = held.get(device.name, 0) + share.num_bytes
    limits = {device.name: device.memory for device in devices}
    worst = max(held, key=lambda name: held[name] - (limits[name] or held[name]))
    stages = [str(stage) for stage, device in enumerate(devices) if device.name == worst]
    known = [limit for limit in limits.values() if limit is not None]
    return (
        f"no cuts into {len(devices)} stages fit: the model needs {readable(sum(held.values()))}, "
        f"its devices have {readable(sum(known))}; the nearest cuts, {listed(fence[1:-1])}, put "
        f"{readable(held[worst])} on stage {' and '.join(stages)}, which has room for "
        f"{readable(limits[worst] or 0)}; expected more stages, more devices, or a lower "
        "max_model_len than now"
    )


def readable(num_bytes: int) -> str:
    """Bytes in the largest unit that leaves a whole part."""
    size = float(num_bytes)
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.{0 if unit == 'bytes' else 1}f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
