"""Rotate query and key heads by their positions (half-split order), in place.

Shape suffixes: T tokens, N heads, D head size. RoPE: https://arxiv.org/abs/2104.09864.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Rotation = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""See :func:`rotate_heads_`."""


def rotate_heads_(
    heads_TND: torch.Tensor, cos_T1D: torch.Tensor, sin_T1D: torch.Tensor
) -> torch.Tensor:
    """Rotate ``heads_TND`` in place and return it.

    ``sin_T1D`` carries a minus sign in its first half, so that the rotation is one product with the
    heads and one with their swapped halves.
    """
    tokens, heads, size = heads_TND.shape
    swapped = heads_TND.view(tokens, heads, 2, size // 2).flip(-2).view(tokens, heads, size)
    return torch.addcmul(heads_TND * cos_T1D, swapped, sin_T1D, out=heads_TND)
