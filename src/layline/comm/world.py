"""Bringing processes together: an explicit rendezvous, then a process group for each set of ranks.

Where they meet is a store that the caller brings. Connections are on one interface only.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from layline.comm.collectives import Channel, TorchGroup
from layline.comm.interfaces import interface_towards
from layline.config import LOOPBACK
from layline.errors import CollectiveError
from layline.topology import GroupName, Topology

FileStore: Any = distributed.FileStore  # type: ignore[attr-defined]  # torch's stubs leave it out


def open_world(
    topology: Topology,
    store: Any,
    device: torch.device,
    *,
    host: str = LOOPBACK,
    timeout_s: float = 30.0,
) -> None:
    """Join the other ranks at ``store``. Every rank calls this once, before :func:`make_groups`.

    The backend follows ``device``: gloo for "cpu", NCCL for "cuda:N". gloo's connections are on
    the interface that leads to ``host``, an address. ``timeout_s`` bounds the wait here.

    Raises CollectiveError when the others do not come in time.
    """
    here, size = topology.rank, topology.world_size
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        store.set_timeout(timedelta(seconds=timeout_s))
        with _interface_of(host):
            distributed.init_process_group(
                backend_for(device),
                store=store,
                rank=here,
                world_size=size,
                timeout=timedelta(seconds=timeout_s),
            )
    except (RuntimeError, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise CollectiveError(
            f"rank {here} of {size} could not join the others (timeout {timeout_s:g} s): {reason}"
        ) from error


def make_groups(
    topology: Topology,
    device: torch.device,
    *,
    host: str = LOOPBACK,
    timeout_s: float = 30.0,
    verified: bool | None = None,
    verified_calls: int | None = None,
    names: Collection[GroupName] = tuple(GroupName),
) -> dict[GroupName, TorchGroup]:
    """This rank's end of every group of ``names`` that has more than one rank.

    All ranks call it after :func:`open_world`, with topologies that differ in ``rank`` alone: each
    takes part in creating all groups, in one order. Names that stand for the same ranks share one
    process group. ``verified`` is by default on for gloo and off for NCCL; ``verified_calls`` is
    the number of a group's first calls that it holds for, or None for all (see TorchGroup).

    Raises CollectiveError when the world has another size or rank than the topology.
    """
    if (distributed.get_world_size(), distributed.get_rank()) != (
        topology.world_size,
        topology.rank,
    ):
        raise CollectiveError(
            f"this is rank {distributed.get_rank()} of {distributed.get_world_size()}; "
            f"the topology says rank {topology.rank} of {topology.world_size}"
        )
    checks = device.type == "cpu" if verified is None else verified
    channels: dict[tuple[int, ...], Channel] = {}
    with _interface_of(host):
        for ranks in _every_group(topology, names):
            if ranks not in channels:
                process_group = distributed.new_group(
                    list(ranks), timeout=timedelta(seconds=timeout_s), backend=backend_for(device)
                )
                channels[ranks] = Channel(process_group, ranks, device, timeout_s)
    return {
        name: TorchGroup(
            name, channels[topology.group(name)], verified=checks, verified_calls=verified_calls
        )
        for name in names
        if topology.size(name) > 1
    }


def make_pairs(
    pairs: Sequence[tuple[int, int]], *, host: str = LOOPBACK, timeout_s: float = 30.0
) -> list[Any]:
    """A gloo process group for each pair of ranks, in order; None for a pair without this rank.

    All ranks call it after :func:`open_world`, with equal ``pairs``.
    """
    here = distributed.get_rank()
    found: list[Any] = []
    with _interface_of(host):
        for pair in pairs:
            group = distributed.new_group(
                list(pair), timeout=timedelta(seconds=timeout_s), backend="gloo"
            )
            found.append(group if here in pair else None)
    return found


def close_world() -> None:
    """Leave the other ranks. Safe to call when the world was never opened."""
    if distributed.is_initialized():
        distributed.destroy_process_group()


def backend_for(device: torch.device) -> str:
    """Which backend of torch.distributed serves a device. Raises CollectiveError for others."""
    backends = {"cpu": "gloo", "cuda": "nccl"}
    if device.type not in backends:
        raise CollectiveError(f"device {device} has no collectives; expected cpu or cuda")
    return backends[device.type]


def _every_group(topology: Topology, names: Collection[GroupName]) -> Iterator[tuple[int, ...]]:
    """Groups of more than one rank, of all ranks, in the order in which they are created."""
    for name in names:
        if topology.size(name) > 1:
            groups = {topology.at(rank).group(name) for rank in range(topology.world_size)}
            yield from sorted(groups)


@contextlib.contextmanager
def _interface_of(host: str) -> Iterator[None]:
    """Let gloo listen, while groups are made, on the interface that leads to where we meet.

    By itself it listens where this machine's name points, which on many is the loopback interface.
    It takes the interface from the environment alone. A user's own choice is left as it is.
    """
    key = "GLOO_SOCKET_IFNAME"
    interface = None if key in os.environ else interface_towards(host)
    if interface is None:
        yield
        return
    os.environ[key] = interface
    try:
        yield
    finally:
        del os.environ[key]
