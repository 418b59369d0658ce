"""The key-value cache's size and memory."""

from __future__ import annotations

import numpy as np
import torch

from layline.config import EngineConfig
from layline.errors import UsageError
from layline.models.config import DecoderConfig

BLOCK_SIZE = 16
CPU_CAP = 4 << 30  # Untouched pages cost nothing on the CPU; this bounds what a busy run may touch.
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

    Raises UsageError when ``kv_memory`` cannot hold one sequence of ``max_model_len`` tokens.
    """
    block_bytes = slot_bytes(config, dtype) * BLOCK_SIZE
    longest = -(-max_model_len // BLOCK_SIZE)
    wanted = engine.max_running * longest
    if engine.kv_memory is not None:
        fitting = engine.kv_memory // block_bytes - 1
        if fitting < longest:
            raise UsageError(
                f"kv_memory {engine.kv_memory} holds {max(fitting, 0) * BLOCK_SIZE} tokens; "
                f"expected room for max_model_len {max_model_len}, which takes "
                f"{(longest + 1) * block_bytes} bytes"
            )
        return min(wanted, fitting) + 1
    cap = CPU_CAP
    if device.type == "cuda":
        cap = int(torch.cuda.mem_get_info(device)[0] * CUDA_SHARE)
    return min(wanted, max(longest, cap // block_bytes)) + 1


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
