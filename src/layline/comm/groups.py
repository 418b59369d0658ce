"""What a group of ranks can do with rows. Every collective of Layline goes through this interface.

Tensors are [rows, columns] on the group's device. A call is collective: every rank of the group
makes it, in the same order. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from layline.topology import GroupName


class CollectiveKind(Enum):
    """The collectives, by the field's names."""

    ALL_REDUCE = "all-reduce"
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    REDUCE_SCATTER_V = "reduce-scatter-v"


class Group(Protocol):
    """One rank's end of a group.

    Attributes:
        name: Which group of the topology this is.
        ranks: Global ranks in group order.
        rank: This rank's position in ``ranks``.
    """

    name: GroupName
    ranks: tuple[int, ...]
    rank: int

    @property
    def size(self) -> int:
        """Number of ranks."""

    def all_reduce(self, x: Any, /) -> Any:
        """The sum of every rank's ``x``, same shape. ``x`` is used up: its memory may be reused.

        Raises CollectiveError when shapes or dtypes differ between ranks (where the group can
        tell), or when a peer does not answer in time.
        """

    def all_gather(self, x: Any, /) -> Any:
        """Every rank's equally many rows, joined in group order: [size * rows, columns]."""

    def reduce_scatter(self, x: Any, /) -> Any:
        """This rank's share, [rows / size, columns], of the sum of every rank's ``x``.

        Raises CollectiveError when ``size`` does not divide the rows.
        """

    def reduce_scatter_v(self, x: Any, counts: Sequence[int], /) -> Any:
        """Rank ``i`` gets ``counts[i]`` consecutive rows of the sum; ``counts`` adds up to rows."""


@dataclass(frozen=True, slots=True)
class CollectiveRecord:
    """One collective that ran on one rank.

    ``rows`` and ``payload_bytes`` are those of the larger side: the input of a reduction, the
    result of a gather. ``in_compute`` tells a stage's own collective from a boundary's.
    """

    kind: CollectiveKind
    group: GroupName
    rows: int
    columns: int
    payload_bytes: int
    in_compute: bool
    seconds: float | None = None


def wire_bytes(kind: CollectiveKind, payload_bytes: int, ranks: int) -> float:
    """Bytes each rank sends in a ring algorithm, for the payload of :class:`CollectiveRecord`.

    An all-reduce sends 2 (n - 1) / n of its payload, the others (n - 1) / n.
    """
    turns = 2 if kind is CollectiveKind.ALL_REDUCE else 1
    return turns * (ranks - 1) * payload_bytes / ranks


Groups = Mapping[GroupName, Group]
