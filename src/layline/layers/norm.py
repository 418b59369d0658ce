"""RMS norm (https://arxiv.org/abs/1910.07467)."""

from __future__ import annotations

import torch

from layline.kernels.add_norm import add_rms_norm, rms_norm


class RMSNorm:
    """Normalise the last dim by its root mean square; computes in FP32, returns ``weight``'s dtype.

    ``weight`` is [hidden]; a FP32 copy is kept.
    """

    __slots__ = ("_dtype", "_eps", "weight")

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self._dtype = weight.dtype
        self.weight = weight.float()
        self._eps = torch.tensor(eps, dtype=torch.float32, device=weight.device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] in any float dtype to the same shape."""
        return rms_norm(x, self.weight, self._eps, self._dtype)

    def add_norm(
        self, output: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``(norm(residual + output), residual + output)``; the norm reads the unrounded sum.

        The residual keeps its own dtype, which may be wider than the output's.
        """
        return add_rms_norm(output, residual, self.weight, self._eps)
