"""What a collective costs: its rows in a step, its payload and the bytes that each rank sends.

The payload is the larger side of a collective, the input of a sum and the result of a gather, and
the bytes on the wire are those of a ring (:func:`layline.comm.groups.wire_bytes`). Per token means
for each token of the step when all slots are equally full; padding is counted in whole steps only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction

from layline.boundary.layout import FULL_ROWS, Layout, TokenAxis, axis_size
from layline.boundary.planning.moves import Ground
from layline.boundary.planning.records import Op, OpKind, Place
from layline.boundary.rows import RankRows, StepRows, rank_rows
from layline.comm.groups import CollectiveKind, CollectiveRecord, wire_bytes
from layline.topology import GroupName, Topology

SCALE_BYTES = 4
"""Of a quantised row's scale; see boundary.quantised."""


class Extent(Enum):
    """How many rows the larger side of a collective has."""

    OWN = "attention rows"
    SLICES = "attention rows, padded for attention TP"
    EVERY = "every row"
    CONTEXT = "rows of all CP ranks, padded"
    SAMPLED = "sampled rows"
    SCORES = "sampled rows of each rank"
    FED = "rows of each rank that the step before samples for"


class Element(Enum):
    """What type the values of a collective have.

    SUMMED is that of stages' outputs and of the residual, RUN that of weights and of a norm alone,
    SCORES that of the head, CACHED that of keys and values, IDS that of token ids. INPUT stands for
    whichever of them a compute input arrives in.
    """

    SUMMED = "summed"
    RUN = "run"
    SCORES = "scores"
    CACHED = "cached"
    IDS = "ids"
    INPUT = "input"


@dataclass(frozen=True)
class ElementSizes:
    """Bytes of one value of each type."""

    summed: int
    run: int
    scores: int
    cached: int
    ids: int = 8

    def of(self, element: Element) -> int:
        """Bytes of one value."""
        size: int = getattr(self, element.value)
        return size


@dataclass(frozen=True)
class Collective:
    """One planned collective, the same on every rank of its group.

    A ``quantised`` all-reduce runs in prefill as a gather of 8-bit rows with a scale each.
    """

    kind: CollectiveKind
    group: GroupName
    extent: Extent
    columns: int
    element: Element
    in_compute: bool
    quantised: bool = False


@dataclass(frozen=True)
class Bytes:
    """Payload and wire bytes of one rank."""

    payload: float = 0.0
    wire: float = 0.0

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(self.payload + other.payload, self.wire + other.wire)


@dataclass(frozen=True)
class RankStep:
    """The numbers of one step that one rank's collectives depend on.

    ``width`` is how many rows each CP rank pads its keys and values to, ``sampled`` how many rows
    are scored on this attention DP rank, ``fed`` how many are fed what the step before sampled.
    """

    topology: Topology
    rows: RankRows
    width: int
    sampled: int
    fed: int = 0

    @classmethod
    def of(
        cls,
        step: StepRows,
        topology: Topology,
        sampled: int,
        *,
        prefill: bool = False,
        fed: int = 0,
    ) -> RankStep:
        """The numbers of the rank that ``topology`` stands on; see RankRows for ``prefill``."""
        width = max(step.counts[topology.coordinates.attn_dp])
        return cls(topology, rank_rows(step, topology, prefill=prefill), width, sampled, fed)

    def num_rows(self, collective: Collective) -> int:
        """Rows of the collective's larger side."""
        topology, rows = self.topology, self.rows
        return {
            Extent.OWN: rows.own,
            Extent.SLICES: rows.shard * topology.attn_tp,
            Extent.EVERY: rows.total,
            Extent.CONTEXT: self.width * topology.attn_cp,
            Extent.SAMPLED: self.sampled,
            Extent.SCORES: self.sampled * topology.size(collective.group),
            Extent.FED: self.fed * topology.size(collective.group),
        }[collective.extent]


def planned(op: Op, topology: Topology, columns: int, element: Element) -> Collective:
    """The collective that a planned operation runs."""
    assert op.is_collective
    assert op.group is not None
    return Collective(
        kind=CollectiveKind(op.kind.value),
        group=op.group,
        extent=_extent(op, topology),
        columns=columns,
        element=element,
        in_compute=op.place is Place.COMPUTE,
        quantised=op.quantised,
    )


def _extent(op: Op, topology: Topology) -> Extent:
    assert op.group is not None
    larger, smaller = op.before, op.after
    if op.kind is OpKind.ALL_GATHER:
        larger, smaller = smaller, larger
    divided = TokenAxis.ATTN_TP_SCATTER in smaller.sharded - larger.sharded
    if divided and topology.size(op.group) == topology.attn_tp:
        return Extent.SLICES
    return Extent.EVERY if larger == FULL_ROWS else Extent.OWN


def per_token(
    collective: Collective, ground: Ground, sizes: ElementSizes, *, prefill: bool = False
) -> Bytes:
    """Bytes for each token of a step whose slots are equally full.

    For SAMPLED and SCORES they are for each sampled row of the rank, for FED for each fed one.
    ``prefill`` tells that every DP rank with rows prefills.
    """
    topology = ground.topology
    rows = {
        Extent.OWN: rows_share(ground.attention, topology),
        Extent.SLICES: rows_share(ground.attention, topology),
        Extent.EVERY: Fraction(1),
        Extent.CONTEXT: Fraction(1, topology.attn_dp),
        Extent.SAMPLED: Fraction(1),
        Extent.SCORES: Fraction(topology.size(collective.group)),
        Extent.FED: Fraction(topology.size(collective.group)),
    }[collective.extent]
    ranks = topology.size(collective.group)
    kind, payload = collective.kind, collective.columns * sizes.of(collective.element) * rows
    if collective.quantised and prefill:
        kind, payload = CollectiveKind.ALL_GATHER, (collective.columns + SCALE_BYTES) * rows * ranks
    return Bytes(float(payload), float(_wire(kind, ranks) * payload))


def rows_share(layout: Layout, topology: Topology) -> Fraction:
    """The share of a step's tokens that a rank has on these rows, slots equally full."""
    share = Fraction(1)
    for axis in layout.sharded:
        share /= axis_size(topology, axis)
    return share


def _wire(kind: CollectiveKind, ranks: int) -> Fraction:
    # By the one formula: what a payload of as many bytes as there are ranks sends, exactly.
    return Fraction(wire_bytes(kind, ranks, ranks)) / ranks


def step_records(
    collectives: Iterable[Collective], step: RankStep, sizes: ElementSizes
) -> list[CollectiveRecord]:
    """The records that one rank must leave in one step, in order; without rows there is none."""
    records = []
    for one in collectives:
        kind, rows, columns, size = one.kind, step.num_rows(one), one.columns, sizes.of(one.element)
        if one.quantised and step.rows.prefill:
            kind, size = CollectiveKind.ALL_GATHER, 1
            rows, columns = rows * step.topology.size(one.group), columns + SCALE_BYTES
        if rows * columns:
            payload = rows * columns * size
            records.append(
                CollectiveRecord(kind, one.group, rows, columns, payload, one.in_compute)
            )
    return records
