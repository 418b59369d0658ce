"""Which device and process has which pipeline stage, and where weights really are. No torch here.

On the CPU an ordinal names a virtual device: residency is recorded as if it were one. Several
processes have runs of stages; ordinals are those of the process that has the stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import permutations

from layline.errors import PlacementError
from layline.pipeline.fence import Fence, even_fence, layers_of, listed, stage_of


class TransportKind(Enum):
    """How bytes get over one boundary."""

    LOCAL = "local copy"
    PEER = "peer copy"
    PROCESS = "between processes"


@dataclass(frozen=True)
class Inventory:
    """The devices of one process's machine.

    ``count`` is None where it is unknown or, for virtual devices, without limit. ``unreachable``
    has the ordered pairs (from, to) that cannot copy directly.
    """

    kind: str = "cpu"
    count: int | None = None
    unreachable: frozenset[tuple[int, int]] = frozenset()

    def reaches(self, source: int, target: int) -> bool:
        """True when ``source`` can write into ``target``'s memory."""
        return (source, target) not in self.unreachable


@dataclass(frozen=True)
class Placement:
    """The device and the process of every stage."""

    devices: tuple[int, ...]
    processes: tuple[int, ...]

    @property
    def num_stages(self) -> int:
        """How many stages there are."""
        return len(self.devices)

    @property
    def primary(self) -> int:
        """The device that serves: the last stage's, which has the head."""
        return self.devices[-1]

    @property
    def multi_stream_same_device(self) -> bool:
        """True when two stages' streams are on one device."""
        return len(set(self.homes())) < self.num_stages

    def homes(self) -> tuple[tuple[int, int], ...]:
        """(process, device) of every stage."""
        return tuple(zip(self.processes, self.devices, strict=True))

    def transport(self, boundary: int) -> TransportKind:
        """How stage ``boundary`` hands over to the one after it."""
        if self.processes[boundary] != self.processes[boundary + 1]:
            return TransportKind.PROCESS
        same = self.devices[boundary] == self.devices[boundary + 1]
        return TransportKind.LOCAL if same else TransportKind.PEER

    def layer_device(self, fence: Fence, layer: int) -> int:
        """The device that should hold ``layer``; layers beyond the stack are with the last."""
        return self.devices[stage_of(fence, layer)]


@dataclass(frozen=True)
class Residency:
    """Where each layer's weights actually are, by layer; ``primary`` is the device that walks."""

    layers: tuple[int, ...]
    primary: int

    @property
    def remote_layers(self) -> tuple[int, ...]:
        """Layers whose weights are on another device than the primary."""
        return tuple(layer for layer, device in enumerate(self.layers) if device != self.primary)

    @property
    def sharded_cross_device(self) -> bool:
        """True when a walk of the whole stack on the primary would read remote weights."""
        return bool(self.remote_layers)


def place(
    num_stages: int,
    inventory: Inventory,
    devices: tuple[int, ...] | None = None,
    num_processes: int = 1,
    *,
    name: str = "pp_devices",
) -> Placement:
    """Place stages on ``devices``, or where ``None`` on the default ones, over processes.

    ``name`` is the flag or door that named the devices. Raises PlacementError as
    :func:`check_devices` does, and for more processes than stages.
    """
    if num_processes > num_stages:
        raise PlacementError(
            f"pp_processes {num_processes} is more than the {num_stages} pipeline stages; expected "
            f"1 to {num_stages}"
        )
    runs = even_fence(num_stages, num_processes)
    processes = tuple(stage_of(runs, stage) for stage in range(num_stages))
    if devices is None:
        return Placement(default_devices(processes, inventory), processes)
    check_devices(devices, inventory, processes, name=name)
    return Placement(devices, processes)


def default_devices(processes: tuple[int, ...], inventory: Inventory) -> tuple[int, ...]:
    """A virtual device for each stage on the CPU; on CUDA the first device for all."""
    if inventory.kind == "cpu":
        return tuple(stage - processes.index(process) for stage, process in enumerate(processes))
    return (0,) * len(processes)


def check_devices(
    devices: tuple[int, ...], inventory: Inventory, processes: tuple[int, ...], *, name: str
) -> None:
    """Raise PlacementError for devices that cannot be used: too few, missing, out of reach.

    ``processes`` has the process of each stage, ``name`` is the flag or door at fault.
    """
    num_stages = len(processes)
    if len(devices) != num_stages:
        raise PlacementError(
            f"{name} {listed(devices)} names {len(devices)} devices for {num_stages} pipeline "
            f"stages; expected {num_stages}"
        )
    for device in devices:
        if inventory.count is not None and device >= inventory.count:
            known = listed(range(inventory.count)) or "none"
            near = f"; the nearest is {inventory.count - 1}" if inventory.count else ""
            raise PlacementError(
                f"{name} {listed(devices)} names device {device}, which is not there; this machine "
                f"has {inventory.kind} devices {known}{near}"
            )
    for source, target in device_pairs(devices, processes):
        if not inventory.reaches(source, target):
            raise PlacementError(
                f"{name} {listed(devices)} needs device {source} to copy directly to device "
                f"{target}, and there is no peer access; expected devices that reach each other, "
                "or a process for each (pp_processes)"
            )


def device_pairs(devices: Iterable[int], processes: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Every ordered pair of different devices that one process uses; access is needed for each."""
    homes = list(zip(processes, devices, strict=True))
    for process in dict.fromkeys(process for process, _ in homes):
        used = dict.fromkeys(device for owner, device in homes if owner == process)
        yield from permutations(used, 2)


def resident_devices(fence: Fence, placement: Placement, *, sharded: bool) -> tuple[int, ...]:
    """Where a loader puts each layer's weights: with its stage, or all on the primary device."""
    if not sharded:
        return (placement.primary,) * fence[-1]
    return tuple(
        placement.devices[stage]
        for stage in range(placement.num_stages)
        for _ in layers_of(fence, stage)
    )
