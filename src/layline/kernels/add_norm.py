"""RMS norm, alone and fused with the residual add.

Shape suffixes: T tokens, H hidden. Sums of squares and the residual sum are kept in FP32; the
normalised value is made from the unrounded sum, as a fused kernel would. The weight comes scaled by
sqrt(H), and epsilon as sqrt(H eps): :func:`prepare_norm` makes both, FP32.
"""

from __future__ import annotations

import torch


def prepare_norm(weight_H: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The two constants the norms take for a layer's ``weight_H`` and ``eps``."""
    size = weight_H.shape[0]
    floor = torch.tensor((size * eps) ** 0.5, dtype=torch.float32, device=weight_H.device)
    return weight_H.float() * size**0.5, floor


def rms_norm(
    x_TH: torch.Tensor, weight_H: torch.Tensor, floor_1: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """``x / rms(x) * weight`` over the last dim, in ``dtype``; constants from prepare_norm."""
    return _normalise(x_TH.float(), weight_H, floor_1).to(dtype)


def add_rms_norm(
    output_TH: torch.Tensor,
    residual_TH: torch.Tensor,
    weight_H: torch.Tensor,
    floor_1: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(rms_norm(residual + output), residual + output)``, in output's and residual's dtype.

    Neither input is changed.
    """
    if residual_TH.dtype is torch.float32:
        sum_TH = residual_TH + output_TH
        return _normalise(sum_TH, weight_H, floor_1).to(output_TH.dtype), sum_TH
    sum_TH = residual_TH.float().add_(output_TH)
    normed_TH = _normalise(sum_TH, weight_H, floor_1).to(output_TH.dtype)
    return normed_TH, sum_TH.to(residual_TH.dtype)


def _normalise(x32: torch.Tensor, weight_H: torch.Tensor, floor_1: torch.Tensor) -> torch.Tensor:
    # Six small kernels, not ten: x / sqrt(mean(x^2) + eps) = x sqrt(H) / hypot(|x|, sqrt(H eps)).
    length = torch.linalg.vector_norm(x32, dim=-1, keepdim=True)
    return torch.mul(x32, weight_H).div_(torch.hypot(length, floor_1))
