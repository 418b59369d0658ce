"""Which tokens a rank holds, which sums are owed, and which kind of batch is running."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from layline.topology import GroupName, Topology


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

    @property
    def group(self) -> GroupName:
        """The group of the topology that completes this sum."""
        return GroupName.ATTN_TP if self is SumGroup.ATTN_TP else GroupName.TP


class BatchVariant(Enum):
    """The kind of batch a forward pass runs; each has its own prepared paths."""

    ORDINARY = "ordinary"
    CONTEXT_PARALLEL = "context-parallel"
    INPUT_SCATTERED = "input-scattered"
    SEQUENCE_PARALLEL = "sequence-parallel"


def axis_size(topology: Topology, axis: TokenAxis) -> int:
    """How many ranks the rows are divided over along ``axis``."""
    if axis is TokenAxis.ATTN_DP:
        return topology.attn_dp
    return topology.attn_cp if axis is TokenAxis.ATTN_CP else topology.attn_tp


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


FULL_ROWS = Layout()


def attention_rows(topology: Topology, variant: BatchVariant) -> Layout:
    """The rows an attention computes on: its DP rank's, in a CP batch its own chunk of them."""
    axes = [TokenAxis.ATTN_DP]
    if variant is BatchVariant.CONTEXT_PARALLEL:
        axes.append(TokenAxis.ATTN_CP)
    return Layout.over(topology, axes)


def local_rows(topology: Topology, variant: BatchVariant) -> Layout:
    """Attention rows divided once more over the attention TP ranks."""
    attention = attention_rows(topology, variant)
    scattered = Layout.over(topology, (TokenAxis.ATTN_TP_SCATTER,))
    return Layout(attention.sharded | scattered.sharded)
