"""What one rank computes of a mesh step: its DP rank's sequences, or its share of their tokens.

No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass

from layline.boundary.layout import BatchVariant
from layline.engine.context_split import split_context
from layline.engine.step import MeshStep, RankStep
from layline.layers.spans import SequenceSpan, StepPhase
from layline.topology import Topology


@dataclass(frozen=True, slots=True)
class RankPart:
    """One rank's rows of one step.

    Attributes:
        phase: Which kernels its attention runs, on which rows.
        spans: Its sequences, or pieces of them, in row order.
        token_ids: The ids of its rows.
        sampling_rows: For each sequence that samples, its row here, None where another CP rank
            has it.
        cached_spans: The sequences whose keys and values enter its cache.
        join_width: Rows that every CP rank pads its keys and values to.
        join_order: Where, among the CP ranks' padded rows, each row of ``cached_spans`` is; None
            outside a context-parallel batch.
    """

    phase: StepPhase
    spans: tuple[SequenceSpan, ...]
    token_ids: tuple[int, ...]
    sampling_rows: tuple[int | None, ...]
    cached_spans: tuple[SequenceSpan, ...]
    join_width: int = 0
    join_order: tuple[int, ...] | None = None


def part_of(step: MeshStep, topology: Topology, cp_layout: str) -> RankPart:
    """The part of ``step`` that the rank ``topology`` stands on computes."""
    here = topology.coordinates
    part = step.parts[here.attn_dp]
    if step.rows.variant is BatchVariant.CONTEXT_PARALLEL:
        return _context_part(part, topology.attn_cp, here.attn_cp, cp_layout)
    rows, row = [], -1
    for span, samples in zip(part.spans, part.samples, strict=True):
        row += span.count
        if samples:
            rows.append(row)
    return RankPart(part.phase, part.spans, part.token_ids, tuple(rows), part.spans)


def _context_part(part: RankStep, cp: int, rank: int, layout: str) -> RankPart:
    """Divide each sequence's new tokens; every rank caches all of them."""
    pieces = [split_context(span.count, cp, layout) for span in part.spans]
    width = max(sum(len(piece) for share in pieces for piece in share[r]) for r in range(cp))
    homes = _homes(pieces, cp, width)
    spans: list[SequenceSpan] = []
    token_ids: list[int] = []
    sampling: list[int | None] = []
    order: list[int] = []
    first = row = 0
    for span, samples, share, home in zip(part.spans, part.samples, pieces, homes, strict=True):
        last: int | None = None
        for piece in share[rank]:
            spans.append(_piece(span, piece))
            token_ids.extend(part.token_ids[first + piece.start : first + piece.stop])
            row += len(piece)
            if piece.stop == span.count:
                last = row - 1
        if samples:
            sampling.append(last)
        order.extend(home)
        first += span.count
    return RankPart(
        part.phase,
        tuple(spans),
        tuple(token_ids),
        tuple(sampling),
        part.spans,
        width,
        tuple(order),
    )


def _piece(span: SequenceSpan, piece: range) -> SequenceSpan:
    start = span.start + piece.start
    return SequenceSpan(start, len(piece), span.blocks, rope_length=span.rope_length)


def _homes(pieces: list[list[list[range]]], cp: int, width: int) -> list[list[int]]:
    """For each sequence, where each of its new tokens is among the ranks' joined rows."""
    filled = [0] * cp
    homes: list[list[int]] = []
    for share in pieces:
        home = [0] * sum(len(piece) for own in share for piece in own)
        for rank, own in enumerate(share):
            for piece in own:
                for token in piece:
                    home[token] = rank * width + filled[rank]
                    filled[rank] += 1
        homes.append(home)
    return homes
