"""What one forward pass carries from layer to layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from layline.boundary.adapters.attention import AttnTpContext
from layline.boundary.layout import BatchVariant
from layline.boundary.residual.stream import ResidualStream
from layline.boundary.rows import ORDINARY, BatchKind, RankRows
from layline.layers.spans import StepPhase


class AttentionPlan:
    """A backend's prepared view of one step, made once and used by every layer; see attention."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class ContextRows:
    """How attention joins the keys and values of the context-parallel ranks of a prompt.

    Each rank pads its rows to ``width``, the most that any of them has; ``order`` [tokens of all
    ranks] int64 picks from the joined rows, rank after rank, in the order of ``slots``.
    """

    width: int
    order: torch.Tensor


@dataclass(slots=True)
class ForwardBatch:
    """Facts and state of one step; every tensor is on the model's device.

    ``rope_cos``/``rope_sin`` are [tokens, 1, head_dim] in the dtype of the heads; ``slots``
    [tokens] names the cache row each token's key and value go to, as a slice where the rows are
    consecutive. ``ffn_phase`` is that of compute on rows of several ranks, None where it is
    ``phase``; ``rows`` are the step's row counts on a mesh. In a context-parallel batch ``slots``
    are those of every CP rank's tokens, and ``context_parallel`` says how to join them.
    """

    phase: StepPhase
    rope_cos: torch.Tensor
    rope_sin: torch.Tensor
    slots: torch.Tensor | slice
    attention: AttentionPlan
    kind: BatchKind = ORDINARY
    rows: RankRows | None = None
    ffn_phase: StepPhase | None = None
    context_parallel: ContextRows | None = None
    residual_stream: ResidualStream | None = None
    attn_tp_context: AttnTpContext | None = None

    @property
    def variant(self) -> BatchVariant:
        """Which kind of batch this is."""
        return self.kind.variant
