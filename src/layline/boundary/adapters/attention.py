"""An attention that computes on divided rows before it gathers them (latent inputs).

In an input-scattered batch such an attention is given its slice of the rows. It computes something
small from it (a low-rank latent, say) and gathers that, which is less than gathering its input.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from layline.boundary.layout import BatchVariant
from layline.boundary.mesh import Mesh
from layline.boundary.rows import BatchKind, RankRows
from layline.comm.groups import Group
from layline.topology import GroupName


@dataclass(frozen=True, slots=True)
class AttnTpContext:
    """How one attention turns the input it was given into latents of every row.

    ``prepare`` takes the input [tokens, hidden] and gives [tokens, latent]; ``group`` is None where
    the input has every row already.
    """

    prepare: Callable[[Any], Any]
    group: Group | None
    rows: RankRows | None

    def latent(self, hidden_states: Any) -> Any:
        """[tokens of this rank's attention, latent]; every rank of attention TP calls it."""
        latent = self.prepare(hidden_states)
        if self.group is None or self.rows is None:
            return latent
        return self.group.all_gather(latent)[: self.rows.own]


def latent_context(
    prepare: Callable[[Any], Any], kind: BatchKind, rows: RankRows | None, mesh: Mesh
) -> AttnTpContext:
    """The context of one batch: it gathers only where the input arrives divided."""
    scattered = kind.variant is BatchVariant.INPUT_SCATTERED
    group = mesh.compute_groups[GroupName.ATTN_TP] if scattered else None
    return AttnTpContext(prepare, group, rows)
