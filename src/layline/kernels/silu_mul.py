"""SwiGLU's elementwise part on a merged gate-up projection (https://arxiv.org/abs/2002.05202)."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` for ``gate_up`` [tokens, 2 x intermediate]; [tokens, intermediate]."""
    size = gate_up.shape[1] // 2
    return F.silu(gate_up[:, :size]).mul_(gate_up[:, size:])
