"""How many token rows each rank holds in one step. Shared facts, made from the step plan alone.

Rows are nested like the mesh: a global buffer holds one slot for each attention DP rank, in a
context-parallel batch one for each (DP, CP) pair, in rank order. Nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from layline.boundary.layout import BatchVariant
from layline.topology import Topology


class DpPadding(Enum):
    """How attention DP ranks with unequal rows share one global buffer.

    MAX_LEN pads every slot to the longest, so that a gather can move equal shares; SUM_LEN packs
    the slots, which then travel as a sum of buffers that are zero elsewhere.
    """

    MAX_LEN = "max-len"
    SUM_LEN = "sum-len"


@dataclass(frozen=True)
class StepRows:
    """Token rows of one step on a whole mesh: every rank has the same object.

    ``counts[dp][cp]`` are real rows. Outside a context-parallel batch the CP ranks of a DP rank
    hold the same rows, so the counts of a row are equal.
    """

    variant: BatchVariant
    counts: tuple[tuple[int, ...], ...]
    padding: DpPadding = DpPadding.MAX_LEN

    @property
    def total(self) -> int:
        """Real rows of the step, each counted once."""
        if self.variant is BatchVariant.CONTEXT_PARALLEL:
            return sum(map(sum, self.counts))
        return sum(row[0] for row in self.counts)


@dataclass(frozen=True, slots=True)
class RankRows:
    """One rank's view of a step's rows: plain numbers that operations read.

    Attributes:
        own: Real rows of this rank's attention.
        slot: Rows of this rank's slot in the global buffer, padding included.
        shard: Rows of this rank's slice over attention TP, padding included.
        offset: First row of this rank's slot in the global buffer.
        total: Rows of the global buffer.
        slots: Rows of every slot in order, for a reduce-scatter of variable sizes.
        tokens: Real rows of the whole step, each counted once.
        prefill: Every DP rank that has rows prefills.
    """

    own: int
    slot: int
    shard: int
    offset: int
    total: int
    slots: tuple[int, ...]
    tokens: int
    prefill: bool = False


@dataclass(frozen=True, eq=False)
class BatchKind:
    """What a path is prepared for: the batch variant, and the padding that attention DP uses.

    There is one object of each kind (:func:`batch_kind`), compared by identity: a step looks its
    path up by it several times in every layer.
    """

    variant: BatchVariant
    padding: DpPadding | None

    def __str__(self) -> str:
        return self.variant.value + ("" if self.padding is None else f", {self.padding.name}")


_KINDS = {
    (variant, padding): BatchKind(variant, padding)
    for variant in BatchVariant
    for padding in (None, *DpPadding)
}


def batch_kind(variant: BatchVariant, padding: DpPadding | None = None) -> BatchKind:
    """The kind with this variant and padding."""
    return _KINDS[variant, padding]


ORDINARY = batch_kind(BatchVariant.ORDINARY)


def effective_padding(topology: Topology, padding: DpPadding) -> DpPadding | None:
    """The padding that a mesh really uses: none without attention DP, packed slots with CP too."""
    if topology.attn_dp == 1:
        return None
    return DpPadding.SUM_LEN if topology.attn_cp > 1 else padding


def rank_rows(step: StepRows, topology: Topology, *, prefill: bool = False) -> RankRows:
    """What the step's counts mean for the rank that ``topology`` stands on."""
    here = topology.coordinates
    context_parallel = step.variant is BatchVariant.CONTEXT_PARALLEL
    if context_parallel:
        slots = [count for row in step.counts for count in row]
        index = here.attn_dp * topology.attn_cp + here.attn_cp
    else:
        slots = [row[0] for row in step.counts]
        index = here.attn_dp
    own = slots[index]
    padding = effective_padding(topology, step.padding)
    attn_tp = topology.attn_tp
    if padding is DpPadding.MAX_LEN:
        width = -(-max(slots) // attn_tp) * attn_tp
        slots = [width] * len(slots)
    elif context_parallel and topology.attn_dp == 1:
        slots = [max(slots)] * len(slots)
    return RankRows(
        own=own,
        slot=slots[index],
        shard=-(-slots[index] // attn_tp),
        offset=sum(slots[:index]),
        total=sum(slots),
        slots=tuple(slots),
        tokens=step.total,
        prefill=prefill,
    )


def kind_of(step: StepRows, topology: Topology) -> BatchKind:
    """The kind of batch a step is on this mesh."""
    return batch_kind(step.variant, effective_padding(topology, step.padding))
