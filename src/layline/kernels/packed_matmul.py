"""Matmuls with quantised weights on the CPU: packed int4 in groups, and int8 by row.

Shape suffixes: T tokens, K in features, N out features, G groups along K.

int4: torch's ``_weight_int4pack_mm_for_cpu`` computes ``(q - 8) * scale + zero`` with bfloat16
scale and zero for each group of 32, so GGUF blocks with a 4-bit value, a scale and a minimum keep
their 4-bit values; only scale and zero are rounded to bfloat16.
int8: torch's ``_weight_int8pack_mm`` has one bfloat16 scale a row; weights are rounded to 8 bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

GROUP = 32
ROW_ALIGNMENT = 16  # Rows of a packed int4 weight come in tiles of 16.


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """Packed int4 matrix [N, K]: tiles, and bfloat16 scale and zero [G, N, 2]."""

    tiles: torch.Tensor
    scales_and_zeros: torch.Tensor

    def matmul(self, x_TK: torch.Tensor) -> torch.Tensor:
        """``x @ weight.T`` for bfloat16 ``x_TK``; [tokens, N]."""
        out: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            x_TK, self.tiles, GROUP, self.scales_and_zeros
        )
        return out

    @property
    def num_bytes(self) -> int:
        """Memory of the packed copy."""
        return self.tiles.nbytes + self.scales_and_zeros.nbytes


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """Int8 matrix [N, K] with one bfloat16 scale a row."""

    values: torch.Tensor
    scales: torch.Tensor

    def matmul(self, x_TK: torch.Tensor) -> torch.Tensor:
        """``x @ weight.T`` for bfloat16 ``x_TK``; [tokens, N]."""
        return torch._weight_int8pack_mm(x_TK, self.values, self.scales)

    @property
    def num_bytes(self) -> int:
        """Memory of the packed copy."""
        return self.values.nbytes + self.scales.nbytes


def pack_int4(
    nibbles_NK: torch.Tensor, scale_NG: torch.Tensor, minimum_NG: torch.Tensor
) -> Int4Weight:
    """Pack ``nibble * scale + minimum`` (nibbles uint8 0..15, groups of 32 along K)."""
    tiles = torch.ops.aten._convert_weight_to_int4pack_for_cpu(nibbles_NK.to(torch.int32), 1)
    scale = scale_NG.float()
    zero = minimum_NG.float() + scale * 8
    pairs = torch.stack((scale, zero), dim=-1).transpose(0, 1)
    return Int4Weight(tiles, pairs.to(torch.bfloat16).contiguous())


def quantise_rows(weight_NK: torch.Tensor, out_NK: torch.Tensor) -> torch.Tensor:
    """Round each row to int8 into ``out_NK``; returns the bfloat16 scales [N].

    The scale is rounded to bfloat16 first, so that the 8-bit values make up for its rounding.
    """
    weight = weight_NK.float()
    scales = (weight.abs().amax(dim=1) / 127.0).to(torch.bfloat16)
    divisor = scales.float()
    # A scale rounded down may need 128 steps for the largest weight; widen it by one bf16 step.
    short = weight.abs().amax(dim=1) > divisor * 127.49
    scales = torch.where(short, (divisor * (1 + 2**-7)).to(torch.bfloat16), scales)
    divisor = scales.float().clamp_min_(torch.finfo(torch.float32).tiny)
    out_NK.copy_((weight / divisor[:, None]).round_().clamp_(-127, 127))
    return scales
