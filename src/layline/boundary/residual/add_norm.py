"""The plain residual: add the output, normalise the sum.

``update_and_read`` hands both steps to the norm's fused ``add_norm``, which keeps the sum in FP32
for the norm instead of normalising a rounded residual.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from layline.boundary.residual import LayerResidual, StageUpdate


@dataclass(frozen=True)
class PlainUpdate:
    """``residual + output``, applied by whoever consumes the output next."""

    plain: bool = True
    at_producer: bool = False
    outlives_producer: bool = True

    def apply(self, output: Any, residual: Any) -> Any:
        """The sum in the run's dtype, [tokens, hidden]."""
        return output + residual


@dataclass(frozen=True)
class PlainRead:
    """The norm of the residual."""

    plain: bool = True
    before_gather: bool = False
    keeps_residual: bool = True
    formats_input: bool = False

    def enter(self, hidden: Any) -> Any:
        """The embedding output is the first residual."""
        return hidden

    def read(self, residual: Any, norm: Any) -> tuple[Any, Any]:
        """Normalise without changing the residual."""
        return norm(residual), residual

    def update_and_read(
        self, update: StageUpdate, output: Any, residual: Any, norm: Any
    ) -> tuple[Any, Any]:
        """Add and normalise in one step when the update is a plain add."""
        if update.plain:
            normed, updated = norm.add_norm(output, residual)
            return normed, updated
        return self.read(update.apply(output, residual), norm)

    def format(self, normed: Any) -> Any:
        """Normalised rows are what compute takes."""
        return normed


PLAIN_RESIDUAL = LayerResidual(read=PlainRead(), update=PlainUpdate())
