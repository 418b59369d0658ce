"""Rows of simulated ranks: what a row is the sum of, and how collectives join rows.

A row is a set of named parts. Ranks that share a token's compute each make a share of one part, and
a part's count says for every share how often it is in the row: share ``s`` counts in bits
``32 s .. 32 s + 31``, so that whole rows are added with a few integers. Rows and lists of rows are
values: nothing changes one that is there, and ranks that hold equal lists share one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from layline.boundary.contracts import StageDeclaration
from layline.boundary.layout import TokenAxis
from layline.boundary.planning.records import Op, OpKind
from layline.boundary.rows import RankRows
from layline.errors import BoundaryError
from layline.topology import GroupName, Topology

Part = tuple[Any, ...]
Row = dict[Part, int]
Rows = list[Row]
SHARE_BITS = 32
POISON: Part = ("poison",)
# What compute makes of padding.
POISONED: Row = {POISON: 1}
# Padding that was written as zeros.
ZERO: Row = {}
Memo = dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]]


class SimulationError(BoundaryError):
    """A planned path lost, doubled or misplaced something; the message says where and what."""


@dataclass
class RankState:
    """What one simulated rank holds; ``producer`` is the stage that ``value`` came from."""

    topology: Topology
    rows: RankRows
    producer: StageDeclaration | None = None
    value: Rows = field(default_factory=list)
    residual: Rows | None = None
    input: Rows = field(default_factory=list)


def share_once(share: int) -> int:
    """The count of a part of which one share is there once."""
    return 1 << SHARE_BITS * share


@functools.cache
def every_share(shares: int) -> int:
    """The count of a part whose shares are all there, each once."""
    return sum(share_once(share) for share in range(shares))


def add_rows(left: Row, right: Row) -> Row:
    """The sum of two rows."""
    return _sum((left, right))


def norm_row(row: Row) -> Row:
    """The norm of a row: a part of its own that tells what it was made from."""
    return {("norm", frozenset(row.items())): 1}


def norm_rows(rows: Rows) -> Rows:
    """The norm of each row; zeros stay zeros."""
    return [norm_row(row) if row else ZERO for row in rows]


def contributed(row: Row, producer: StageDeclaration) -> Row:
    """What a producer's complete output adds to the residual."""
    if producer.transform is not None:
        each = producer.transform.before_reduce_scatter
        row = transform_parts(row) if each else transform_whole(row)
    return row if producer.update.plain else opaque_row(row)


def transform_whole(row: Row) -> Row:
    """A transform of the sum: of a part of it, it would make something else."""
    return {("transformed", frozenset(row.items())): 1} if row and POISON not in row else row


def transform_parts(row: Row) -> Row:
    """A transform that is allowed before the sum: of each part alone."""
    return {part if part == POISON else ("each transformed", part): n for part, n in row.items()}


def opaque_row(row: Row) -> Row:
    """What an update that is not plain makes of a row: nothing can be added to it any more."""
    return {("updated", frozenset(row.items())): 1} if row and POISON not in row else row


def difference(found: Row, wanted: Row) -> str:
    """What a compute input lacks, has too much, or has more than once."""
    inner: Row = found
    for part in found:
        if part[0] == "norm":
            inner = dict(part[1])
    have, need = _counted(inner), _counted(wanted)
    missing = sorted(map(str, need.keys() - have.keys()))
    extra = sorted(map(str, have.keys() - need.keys()))
    twice = sorted(str(part) for part, count in have.items() if count > 1)
    return (
        f"missing {', '.join(missing) or 'nothing'}; unexpected {', '.join(extra) or 'nothing'}; "
        f"counted more than once {', '.join(twice) or 'nothing'}"
    )


def _counted(row: Row) -> dict[Part, int]:
    """Counts of every stage's shares apart."""
    counts: dict[Part, int] = {}
    for part, packed in row.items():
        share, rest = 0, packed
        while rest:
            count = rest & ((1 << SHARE_BITS) - 1)
            if count:
                counts[(*part, share)] = count
            share, rest = share + 1, rest >> SHARE_BITS
    return counts


def _sum(rows: Sequence[Row]) -> Row:
    held = [row for row in rows if row]
    if len(held) < 2:
        return held[0] if held else ZERO
    if held[0] is held[-1] and held.count(held[0]) == len(held):
        return {part: count * len(held) for part, count in held[0].items()}
    if len(held[0]) == 1:
        # The usual case, and much the faster: every rank brings its share of the same part.
        (part,) = held[0]
        counts = [row[part] for row in held if len(row) == 1 and part in row]
        if len(counts) == len(held):
            return {part: sum(counts)}
    total = dict(held[0])
    for row in held[1:]:
        for part, count in row.items():
            total[part] = total.get(part, 0) + count
    return total


def run_collective(op: Op, members: Sequence[RankState], inputs: Sequence[Rows]) -> list[Rows]:
    """What each member of one group gets. Raises SimulationError where the inputs do not fit."""
    if op.kind is OpKind.ALL_GATHER:
        _require_equal(op, members, inputs)
        joined = [row for rows in inputs for row in rows]
        if op.group is not GroupName.ATTN_TP:
            return [joined] * len(members)
        by_count = {member.rows.own: joined[: member.rows.own] for member in members}
        return [by_count[member.rows.own] for member in members]
    inputs = [_padded(op, member, rows) for member, rows in zip(members, inputs, strict=True)]
    _require_equal(op, members, inputs)
    total = [_sum(column) for column in zip(*inputs, strict=True)]
    if op.kind is OpKind.ALL_REDUCE:
        return [total] * len(members)
    if op.kind is OpKind.REDUCE_SCATTER_V:
        sizes = members[0].rows.slots
    else:
        if len(total) % len(members):
            raise SimulationError(f"{op}: {len(total)} rows do not divide by {len(members)} ranks")
        sizes = (len(total) // len(members),) * len(members)
    shares, first = [], 0
    for size in sizes:
        shares.append(total[first : first + size])
        first += size
    if TokenAxis.ATTN_TP_SCATTER in op.after.sharded:
        return shares
    return [share[: member.rows.own] for share, member in zip(shares, members, strict=True)]


def _padded(op: Op, member: RankState, rows: Rows) -> Rows:
    assert op.group is not None
    sliced = op.kind is OpKind.REDUCE_SCATTER and TokenAxis.ATTN_TP_SCATTER in op.after.sharded
    if not sliced or member.topology.size(op.group) != member.topology.attn_tp:
        return rows
    return rows + [ZERO] * (member.rows.shard * member.topology.attn_tp - len(rows))


def _require_equal(op: Op, members: Sequence[RankState], inputs: Sequence[Rows]) -> None:
    counts = {len(rows) for rows in inputs}
    if len(counts) > 1:
        held = ", ".join(
            f"rank {member.topology.rank}: {len(rows)}"
            for member, rows in zip(members, inputs, strict=True)
        )
        raise SimulationError(f"{op}: ranks bring different numbers of rows ({held})")


def remembered(memo: Memo, make: Callable[..., Any], *given: Any) -> Any:
    """``make(*given)``, made once in ``memo`` for the same objects: ranks share what they hold."""
    key = (make, *map(id, given))
    known = memo.get(key)
    if known is None:
        # What was given is kept with it, so that no other object gets its identity.
        known = memo[key] = (make(*given), given)
    return known[0]
