"""The key-value cache's size and memory."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
import torch

from layline.config import EngineConfig
from layline.engine.scheduler import BLOCK_SIZE
from layline.errors import UsageError
from layline.kernels.kv_rounding import LARGEST, SCALE_DTYPE
from layline.layers.kv_cache import KVCache, PlainCache, QuantisedCache
from layline.layers.kv_types import SCALE_BYTES
from layline.models.config import DecoderConfig

CPU_SHARE = 0.5  # Of the machine's memory. Pages that no token has touched cost nothing.
CUDA_SHARE = 0.8  # Of the memory free after loading; the rest is for activations.


@dataclass(frozen=True)
class Room:
    """What decides how many blocks one rank's cache can have.

    ``slot_bytes`` is what one token takes, ``local_ranks`` how many ranks share the machine.
    """

    slot_bytes: int
    max_model_len: int
    device: torch.device
    local_ranks: int = 1


def local_heads(config: DecoderConfig, attn_tp: int = 1) -> int:
    """Key heads of one rank; where there are fewer than ranks, several hold the same one."""
    return max(1, config.num_kv_heads // attn_tp)


def slot_bytes(
    config: DecoderConfig, dtype: torch.dtype, attn_tp: int = 1, num_layers: int | None = None
) -> int:
    """Bytes that one token takes on one rank, scales included; ``None`` stands for all layers.

    ``dtype`` is that of the stored values.
    """
    layers = config.num_layers if num_layers is None else num_layers
    head = config.head_dim * dtype.itemsize + (SCALE_BYTES if dtype in LARGEST else 0)
    return layers * 2 * local_heads(config, attn_tp) * head


def num_blocks(engine: EngineConfig, room: Room) -> int:
    """Blocks of a rank's cache, block 0 included.

    Raises UsageError when one sequence of ``max_model_len`` tokens does not fit.
    """
    block_bytes = room.slot_bytes * BLOCK_SIZE
    longest = -(-room.max_model_len // BLOCK_SIZE)
    available, name = engine.kv_memory, "kv_memory"
    if available is None:
        available, name = _available(room), "the memory for keys and values"
    fitting = available // block_bytes - 1
    if fitting < longest:
        tokens = max(fitting, 0) * BLOCK_SIZE
        needed = -(-(longest + 1) * block_bytes // (1 << 20))
        lower = f", or max_model_len {tokens}" if tokens > 1 else ""
        raise UsageError(
            f"{name} {available} bytes holds {tokens} tokens; expected room for one sequence of "
            f"max_model_len {room.max_model_len}: {needed}M{lower}"
        )
    return min(engine.max_running * longest, fitting) + 1


def _available(room: Room) -> int:
    """Bytes the cache may have where the configuration does not say."""
    if room.device.type == "cuda":
        return int(torch.cuda.mem_get_info(room.device)[0] * CUDA_SHARE)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(memory * CPU_SHARE) // room.local_ranks


@dataclass(frozen=True)
class CacheShape:
    """A layer's cache on one rank: its blocks, the rank's key/value heads, and where they are.

    ``stored`` is the type of the values in memory, ``computed`` the run's: attention gets the
    values of a quantised cache in it.
    """

    num_blocks: int
    num_heads: int
    device: torch.device
    stored: torch.dtype
    computed: torch.dtype


def allocate(
    config: DecoderConfig, shape: CacheShape, num_layers: int | None = None
) -> list[KVCache]:
    """One zeroed cache a layer; ``None`` stands for all of them."""
    layers = config.num_layers if num_layers is None else num_layers
    return [_cache(config.head_dim, shape) for _ in range(layers)]


def _cache(head_dim: int, shape: CacheShape) -> KVCache:
    heads = (shape.num_blocks * BLOCK_SIZE, 2, shape.num_heads)
    values = _zeros((*heads, head_dim), shape.device, shape.stored)
    if shape.stored not in LARGEST:
        return PlainCache(values)
    return QuantisedCache(values, _zeros(heads, shape.device, SCALE_DTYPE), shape.computed)


def _zeros(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # The system's zero pages: memory is taken only as slots are written.
    flat = np.zeros(int(np.prod(shape)) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(flat).view(dtype).view(shape)
