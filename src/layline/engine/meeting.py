"""How the ranks of a mesh find each other."""

from __future__ import annotations

from typing import Any

import torch

from layline.comm.groups import Groups
from layline.comm.world import FileStore, make_groups, open_world
from layline.topology import Topology

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
    if store is None:
        store = FileStore(meeting, topology.world_size)
    open_world(topology, store, device, host=host, timeout_s=PATIENCE_S)
    return make_groups(
        topology, device, host=host, timeout_s=PATIENCE_S, verified_calls=verified_calls
    )
