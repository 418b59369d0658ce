"""``x @ weight.T + bias`` with plain weights, by whichever torch kernel is fast for the phase."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F


@functools.cache
def wide_bfloat16_is_slow() -> bool:
    """True on a CPU without bfloat16 tile instructions, where FP32 matmuls win at many rows."""
    supported = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return not (supported is not None and supported())


def dense_matmul(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, upcast: bool
) -> torch.Tensor:
    """[tokens, out features] in the weight's dtype, or in FP32 with ``upcast``.

    With ``upcast`` the product runs in FP32 on a transient FP32 copy of the weight: at hundreds of
    rows that is twice as fast as bfloat16 on CPUs without bfloat16 tiles, and never less exact.
    The result stays FP32, so that a prefill step converts weights and nothing else.
    """
    if not upcast:
        return F.linear(x.to(weight.dtype), weight, bias)
    bias32 = None if bias is None else bias.float()
    return F.linear(x.float(), weight.float(), bias32)
