"""From a file's quantised matrices to packed ones, keeping what the file says wherever it fits.

Shape suffixes: K in features, N out features, R some of the rows, G groups of 32 along K.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from layline.kernels.native.library import NativeLibrary
from layline.kernels.native.weight import EIGHT, FOUR, GROUP, HALF, Allocate, NativeWeight
from layline.weights.quantized import FOUR_BIT, QuantizedTensor

CHUNK_ROWS = 4096  # Expanded at a time, so that temporaries stay small; a multiple of 16.
Parts = tuple[torch.Tensor, ...]


def pack_native(
    library: NativeLibrary, matrices: Sequence[QuantizedTensor], allocate: Allocate
) -> NativeWeight:
    """Stack ``matrices`` [*, K] by rows and pack them.

    4-bit blocks and Q8_0 keep every value, scale and minimum. The rest, and a stack of both kinds,
    become int8 with a scale for each 32 values.
    """
    shape = (sum(matrix.shape[0] for matrix in matrices), matrices[0].shape[1])
    if all(matrix.encoding in FOUR_BIT for matrix in matrices):
        nibbles, *factors = _stacked([matrix.q4_parts() for matrix in matrices])
        exact = all(torch.equal(part.half().float(), part) for part in factors)
        weight = NativeWeight(library, shape, FOUR | (HALF if exact else 0), allocate)
        weight.fill(0, nibbles, *factors)
        return weight
    exact = all(matrix.encoding == "Q8_0" for matrix in matrices)
    weight = NativeWeight(library, shape, EIGHT | (HALF if exact else 0), allocate)
    if len(matrices) == 1:
        for first in range(0, shape[0], CHUNK_ROWS):
            weight.fill(first, *_eight_bit(matrices[0].rows(slice(first, first + CHUNK_ROWS))))
    else:
        # Tiles of 16 rows may span two matrices.
        weight.fill(0, *_stacked([_eight_bit(matrix) for matrix in matrices]))
    return weight


def quantise_groups(weight_NK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round each group of 32 to int8; the values [N, K] and FP32 scales [N, G]."""
    groups_NGx = weight_NK.float().reshape(weight_NK.shape[0], -1, GROUP)
    scale_NG = groups_NGx.abs().amax(dim=-1) / 127.0
    divisor = scale_NG.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(-1)
    values = (groups_NGx / divisor).round_().clamp_(-127, 127).to(torch.int8)
    return values.flatten(1), scale_NG


def _eight_bit(matrix: QuantizedTensor) -> Parts:
    if matrix.encoding == "Q8_0":
        return matrix.q8_parts()
    return quantise_groups(matrix.dequantize(torch.float32))


def _stacked(parts: Sequence[Parts]) -> list[torch.Tensor]:
    return [torch.cat(column) for column in zip(*parts, strict=True)]
