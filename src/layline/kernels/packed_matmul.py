"""Matmuls with quantised weights on the CPU: packed int4 in groups, and int8 by row.

Shape suffixes: T tokens, K in features, N out features, G groups along K.

int4: torch's ``_weight_int4pack_mm_for_cpu`` computes ``(q - 8) * scale + zero`` with bfloat16
scale and zero for each group of 32, so GGUF blocks with a 4-bit value, a scale and a minimum keep
their 4-bit values; only scale and zero are rounded to bfloat16.
int8: weights are rounded to 8 bits with one scale a row. Each activation becomes a 16-bit integer,
scaled by its row's largest, and its high and low byte multiply as two 8-bit rows of one integer
product (oneDNN's VNNI kernel): the weight is read once, and the activation keeps more bits than
bfloat16 has. CPUs without VNNI, whose 8-bit products may saturate, use torch's
``_weight_int8pack_mm``, which multiplies in floating point.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar

import torch

GROUP = 32
ROW_ALIGNMENT = 16  # Rows of a packed int4 weight come in tiles of 16.
BYTE_ZERO = 128
LARGEST_SPLIT = 32512  # 127 * 256: the largest magnitude whose rounded high byte fits.


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """Packed int4 matrix [N, K]: tiles, and bfloat16 scale and zero [G, N, 2]."""

    serves_prefill: ClassVar[bool] = False

    tiles: torch.Tensor
    scales_and_zeros: torch.Tensor

    def matmul(self, x_TK: torch.Tensor) -> torch.Tensor:
        """``x @ weight.T``, computed from bfloat16 ``x_TK``; bfloat16 [tokens, N]."""
        out: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            x_TK.to(torch.bfloat16), self.tiles, GROUP, self.scales_and_zeros
        )
        return out

    @property
    def num_bytes(self) -> int:
        """Memory of the packed copy."""
        return self.tiles.nbytes + self.scales_and_zeros.nbytes


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """Int8 matrix [N, K] with one scale a row, for CPUs without 8-bit integer products."""

    serves_prefill: ClassVar[bool] = False

    values: torch.Tensor
    scales: torch.Tensor

    def matmul(self, x_TK: torch.Tensor) -> torch.Tensor:
        """``x @ weight.T``, computed from bfloat16 ``x_TK``; bfloat16 [tokens, N]."""
        return torch._weight_int8pack_mm(x_TK.to(torch.bfloat16), self.values, self.scales)

    @property
    def num_bytes(self) -> int:
        """Memory of the packed copy."""
        return self.values.nbytes + self.scales.nbytes


@dataclass(frozen=True, slots=True)
class VnniWeight:
    """Int8 matrix [N, K] in oneDNN's own layout, FP32 scale and zero point of each row."""

    serves_prefill: ClassVar[bool] = False

    packed: torch.Tensor
    scales: torch.Tensor
    zero_points: torch.Tensor

    def matmul(self, x_TK: torch.Tensor) -> torch.Tensor:
        """``x @ weight.T`` for floating ``x_TK``; FP32 [tokens, N]."""
        tokens = x_TK.shape[0]
        bytes_2TK, scale_T1 = split_bytes(x_TK)
        products: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
            bytes_2TK, 1.0, BYTE_ZERO, self.packed, self.scales, self.zero_points,
            None, 1.0, 0, torch.float32, "none", [], "",
        )  # fmt: skip
        high, low = products[:tokens], products[tokens:]
        return low.add_(high, alpha=256).mul_(scale_T1)

    @property
    def num_bytes(self) -> int:
        """Memory of the packed copy."""
        return self.packed.numel() + self.scales.nbytes + self.zero_points.nbytes


def split_bytes(x_TK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """High bytes, then low bytes of each row as 16-bit integers, uint8 [2T, K] around 128.

    With ``scale`` FP32 [T, 1]: ``x = (256 * (high - 128) + (low - 128)) * scale``, rounded to
    1/32512 of the row's largest magnitude.
    """
    x32 = x_TK.float()
    largest = torch.linalg.vector_norm(x32, ord=float("inf"), dim=-1, keepdim=True)
    scale = largest.clamp_min_(1e-30).mul_(1.0 / LARGEST_SPLIT)
    # Adding 32896 = 128 * 257 centres both bytes on 128; the half rounds, as conversion truncates.
    whole = torch.div(x32, scale).add_(128 * 257 + 0.5).to(torch.int32)
    planes = whole.view(torch.uint8).view(*x_TK.shape, 4)[..., :2]
    return planes.permute(2, 0, 1).flip(0).reshape(-1, x_TK.shape[1]), scale


@functools.cache
def has_vnni() -> bool:
    """True where oneDNN multiplies 8-bit integers exactly and torch offers its kernel."""
    supported = getattr(torch.cpu, "_is_vnni_supported", None)
    return supported is not None and supported() and hasattr(torch.ops.onednn, "qlinear_prepack")


def pack_int8(values_NK: torch.Tensor, scales_N: torch.Tensor) -> VnniWeight | Int8Weight:
    """Choose this CPU's kernel for int8 ``values_NK`` with a bfloat16 scale a row."""
    if not has_vnni():
        return Int8Weight(values_NK, scales_N)
    shape = [16, values_NK.shape[1]]  # A hint of the usual number of rows; others work too.
    packed = torch.ops.onednn.qlinear_prepack(values_NK, shape)
    zeros = torch.zeros(values_NK.shape[0], dtype=torch.int32)
    return VnniWeight(packed, scales_N.float(), zeros)


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
