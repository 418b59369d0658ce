"""A layer's boundaries on one rank, and batches that have got part of the way through it."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch

from layline.boundary import declare_attn, declare_ffn, make_stages
from layline.boundary.ops import Transit
from layline.boundary.residual import batch
from layline.boundary.residual.add_norm import PlainUpdate
from layline.boundary.residual.stream import Contribution, OwedWork, ResidualStream
from layline.boundary.rows import ORDINARY, BatchKind, RankRows
from layline.layers.norm import RMSNorm

HIDDEN = 8


class Doubling(PlainUpdate):
    """A nonlinear-looking update: residual + 2 x output, applied once."""

    def apply(self, output: Any, residual: Any) -> Any:
        return residual + 2 * output


def forward_batch(kind: BatchKind = ORDINARY, rows: RankRows | None = None) -> Any:
    """What a boundary needs of a batch."""
    return types.SimpleNamespace(residual_stream=None, kind=kind, rows=rows)


def rows(seed: int, count: int = 3) -> torch.Tensor:
    """Random rows, the same for the same seed: [count, HIDDEN]."""
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(seed))


def norm(seed: int = 99) -> RMSNorm:
    """A norm with random weights."""
    return RMSNorm(rows(seed, 1)[0], 1e-5)


def layer(previous: bool = False, **changes: Any) -> Any:
    """An attention's and an FFN's boundary."""
    return make_stages(
        (declare_attn(**changes), norm(1)),
        (declare_ffn(**changes), norm(2)),
        previous=declare_ffn(**changes) if previous else None,
    )


def entered(value: torch.Tensor) -> tuple[Any, Any, torch.Tensor]:
    """A batch whose attention has left ``value`` pending on residual rows(0)."""
    attn, _ = layer()
    fb = forward_batch()
    batch.start(fb)
    attn.prepare(rows(0), fb)
    return fb, attn, attn.finish(value, fb)


def owing(
    value: torch.Tensor, complete: Callable[[torch.Tensor], torch.Tensor], **facts: Any
) -> tuple[Any, Any]:
    """A batch on residual rows(0) whose pending ``value`` still needs ``complete``; its handle."""
    fb = forward_batch()
    batch.start(fb)
    stream: ResidualStream = fb.residual_stream
    stream.residual = rows(0, value.shape[0])
    update = facts.pop("update", PlainUpdate())

    def step(transit: Transit) -> None:
        transit.value = complete(transit.value)

    owed = OwedWork("a sum", (step,), **facts)
    return fb, stream.leave(Contribution(value, update, owed))
