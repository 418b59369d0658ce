"""The key-value cache's size and memory."""

from __future__ import annotations

import os

import numpy as np
import torch

from layline.config import EngineConfig
from layline.errors import UsageError
from layline.models.config import DecoderConfig

BLOCK_SIZE = 16
CPU_SHARE = 0.5  # Of the machine's memory. Pages that no token has touched cost nothing.
CUDA_SHARE = 0.8  # Of the memory free after loading; the rest is for activations.


def slot_bytes(config: DecoderConfig, dtype: torch.dtype) -> int:
    """Bytes that one token takes over all layers."""
    return config.num_layers * 2 * config.kv_size * dtype.itemsize


def num_blocks(
    engine: EngineConfig,
    config: DecoderConfig,
    max_model_len: int,
    device: torch.device,
    dtype: torch.dtype,
) -> int:
    """Blocks of the cache, block 0 included.

    Raises UsageError when one sequence of ``max_model_len`` tokens does not fit.
    """
    block_bytes = slot_bytes(config, dtype) * BLOCK_SIZE
    longest = -(-max_model_len // BLOCK_SIZE)
    available, name = engine.kv_memory, "kv_memory"
    if available is None:
        available, name = _available(device), "the memory for keys and values"
    fitting = available // block_bytes - 1
    if fitting < longest:
        tokens = max(fitting, 0) * BLOCK_SIZE
        needed = -(-(longest + 1) * block_bytes // (1 << 20))
        lower = f", or max_model_len {tokens}" if tokens > 1 else ""
        raise UsageError(
            f"{name} {available} bytes holds {tokens} tokens; expected room for one sequence of "
            f"max_model_len {max_model_len}: {needed}M{lower}"
        )
    return min(engine.max_running * longest, fitting) + 1


def _available(device: torch.device) -> int:
    """Bytes the cache may have where the configuration does not say."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * CUDA_SHARE)
    return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * CPU_SHARE)


def allocate(
    config: DecoderConfig, blocks: int, device: torch.device, dtype: torch.dtype
) -> list[torch.Tensor]:
    """One zeroed cache a layer, [slots, 2, kv heads, head dim]."""
    shape = (blocks * BLOCK_SIZE, 2, config.num_kv_heads, config.head_dim)
    return [_zeros(shape, device, dtype) for _ in range(config.num_layers)]


def _zeros(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # The system's zero pages: memory is taken only as slots are written.
    flat = np.zeros(int(np.prod(shape)) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(flat).view(dtype).view(shape)
