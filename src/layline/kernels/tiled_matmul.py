"""``x @ weight.T + bias`` whose rows do not depend on each other's number. Shapes: T tokens, K in
features, N out features.

A matrix product picks its kernel, blocking and order of sums by the number of rows: one row of a
batch may come out with other last bits than the same row alone. Here rows are multiplied in tiles
of a fixed number, the last filled up with zeros, so every call has one shape. That a row has the
same bits at every place of a tile is a property of the library that is called; where it matters,
:class:`layline.layers.invariance.RowClaims` checks it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

TILE = 16
"""Rows multiplied at a time; more would cost a single row more, fewer would cost a prompt more."""


def tiled_matmul(
    x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None
) -> torch.Tensor:
    """[tokens, out features] in the weight's dtype."""
    rows = x_TK.shape[0]
    if rows == 0:
        return weight_NK.new_empty(0, weight_NK.shape[0])
    padded = weight_NK.new_zeros(-(-rows // TILE) * TILE, x_TK.shape[1])
    padded[:rows] = x_TK
    tiles = [F.linear(tile, weight_NK, bias_N) for tile in torch.split(padded, TILE)]
    return (tiles[0] if len(tiles) == 1 else torch.cat(tiles))[:rows]
