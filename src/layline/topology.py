"""Where a rank stands in the mesh. Pure arithmetic: nothing here imports torch.

The full tensor-parallel group is attention DP x attention CP x attention TP, nested in that order
with attention TP innermost; expert parallelism re-divides the same ranks, and pipeline stages are
outermost.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from layline.errors import UsageError

DEGREES = ("tp", "attn_dp", "attn_cp", "ep", "pp")


class GroupName(Enum):
    """A named group of ranks that communicate."""

    TP = "TP"
    ATTN_DP = "attention DP"
    ATTN_CP = "attention CP"
    ATTN_TP = "attention TP"
    MOE_EP = "expert"
    MOE_TP = "MoE TP"
    PP = "pipeline"


@dataclass(frozen=True, slots=True)
class Coordinates:
    """A rank's index along each axis."""

    pp: int
    attn_dp: int
    attn_cp: int
    attn_tp: int


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Degrees of the mesh and this rank's place in it.

    ``dense_tp`` is how many ranks share a dense FFN: all of ``tp`` (the default), or 1, where each
    rank computes the whole FFN on its own rows. Raises UsageError when a degree is below one, when
    attention DP x CP or expert parallelism does not divide ``tp``, when ``dense_tp`` is neither 1
    nor ``tp``, or when ``rank`` lies outside the mesh.
    """

    tp: int = 1
    attn_dp: int = 1
    attn_cp: int = 1
    ep: int = 1
    pp: int = 1
    dense_tp: int | None = None
    rank: int = 0

    def __post_init__(self) -> None:
        for name in DEGREES:
            if getattr(self, name) < 1:
                raise UsageError(f"{name} {getattr(self, name)} must be at least 1")
        inside = self.attn_dp * self.attn_cp
        if self.tp % inside:
            raise UsageError(
                f"attn_dp {self.attn_dp} x attn_cp {self.attn_cp} = {inside} does not divide "
                f"tp {self.tp}; expected a product among {_divisors(self.tp)}"
            )
        if self.tp % self.ep:
            raise UsageError(
                f"ep {self.ep} does not divide tp {self.tp}; expected one of {_divisors(self.tp)}"
            )
        if self.dense_tp is None:
            object.__setattr__(self, "dense_tp", self.tp)
        if self.dense_tp not in (1, self.tp):
            either = "1" if self.tp == 1 else f"1 or {self.tp}"
            raise UsageError(
                f"dense_tp {self.dense_tp} does not fit tp {self.tp}; expected {either}"
            )
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
    def moe_tp(self) -> int:
        """Ranks that share one expert's columns."""
        return self.tp // self.ep

    @property
    def is_single(self) -> bool:
        """True when one rank holds everything, so no line between stages crosses a device."""
        return self.world_size == 1

    @property
    def coordinates(self) -> Coordinates:
        """This rank's index along each axis."""
        pp, inner = divmod(self.rank, self.tp)
        attn_dp, inner = divmod(inner, self.attn_cp * self.attn_tp)
        attn_cp, attn_tp = divmod(inner, self.attn_tp)
        return Coordinates(pp, attn_dp, attn_cp, attn_tp)

    def at(self, rank: int) -> Topology:
        """The same mesh seen from another rank."""
        return replace(self, rank=rank)

    @property
    def of_stage(self) -> Topology:
        """The mesh of this rank's pipeline stages alone, seen from this rank."""
        return replace(self, pp=1, rank=self.rank % self.tp)

    def size(self, name: GroupName) -> int:
        """How many ranks a group of this name has."""
        return {
            GroupName.TP: self.tp,
            GroupName.ATTN_DP: self.attn_dp,
            GroupName.ATTN_CP: self.attn_cp,
            GroupName.ATTN_TP: self.attn_tp,
            GroupName.MOE_EP: self.ep,
            GroupName.MOE_TP: self.moe_tp,
            GroupName.PP: self.pp,
        }[name]

    def group(self, name: GroupName) -> tuple[int, ...]:
        """The ranks of this rank's group, in the order in which a gather joins their rows."""
        base = self.rank - self.rank % self.tp
        inner = self.rank - base
        stride, count = {
            GroupName.TP: (1, self.tp),
            GroupName.ATTN_DP: (self.attn_cp * self.attn_tp, self.attn_dp),
            GroupName.ATTN_CP: (self.attn_tp, self.attn_cp),
            GroupName.ATTN_TP: (1, self.attn_tp),
            GroupName.MOE_EP: (self.moe_tp, self.ep),
            GroupName.MOE_TP: (1, self.moe_tp),
            GroupName.PP: (self.tp, self.pp),
        }[name]
        if name is GroupName.PP:
            return tuple(range(inner, self.world_size, self.tp))
        first = inner - inner // stride % count * stride
        return tuple(base + first + index * stride for index in range(count))

    def index_in(self, name: GroupName) -> int:
        """This rank's position in its group of that name."""
        return self.group(name).index(self.rank)


def _divisors(number: int) -> str:
    return ", ".join(str(d) for d in range(1, number + 1) if number % d == 0)
