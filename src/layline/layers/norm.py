"""RMS norm (https://arxiv.org/abs/1910.07467)."""

from __future__ import annotations

import torch

from layline.kernels.add_norm import add_rms_norm, prepare_norm, rms_norm
from layline.kernels.native.rows import RowKernels, takes_norm


class RMSNorm:
    """Normalise the last dim by its root mean square; computes in FP32, returns ``weight``'s dtype.

    ``weight`` is [hidden]; what is kept of it is FP32.
    """

    __slots__ = ("_dtype", "_floor", "_floor_value", "_kernels", "_weight")

    def __init__(self, weight: torch.Tensor, eps: float, kernels: RowKernels | None = None) -> None:
        """``kernels`` compute what they take; torch the rest."""
        self._dtype = weight.dtype
        self._weight, self._floor = prepare_norm(weight, eps)
        self._kernels = kernels
        self._floor_value = 0.0 if kernels is None else float(self._floor)

    @property
    def constants(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What prepare_norm made of the weight and epsilon."""
        return self._weight, self._floor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] in any float dtype to the same shape."""
        return rms_norm(x, self._weight, self._floor, self._dtype)

    def add_norm(
        self, output: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``(norm(residual + output), residual + output)``; the norm reads the unrounded sum.

        The residual keeps its own dtype, which may be wider than the output's.
        """
        if self._kernels is not None and takes_norm(output, residual):
            return self._kernels.add_rms_norm(output, residual, self._weight, self._floor_value)
        return add_rms_norm(output, residual, self._weight, self._floor)
