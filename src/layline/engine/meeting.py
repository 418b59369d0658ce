"""How the ranks of a mesh find each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from layline.comm.groups import Groups
from layline.comm.world import FileStore, make_groups, make_pairs, open_world
from layline.engine.stage_run import StageRun
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
    connections are on the loopback interface when ``host`` is. Without ``verified_calls`` they
    compare every call.
    """
    _open(topology, device, host, meeting, store)
    return make_groups(
        topology, device, host=host, timeout_s=PATIENCE_S, verified_calls=verified_calls
    )


@dataclass(frozen=True)
class StageGroups:
    """A rank's ends: the groups of each of its pipeline stages, by stage, and its two links.

    A stage runs collectives in a thread of its own, so it has groups of its own. ``before`` and
    ``after`` are process groups with the neighbouring processes' ranks, None at either end.
    """

    groups: dict[int, Groups]
    before: Any = None
    after: Any = None


def join_stages(
    run: StageRun,
    device: torch.device,
    *,
    host: str,
    meeting: str,
    store: Any = None,
    verified_calls: int | None = VERIFIED_CALLS,
) -> StageGroups:
    """As :func:`join_groups`, for ranks that run pipeline stages. Every rank must call it."""
    topology = run.topology
    _open(topology, device, host, meeting, store)
    # Every rank takes part in making all groups, those of others and of no stage here included.
    rounds = [
        make_groups(
            topology,
            device,
            host=host,
            timeout_s=PATIENCE_S,
            verified_calls=verified_calls,
            names=[name for name in GroupName if name is not GroupName.PP],
        )
        for _ in range(run.longest)
    ]
    pairs = [(rank, rank + topology.tp) for rank in range(topology.world_size - topology.tp)]
    links = dict(zip(pairs, make_pairs(pairs, host=host, timeout_s=PATIENCE_S), strict=True))
    here = topology.rank
    return StageGroups(
        dict(zip(run.stages, rounds, strict=False)),
        before=links.get((here - topology.tp, here)),
        after=links.get((here, here + topology.tp)),
    )


def _open(topology: Topology, device: torch.device, host: str, meeting: str, store: Any) -> None:
    if store is None:
        store = FileStore(meeting, topology.world_size)
    open_world(topology, store, device, host=host, timeout_s=PATIENCE_S)
