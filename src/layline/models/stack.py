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


@dataclass(frozen=True)
class LayerRange:
    """Layers ``start`` .. ``stop - 1`` of a stack of ``total``: what one pipeline stage runs.

    The first stage has the embedding as well, the last the final norm and the head.
    Raises ValueError for a range without layers or outside the stack.
    """

    start: int
    stop: int
    total: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop <= self.total:
            raise ValueError(
                f"layers {self.start} to {self.stop} of {self.total} are no pipeline stage; "
                "expected at least one layer inside the stack"
            )

    @classmethod
    def whole(cls, total: int) -> LayerRange:
        """All layers: a pipeline of one stage."""
        return cls(0, total, total)

    @property
    def is_first(self) -> bool:
        """True where the embedding is."""
        return self.start == 0

    @property
    def is_last(self) -> bool:
        """True where the final norm and the head are."""
        return self.stop == self.total

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.stop))

    def __len__(self) -> int:
        return self.stop - self.start


def dense_stack(config: DecoderConfig) -> Iterator[LayerStages]:
    """Attention, then FFN, in every layer; the first enters the stack, the last ends it."""
    for layer_id in range(config.num_layers):
        yield LayerStages(
            attn=declare_attn(),
            ffn=declare_ffn(),
            previous=declare_ffn() if layer_id != 0 else None,
            terminal=layer_id == config.num_layers - 1,
        )
