"""RMS norm, alone and fused with the residual add.

Shape suffixes: T tokens, H hidden. Sums of squares and the residual sum are kept in FP32; the
normalised value is made from the unrounded sum, as a fused kernel would.
"""

from __future__ import annotations

import torch


def rms_norm(
    x_TH: torch.Tensor, weight_H: torch.Tensor, eps_1: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """``x / rms(x) * weight`` over the last dim, in ``dtype``. ``weight_H``, ``eps_1`` are FP32."""
    return _normalise(x_TH.float(), weight_H, eps_1).to(dtype)


def add_rms_norm(
    output_TH: torch.Tensor,
    residual_TH: torch.Tensor,
    weight_H: torch.Tensor,
    eps_1: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(rms_norm(residual + output), residual + output)``, in output's and residual's dtype.

    Neither input is changed.
    """
    if residual_TH.dtype is torch.float32:
        sum_TH = residual_TH + output_TH
        return _normalise(sum_TH, weight_H, eps_1).to(output_TH.dtype), sum_TH
    sum_TH = residual_TH.float().add_(output_TH)
    normed_TH = _normalise(sum_TH, weight_H, eps_1).to(output_TH.dtype)
    return normed_TH, sum_TH.to(residual_TH.dtype)


def _normalise(x32: torch.Tensor, weight_H: torch.Tensor, eps_1: torch.Tensor) -> torch.Tensor:
    # The 2-norm is one kernel where a mean of squares is two; addcmul folds 1/H and eps.
    length = torch.linalg.vector_norm(x32, dim=-1, keepdim=True)
    scale = torch.addcmul(eps_1, length, length, value=1.0 / x32.shape[-1]).rsqrt_()
    return torch.mul(x32, scale).mul_(weight_H)
