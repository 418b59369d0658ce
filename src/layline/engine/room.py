"""A device's memory and what a rank's cache takes of it, before anything runs. No torch here.

The blocks are those that engine.kv allocates; a test holds the two together.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass, replace

from layline.config import EngineConfig, elastic_environment
from layline.engine.scheduler import BLOCK_SIZE
from layline.topology import Topology

CPU_SHARE = 0.5
CUDA_SHARE = 0.8
QUERY = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")
QUERY_S = 10.0


@dataclass(frozen=True)
class Room:
    """What one rank may use. ``device_bytes`` is its share of the device, None where unknown."""

    device: str
    device_bytes: int | None
    kv_memory: int | None
    max_running: int

    def cache(self, slot_bytes: int, max_model_len: int, weights: int) -> CacheRoom:
        """The cache of a rank whose tokens take ``slot_bytes`` each."""
        block_bytes = slot_bytes * BLOCK_SIZE
        longest = -(-max_model_len // BLOCK_SIZE)
        wanted = self.max_running * longest + 1
        available = self.kv_memory
        if available is None:
            available = self._available(weights)
        if available is None:
            return CacheRoom(wanted * block_bytes, None)
        blocks = min(wanted, max(available // block_bytes, 0))
        return CacheRoom(blocks * block_bytes, blocks > longest)

    def on(self, device_bytes: int | None) -> Room:
        """The same limits on a device of another size."""
        return replace(self, device_bytes=device_bytes)

    def _available(self, weights: int) -> int | None:
        if self.device_bytes is None:
            return None
        if self.device == "cuda":
            return max(0, int((self.device_bytes - weights) * CUDA_SHARE))
        return int(self.device_bytes * CPU_SHARE)


@dataclass(frozen=True)
class CacheRoom:
    """Bytes of a rank's cache, and whether a sequence of the longest length fits in it."""

    num_bytes: int
    holds_longest: bool | None


def room_for(engine: EngineConfig, topology: Topology) -> Room:
    """What this machine has for each of the ranks on it; under torchrun those of one machine."""
    elastic = elastic_environment()
    local_ranks = topology.world_size if elastic is None else elastic[3]
    found = cuda_bytes(local_ranks) if engine.device == "cuda" else cpu_bytes() // local_ranks
    return Room(engine.device, found, engine.kv_memory, engine.max_running)


def cpu_bytes() -> int:
    """This machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def cuda_bytes(local_ranks: int) -> int | None:
    """Memory of the smallest GPU among as many as there are ranks, one for each.

    None where nvidia-smi does not say, or there are fewer GPUs.
    """
    sizes = cuda_sizes()
    return min(sizes[:local_ranks]) if len(sizes) >= local_ranks else None


def cuda_sizes() -> list[int]:
    """Memory of each GPU by its ordinal; empty where nvidia-smi does not say."""
    try:
        said = subprocess.run(
            QUERY, capture_output=True, text=True, check=True, timeout=QUERY_S
        ).stdout.split()
        return [int(size) << 20 for size in said]
    except (OSError, ValueError, subprocess.SubprocessError):
        return []
