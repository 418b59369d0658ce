"""Where a rank stands in the mesh. Pure arithmetic: nothing here imports torch.

The full tensor-parallel group is attention DP x attention CP x attention TP, nested in that order
with attention TP innermost; expert parallelism re-divides the same ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from layline.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Degrees of the mesh and this rank's place in it.

    Raises UsageError when a degree is below one, when attention DP x CP does not divide ``tp``,
    or when ``rank`` lies outside the mesh.
    """

    tp: int = 1
    attn_dp: int = 1
    attn_cp: int = 1
    ep: int = 1
    pp: int = 1
    rank: int = 0

    def __post_init__(self) -> None:
        for name in ("tp", "attn_dp", "attn_cp", "ep", "pp"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} {getattr(self, name)} must be at least 1")
        if self.tp % (self.attn_dp * self.attn_cp):
            raise UsageError(
                f"attn_dp {self.attn_dp} x attn_cp {self.attn_cp} must divide tp {self.tp}"
            )
        if self.tp % self.ep:
            raise UsageError(f"ep {self.ep} must divide tp {self.tp}")
        if not 0 <= self.rank < self.world_size:
            raise UsageError(f"rank {self.rank} is outside 0..{self.world_size - 1}")

    @property
    def world_size(self) -> int:
        """All ranks: full TP size times pipeline stages."""
        return self.tp * self.pp

    @property
    def attn_tp(self) -> int:
        """Ranks that share one attention's heads."""
        return self.tp // (self.attn_dp * self.attn_cp)

    @property
    def is_single(self) -> bool:
        """True when one rank holds everything, so no line between stages crosses a device."""
        return self.world_size == 1
