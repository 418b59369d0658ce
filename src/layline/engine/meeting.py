"""How the ranks of a mesh find each other."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from layline.comm.groups import Groups
from layline.comm.world import LOOPBACK, backend_for, make_groups
from layline.topology import Topology

FileStore: Any = distributed.FileStore  # type: ignore[attr-defined]  # torch's stubs leave it out
# Liveness is the driver's to judge, by heartbeats: a step may take as long as it likes.
PATIENCE_S = 6 * 3600.0


def join_groups(
    topology: Topology, device: torch.device, *, host: str, meeting: str, store: Any = None
) -> Groups:
    """This rank's ends of the mesh's groups. Every rank must call it.

    Ranks meet through ``store`` under torchrun, and otherwise through the file ``meeting``. Their
    connections are on the loopback interface when ``host`` is.
    """
    if store is None:
        store = FileStore(meeting, topology.world_size)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if host == LOOPBACK and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    distributed.init_process_group(
        backend_for(device),
        store=store,
        rank=topology.rank,
        world_size=topology.world_size,
        timeout=timedelta(seconds=PATIENCE_S),
    )
    return make_groups(topology, device, host=host, timeout_s=PATIENCE_S)
