"""A decoder's work on each token's row by itself, in native code where the rows are FP32.

Shape suffixes: T tokens, H hidden, N heads, D head size.
"""

from __future__ import annotations

import torch

from layline.kernels import rope, silu_mul
from layline.kernels.native.library import LANES, NativeLibrary


class RowKernels:
    """The row functions of :mod:`layline.kernels`, and the library that computes them here.

    A row's result depends on itself alone, to the bit. Rows that the library does not take, of
    another dtype or size, are computed by torch as without it.
    """

    __slots__ = ("_library",)

    def __init__(self, library: NativeLibrary) -> None:
        self._library = library

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See :func:`layline.kernels.silu_mul.silu_mul`."""
        tokens, columns = gate_up.shape
        size = columns // 2
        if not _fits(gate_up, size) or not gate_up.is_contiguous():
            return silu_mul.silu_mul(gate_up)
        out = torch.empty(tokens, size)
        library = self._library
        library.silu_mul(
            gate_up.data_ptr(),
            out.data_ptr(),
            tokens,
            size,
            torch.get_num_threads(),
            library.pool,
        )
        return out

    def add_rms_norm(
        self,
        output_TH: torch.Tensor,
        residual_TH: torch.Tensor,
        weight_H: torch.Tensor,
        floor: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :func:`layline.kernels.add_norm.add_rms_norm`; FP32 contiguous rows that fit."""
        tokens, size = output_TH.shape
        normed_TH, sum_TH = torch.empty(2, tokens, size).unbind(0)
        library = self._library
        library.add_norm(
            residual_TH.data_ptr(),
            output_TH.data_ptr(),
            weight_H.data_ptr(),
            floor,
            normed_TH.data_ptr(),
            sum_TH.data_ptr(),
            tokens,
            size,
            torch.get_num_threads(),
            library.pool,
        )
        return normed_TH, sum_TH

    def rotate_heads_(
        self, heads_TND: torch.Tensor, cos_T1D: torch.Tensor, sin_T1D: torch.Tensor
    ) -> torch.Tensor:
        """See :func:`layline.kernels.rope.rotate_heads_`."""
        tokens, heads, size = heads_TND.shape
        strides, table = heads_TND.stride(), cos_T1D.stride()
        fits = _fits(heads_TND, size // 2) and strides[1:] == (size, 1)
        if not (fits and cos_T1D.dtype is torch.float32 and table == sin_T1D.stride()):
            return rope.rotate_heads_(heads_TND, cos_T1D, sin_T1D)
        library = self._library
        library.rotate(
            heads_TND.data_ptr(),
            cos_T1D.data_ptr(),
            sin_T1D.data_ptr(),
            tokens,
            heads,
            size,
            strides[0],
            table[0],
            torch.get_num_threads(),
            library.pool,
        )
        return heads_TND


def takes_norm(output_TH: torch.Tensor, residual_TH: torch.Tensor) -> bool:
    """True for rows that :meth:`RowKernels.add_rms_norm` takes."""
    return (
        _fits(output_TH, output_TH.shape[1])
        and residual_TH.dtype is torch.float32
        and output_TH.is_contiguous()
        and residual_TH.is_contiguous()
    )


def _fits(rows: torch.Tensor, size: int) -> bool:
    return rows.dtype is torch.float32 and size % LANES == 0
