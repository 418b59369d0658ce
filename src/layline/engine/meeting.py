"""How the ranks of a mesh find each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from layline.comm.groups import Groups
from layline.comm.world import FileStore, make_groups, make_pairs, open_world
from layline.topology import GroupName, Topology

# Liveness is the driver's to judge, by heartbeats: a step may take as long as it likes.
PATIENCE_S = 6 * 3600.0
VERIFIED_CALLS = 256
"""Calls of each group that ranks compare before they send: several steps. All follow one plan."""


def join_groups(
    topology: Topology,
    device: torch.device,
    *,
    host: str,
    meeting: str,
    store: Any = None,
    verified_calls: int | None = VERIFIED_CALLS,
) -> Groups:
    """This rank's ends of the mesh's groups. Every rank must call it.

    Ranks meet through ``store`` under torchrun, and otherwise through the file ``meeting``. Their
    connections are on the interface that leads to the address ``host``. Without ``verified_calls``
    they compare every call.
    """
    _open(topology, device, host, meeting, store)
    return make_groups(
        topology, device, host=host, timeout_s=PATIENCE_S, verified_calls=verified_calls
    )


@dataclass(frozen=True)
class Neighbour:
    """A rank of the process before or after, and the process group that is shared with it."""

    rank: int
    group: Any


@dataclass(frozen=True)
class StageGroups:
    """A rank's ends: the groups of each pipeline stage of its run, and its two neighbours.

    A stage runs collectives in a thread of its own, so it has groups of its own. ``ids`` is the
    rank of the last process that draws for one of the first, or the other way round; None for a
    rank that does neither, and where one process is both.
    """

    of_stages: list[Groups]
    before: Neighbour | None
    after: Neighbour | None
    ids: Neighbour | None = None


def join_stages(
    topology: Topology,
    most_stages: int,
    device: torch.device,
    *,
    host: str,
    meeting: str,
    store: Any = None,
    verified_calls: int | None = VERIFIED_CALLS,
) -> StageGroups:
    """As :func:`join_groups`, for ranks that run at most ``most_stages`` stages each.

    Every rank must call it, with the same number.
    """
    _open(topology, device, host, meeting, store)
    # Every rank takes part in making all groups, also where it has fewer stages than others.
    of_stages: list[Groups] = [
        make_groups(
            topology,
            device,
            host=host,
            timeout_s=PATIENCE_S,
            verified_calls=verified_calls,
            names=[name for name in GroupName if name is not GroupName.PP],
        )
        for _ in range(most_stages)
    ]
    here, tp, size = topology.rank, topology.tp, topology.world_size
    pairs = [(rank, rank + tp) for rank in range(size - tp)]
    links = make_pairs(pairs, host=host, timeout_s=PATIENCE_S)
    # Of each attention DP rank the first draws, and is given what was drawn.
    drawing = range(0, tp if size > tp else 0, topology.attn_cp * topology.attn_tp)
    ways = [(size - tp + rank, rank) for rank in drawing]
    backs = make_pairs(ways, host=host, timeout_s=PATIENCE_S)
    peers = {
        rank: (other, group)
        for pair, group in zip(ways, backs, strict=True)
        for rank, other in (pair, pair[::-1])
    }
    return StageGroups(
        of_stages,
        before=Neighbour(here - tp, links[here - tp]) if here >= tp else None,
        after=Neighbour(here + tp, links[here]) if here < size - tp else None,
        ids=Neighbour(*peers[here]) if here in peers else None,
    )


def _open(topology: Topology, device: torch.device, host: str, meeting: str, store: Any) -> None:
    if store is None:
        store = FileStore(meeting, topology.world_size)
    open_world(topology, store, device, host=host, timeout_s=PATIENCE_S)
