"""Which tokens a rank holds, which sums are owed, and which kind of batch is running."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from layline.topology import Topology


class TokenAxis(Enum):
    """A mesh axis over which token rows can be divided, outermost first."""

    ATTN_DP = "attention DP"
    ATTN_CP = "attention CP"
    ATTN_TP_SCATTER = "attention TP scatter"


class SumGroup(Enum):
    """The ranks whose values still have to be added."""

    ATTN_TP = "attention TP"
    TP = "TP"
    MOE_OUTPUT = "MoE output"


class BatchVariant(Enum):
    """The kind of batch a forward pass runs; each has its own prepared paths."""

    ORDINARY = "ordinary"
    CONTEXT_PARALLEL = "context-parallel"
    INPUT_SCATTERED = "input-scattered"
    SEQUENCE_PARALLEL = "sequence-parallel"


def axis_size(topology: Topology, axis: TokenAxis) -> int:
    """How many ranks the rows are divided over along ``axis``."""
    return {
        TokenAxis.ATTN_DP: topology.attn_dp,
        TokenAxis.ATTN_CP: topology.attn_cp,
        TokenAxis.ATTN_TP_SCATTER: topology.attn_tp,
    }[axis]


@dataclass(frozen=True)
class Layout:
    """The set of axes that partition a rank's rows. Axes of size one are never in it."""

    sharded: frozenset[TokenAxis] = frozenset()

    @classmethod
    def over(cls, topology: Topology, axes: Iterable[TokenAxis]) -> Layout:
        """Rows divided over those of ``axes`` that have more than one rank."""
        return cls(frozenset(axis for axis in axes if axis_size(topology, axis) > 1))

    def __str__(self) -> str:
        if not self.sharded:
            return "every row"
        return " x ".join(axis.value for axis in TokenAxis if axis in self.sharded)
