"""What one forward pass carries from layer to layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from layline.boundary.layout import BatchVariant
from layline.boundary.residual.stream import ResidualStream
from layline.layers.spans import Phase


class AttentionPlan:
    """A backend's prepared view of one step, made once and used by every layer; see attention."""

    __slots__ = ()


@dataclass(slots=True)
class ForwardBatch:
    """Facts and state of one step; every tensor is on the model's device.

    ``rope_cos``/``rope_sin`` are [tokens, 1, head_dim] in the dtype of the heads; ``slots``
    [tokens] names the cache row each token's key and value go to, as a slice where the rows are
    consecutive.
    """

    phase: Phase
    rope_cos: torch.Tensor
    rope_sin: torch.Tensor
    slots: torch.Tensor | slice
    attention: AttentionPlan
    variant: BatchVariant = BatchVariant.ORDINARY
    residual_stream: ResidualStream | None = None
