"""Packed matrices that the native library multiplies with, in decode and in prefill.

Shape suffixes: T tokens, K in features, N out features, G groups of 32 along K.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import ClassVar

import torch

from layline.kernels.native.library import Matrix, NativeLibrary

GROUP = 32
TILE = 16
# Bits of a format, as in packed.h.
FOUR, EIGHT, HALF = 0, 1, 2
Allocate = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]


class NativeWeight:
    """A matrix [N, K] of 4-bit or 8-bit values with a scale, and a minimum, for each 32 of K.

    ``tiles`` is uint8 [ceil(N / 16), G, bytes]. Activations are rounded to 16-bit integers by
    groups of 32; the products of a group are exact, and FP32 sums them over the groups. A token's
    results depend on its own activations alone, to the bit. A group of activations that holds an
    infinity or a NaN makes all results of its token NaN; one below 2**-100 counts as zeros.
    """

    __slots__ = ("_address", "_library", "_matrix", "columns", "rows", "tiles")

    serves_prefill: ClassVar[bool] = True

    def __init__(
        self, library: NativeLibrary, shape: tuple[int, int], layout: int, allocate: Allocate
    ) -> None:
        self.rows, self.columns = shape
        if self.rows < 1 or self.columns < GROUP or self.columns % GROUP:
            raise ValueError(f"a packed matrix has rows of a multiple of {GROUP}, not {shape}")
        groups = self.columns // GROUP
        tiles = -(-self.rows // TILE)
        self.tiles = allocate((tiles, groups, group_bytes(layout)), torch.uint8)
        assert self.tiles.is_contiguous()
        self._library = library
        self._matrix = Matrix(self.tiles.data_ptr(), self.rows, groups, layout)
        self._address = ctypes.addressof(self._matrix)

    def fill(
        self,
        first: int,
        values_RK: torch.Tensor,
        scale_RG: torch.Tensor,
        minimum_RG: torch.Tensor | None = None,
    ) -> None:
        """Set rows from ``first`` on, a multiple of 16: all of them, or a multiple of 16.

        ``values_RK`` is uint8 (0 to 15) or int8, the others are of any float dtype.
        """
        layout = self._matrix.format
        count, groups = values_RK.shape[0], self._matrix.groups
        factor = torch.float16 if layout & HALF else torch.float32
        parts = [values_RK.contiguous(), scale_RG.to(factor).contiguous()]
        if minimum_RG is not None:
            parts.append(minimum_RG.to(factor).contiguous())
        shapes = [(count, self.columns), *[(count, groups)] * (1 if layout & EIGHT else 2)]
        value = torch.int8 if layout & EIGHT else torch.uint8
        if [tuple(part.shape) for part in parts] != shapes or values_RK.dtype is not value:
            raise ValueError(f"parts do not fit a packed matrix of {self.rows} x {self.columns}")
        if first % TILE or first < 0 or not 0 < count <= self.rows - first:
            raise ValueError(f"{count} rows from {first} on do not fit {self.rows} rows")
        if count % TILE and first + count != self.rows:
            raise ValueError(f"{count} rows end within a tile")
        part = Matrix(None, count, groups, layout)
        pointers = [tensor.data_ptr() for tensor in parts] + [None] * (3 - len(parts))
        into = self.tiles[first // TILE].data_ptr()
        self._library.pack(ctypes.addressof(part), into, *pointers)

    def matmul(self, x_TK: torch.Tensor) -> torch.Tensor:
        """``x @ weight.T`` for floating ``x_TK`` on the CPU; FP32 [tokens, N]."""
        dtype = x_TK.dtype
        if dtype is not torch.float32 and dtype is not torch.bfloat16:
            x_TK, dtype = x_TK.float(), torch.float32
        if not x_TK.is_contiguous():
            x_TK = x_TK.contiguous()
        tokens, columns = x_TK.shape
        if columns != self.columns or x_TK.device.type != "cpu":
            raise ValueError(
                f"activations {tuple(x_TK.shape)} on {x_TK.device} do not fit a packed matrix of "
                f"{self.rows} x {self.columns} on the CPU"
            )
        out = torch.empty(tokens, self.rows, dtype=torch.float32)
        library = self._library
        failed = tokens and library.matmul(
            self._address,
            x_TK.data_ptr(),
            out.data_ptr(),
            tokens,
            dtype is torch.bfloat16,
            torch.get_num_threads(),
            library.pool,
        )
        if failed:
            raise MemoryError("no memory for the rounded activations of a matmul")
        return out

    @property
    def num_bytes(self) -> int:
        """Memory of the tiles."""
        return self.tiles.nbytes


def group_bytes(layout: int) -> int:
    """Bytes of one group of one tile, as in packed.h."""
    factor = TILE * (2 if layout & HALF else 4)
    return TILE * GROUP + factor if layout & EIGHT else TILE * GROUP // 2 + 2 * factor
