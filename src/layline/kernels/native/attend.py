"""Attention of one query a sequence over a paged cache, in native code.

Shape suffixes: B sequences, L cache rows of a sequence, S cache slots, N query heads, K key/value
heads, D head size.
"""

from __future__ import annotations

import torch

from layline.kernels.native.library import LANES, NativeLibrary

CACHE_DTYPES = (torch.float32, torch.bfloat16)


def attend_cache(
    library: NativeLibrary,
    q_BND: torch.Tensor,
    rows_S2KD: torch.Tensor,
    slots_BL: torch.Tensor,
    counts_B: torch.Tensor,
) -> torch.Tensor:
    """Scaled dot-product attention of sequence b to its first ``counts_B[b]`` slots; [B, N x D].

    Computes in FP32; ``q_BND`` is of any float dtype, which is the result's, and ``rows_S2KD`` of
    one of ``CACHE_DTYPES``. A result depends on its own sequence alone, to the bit.
    """
    batch, heads, size = q_BND.shape
    kv_heads = rows_S2KD.shape[2]
    if rows_S2KD.dtype not in CACHE_DTYPES or size % LANES or not rows_S2KD.is_contiguous():
        raise ValueError(f"a cache of {rows_S2KD.dtype} and heads of {size} are not attended to")
    q32_BND = q_BND.float()
    if q32_BND.stride()[1:] != (size, 1):
        q32_BND = q32_BND.contiguous()
    out = torch.empty(batch, heads * size)
    failed = library.attend(
        rows_S2KD.data_ptr(),
        rows_S2KD.dtype is torch.bfloat16,
        kv_heads,
        size,
        q32_BND.data_ptr(),
        q32_BND.stride(0),
        heads // kv_heads,
        size**-0.5,
        slots_BL.data_ptr(),
        counts_B.data_ptr(),
        batch,
        slots_BL.shape[1],
        out.data_ptr(),
        torch.get_num_threads(),
        library.pool,
    )
    if failed:
        raise MemoryError("no memory for the scores of an attention step")
    return out.to(q_BND.dtype)
