"""SwiGLU's elementwise part on a merged gate-up projection (https://arxiv.org/abs/2002.05202)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

UNDIVIDED = 32767
"""Most values of an elementwise operation that torch leaves to one thread, on the CPU."""


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` for ``gate_up`` [tokens, 2 x intermediate]; [tokens, intermediate]."""
    size = gate_up.shape[1] // 2
    return F.silu(gate_up[:, :size]).mul_(gate_up[:, size:])


def undivided_silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """:func:`silu_mul` whose every row is computed alike, whatever the number of rows.

    Torch divides many values among threads, within a row too, and computes those at the edge of a
    vector by another formula: other last bits, by the number of rows and threads.
    """
    pieces = torch.split(gate_up, max(1, 2 * UNDIVIDED // gate_up.shape[1]))
    return silu_mul(gate_up) if len(pieces) == 1 else torch.cat([silu_mul(rows) for rows in pieces])
