"""What one forward pass carries from layer to layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from layline.boundary.layout import BatchVariant
from layline.layers.spans import Phase

if TYPE_CHECKING:
    from layline.layers.attention import AttentionPlan


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
    residual_stream: Any = None
