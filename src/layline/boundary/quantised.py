"""Rows as 8-bit integers: a compute input in that format, and a sum whose rows travel so.

The sum is for prefill only, where bytes are what it costs. Every rank rounds its rows to int8 with
one FP32 scale a row and sends all of them to every other rank, which adds them up in FP32: (n - 1)
rows of hidden + 4 bytes each, where a ring all-reduce of bfloat16 sends 2 (n - 1) / n rows of
2 x hidden bytes. That is less for up to three ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from layline.comm.groups import Group

SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class QuantisedRows:
    """Rows rounded to int8, each with one FP32 scale: ``packed`` is what :func:`pack_rows` gives.

    Linear layers take it in place of a tensor.
    """

    packed: torch.Tensor

    @classmethod
    def of(cls, x_TH: torch.Tensor) -> QuantisedRows:
        """Round ``x_TH`` [tokens, hidden]: each value to 1/254 of its row's largest magnitude."""
        return cls(pack_rows(x_TH))

    @property
    def shape(self) -> torch.Size:
        """[tokens, hidden]."""
        return torch.Size((self.packed.shape[0], self.packed.shape[1] - SCALE_BYTES))

    def dequantised(self) -> torch.Tensor:
        """FP32 [tokens, hidden]."""
        return unpack_rows(self.packed)


def quantised_all_reduce(x_TH: torch.Tensor, group: Group) -> torch.Tensor:
    """The sum over ``group`` of ``x_TH`` [tokens, hidden], in its dtype.

    Each rank's part is off by at most 1/254 of its row's largest magnitude.
    """
    if x_TH.shape[0] == 0:
        return x_TH
    gathered: torch.Tensor = group.all_gather(pack_rows(x_TH))
    parts = unpack_rows(gathered).view(group.size, *x_TH.shape)
    return parts.sum(dim=0).to(x_TH.dtype)


def pack_rows(x_TH: torch.Tensor) -> torch.Tensor:
    """Int8 values, then the FP32 scale's bytes: uint8 [tokens, hidden + 4]."""
    x32 = x_TH.float()
    scale_T1 = x32.abs().amax(dim=1, keepdim=True).clamp_min_(1e-30) / 127.0
    values = torch.round(x32 / scale_T1).to(torch.int8)
    return torch.cat((values.view(torch.uint8), scale_T1.view(torch.uint8)), dim=1)


def unpack_rows(packed: torch.Tensor) -> torch.Tensor:
    """What :func:`pack_rows` packed, FP32 [tokens, hidden]."""
    values = packed[:, :-SCALE_BYTES].contiguous().view(torch.int8)
    scale_T1 = packed[:, -SCALE_BYTES:].contiguous().view(torch.float32)
    return values.float() * scale_T1
