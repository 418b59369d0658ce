"""The dense decoder's stages, declared once for the model and for the planner. No torch here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from layline.boundary.contracts import StageDeclaration
from layline.boundary.factories import declare_attn, declare_ffn
from layline.models.config import DecoderConfig


@dataclass(frozen=True, kw_only=True)
class LayerStages:
    """One decoder layer's declarations and its neighbours, as make_stages takes them."""

    attn: StageDeclaration
    ffn: StageDeclaration
    previous: StageDeclaration | None
    terminal: bool


def dense_stack(config: DecoderConfig) -> Iterator[LayerStages]:
    """Attention, then FFN, in every layer; the first enters the stack, the last ends it."""
    for layer_id in range(config.num_layers):
        yield LayerStages(
            attn=declare_attn(),
            ffn=declare_ffn(),
            previous=declare_ffn() if layer_id != 0 else None,
            terminal=layer_id == config.num_layers - 1,
        )
