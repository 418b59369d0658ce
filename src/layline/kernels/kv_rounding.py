"""Keys and values as int8 or 8-bit floats, with one scale for each token and head.

Shape suffixes: T token rows, 2 the key and the value, K key/value heads, D head size.

The scale is the row's largest magnitude over the largest number of the format, so nothing is
calibrated, no outlier in one token or head costs another its precision, and a token's stored row
depends on that token alone: not on the chunk, the batch or the rank that wrote it. It is bfloat16,
which has FP32's range (FP16 would overflow at large keys and vanish at small ones); values are
divided by the rounded scale, so its 8 bits cost nothing. That is 2 bytes on a head's 64 or 128.

int8 divides the range evenly: off by at most half a step, 1/252 of the row's largest magnitude.
fp8 is e4m3fn (4 bits of precision, at most 448, a NaN, no infinity): off by 1/16 of each value, or
1/1024 of the scale where that is more. https://arxiv.org/abs/2209.05433 describes the format.
A NaN or an infinity makes the whole row NaN through its scale: damage stays visible.
"""

from __future__ import annotations

import torch

SCALE_DTYPE = torch.bfloat16
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The largest magnitude of each storage dtype that is used; int8's -128 is not."""
# A row of zeros, or of less than this, is divided by it instead of by zero.
SMALLEST_SCALE = torch.finfo(SCALE_DTYPE).tiny


def round_heads(kv_T2KD: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Values [tokens, 2, K, D] in ``dtype`` and their scales [tokens, 2, K] in bfloat16.

    ``dtype`` is int8 or float8_e4m3fn. Magnitudes are to be below 1e38.
    """
    most = LARGEST[dtype]
    kv32 = kv_T2KD.float()
    scales = kv32.abs().amax(dim=-1).mul_(1.0 / most).clamp_min_(SMALLEST_SCALE).to(SCALE_DTYPE)
    # A scale that was rounded down leaves up to 1/256 too much; builds differ in what a cast does
    # with it, from a NaN to the largest number.
    values = (kv32 / scales.float().unsqueeze(-1)).clamp_(-most, most)
    if not dtype.is_floating_point:
        values.round_()
    return values.to(dtype), scales


def restore_heads(
    values_T2KD: torch.Tensor, scales_T2K: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """What :func:`round_heads` rounded, [tokens, 2, K, D] in ``dtype``.

    Both storage types convert exactly to every float type, so a value is rounded at most once, when
    its product with the scale is.
    """
    return (values_T2KD.to(dtype) * scales_T2K.unsqueeze(-1)).to(dtype)
