"""A read whose compute input is 8-bit: the plain norm, then int8 rows with one scale each.

The residual stays as it is. Rows move between ranks in the run's dtype and are rounded where they
arrive, so that the input does not depend on the mesh.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from layline.boundary.residual import LayerResidual
from layline.boundary.residual.add_norm import PlainRead, PlainUpdate


@dataclass(frozen=True)
class QuantisedRead(PlainRead):
    """The norm of the residual as boundary.quantised.QuantisedRows."""

    formats_input: bool = True

    def format(self, normed: Any) -> Any:
        """Round [tokens, hidden] to int8 rows."""
        from layline.boundary.quantised import QuantisedRows

        return QuantisedRows.of(normed)


QUANTISED_RESIDUAL = LayerResidual(read=QuantisedRead(), update=PlainUpdate())
