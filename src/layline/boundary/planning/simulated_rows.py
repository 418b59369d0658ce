"""Rows of simulated ranks: what a row is the sum of, and what each operation makes of it.

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
from layline.boundary.planning.records import Op, Operand, OpKind, Writers
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


def contributed(row: Row, producer: StageDeclaration) -> Row:
    """What a producer's complete output adds to the residual."""
    if producer.transform is not None:
        each = producer.transform.before_reduce_scatter
        row = _transform_parts(row) if each else _transform_whole(row)
    return row if producer.update.plain else _opaque(row)


def _transform_whole(row: Row) -> Row:
    """A transform of the sum: of a part of it, it would make something else."""
    return {("transformed", frozenset(row.items())): 1} if row and POISON not in row else row


def _transform_parts(row: Row) -> Row:
    """A transform that is allowed before the sum: of each part alone."""
    return {part if part == POISON else ("each transformed", part): n for part, n in row.items()}


def _opaque(row: Row) -> Row:
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


# Operations of one rank. The memo lives as long as one operation runs on all ranks.


def _enter(state: RankState, op: Op, memo: Memo) -> None:
    state.residual = state.value


def _read(state: RankState, op: Op, memo: Memo) -> None:
    source = state.residual if op.operand is Operand.RESIDUAL else state.value
    assert source is not None
    state.input = remembered(memo, _norm_rows, source)


def _norm_rows(rows: Rows) -> Rows:
    return [norm_row(row) if row else ZERO for row in rows]


def _added(state: RankState, memo: Memo) -> Rows:
    assert state.residual is not None
    if len(state.value) != len(state.residual):
        raise SimulationError(
            f"rank {state.topology.rank} adds {len(state.value)} output rows to "
            f"{len(state.residual)} residual rows"
        )
    total: Rows = remembered(memo, _add_lists, _updating(state, memo), state.residual)
    return total


def _updating(state: RankState, memo: Memo) -> Rows:
    """The value as its producer's update adds it."""
    assert state.producer is not None
    if state.producer.update.plain:
        return state.value
    rows: Rows = remembered(memo, _opaque_rows, state.value)
    return rows


def _opaque_rows(rows: Rows) -> Rows:
    return [_opaque(row) for row in rows]


def _add_lists(left: Rows, right: Rows) -> Rows:
    return [add_rows(a, b) for a, b in zip(left, right, strict=True)]


def _update_and_read(state: RankState, op: Op, memo: Memo) -> None:
    state.residual = _added(state, memo)
    state.input = remembered(memo, _norm_rows, state.residual)


def _update(state: RankState, op: Op, memo: Memo) -> None:
    state.value = _added(state, memo)


def _join(state: RankState, op: Op, memo: Memo) -> None:
    if state.topology.coordinates.attn_tp == 0:
        state.value = _added(state, memo)


def _join_slice(state: RankState, op: Op, memo: Memo) -> None:
    assert state.residual is not None
    rows = state.rows
    first = state.topology.coordinates.attn_tp * rows.shard
    value = list(_updating(state, memo))
    for index, residual in enumerate(state.residual):
        if first + index < rows.own:
            value[first + index] = add_rows(value[first + index], residual)
    state.value = value


def _take_residual(state: RankState, op: Op, memo: Memo) -> None:
    rows = state.rows
    whole = op.before == op.after
    state.residual = state.value if whole else state.value[rows.offset : rows.offset + rows.own]


def _slice(state: RankState, op: Op, memo: Memo) -> None:
    name, rows = op.operand.value, state.rows
    x: Rows = getattr(state, name)
    if TokenAxis.ATTN_TP_SCATTER in op.after.sharded - op.before.sharded:
        shard, index = rows.shard, state.topology.coordinates.attn_tp
        own = x[index * shard : (index + 1) * shard]
        setattr(state, name, own + [ZERO] * (shard - len(own)))
        return
    setattr(state, name, x[rows.offset : rows.offset + rows.own])


def _place(state: RankState, op: Op, memo: Memo) -> None:
    name, rows, here = op.operand.value, state.rows, state.topology.coordinates
    writes = {
        Writers.ALL: True,
        Writers.FIRST_TP: here.attn_tp == 0,
        Writers.FIRST_CP: here.attn_cp == 0,
        Writers.FIRST_CP_TP: here.attn_cp == 0 and here.attn_tp == 0,
    }[op.writers or Writers.ALL]
    buffer: Rows = [ZERO] * rows.total
    if writes:
        buffer[rows.offset : rows.offset + rows.own] = getattr(state, name)
    setattr(state, name, buffer)


def _pad(state: RankState, op: Op, memo: Memo) -> None:
    x: Rows = getattr(state, op.operand.value)
    setattr(state, op.operand.value, x + [ZERO] * (state.rows.slot - len(x)))


def _transform(state: RankState, op: Op, memo: Memo) -> None:
    assert state.producer is not None
    assert state.producer.transform is not None
    each = state.producer.transform.before_reduce_scatter
    state.value = remembered(memo, _transformed_parts if each else _transformed_rows, state.value)


def _transformed_rows(rows: Rows) -> Rows:
    return [_transform_whole(row) for row in rows]


def _transformed_parts(rows: Rows) -> Rows:
    return [_transform_parts(row) for row in rows]


LOCAL_STEPS: dict[OpKind, Callable[[RankState, Op, Memo], None]] = {
    OpKind.ENTER: _enter,
    OpKind.READ: _read,
    OpKind.UPDATE: _update,
    OpKind.UPDATE_AND_READ: _update_and_read,
    OpKind.JOIN: _join,
    OpKind.JOIN_SLICE: _join_slice,
    OpKind.TAKE_RESIDUAL: _take_residual,
    OpKind.SLICE: _slice,
    OpKind.PLACE: _place,
    OpKind.PAD: _pad,
    OpKind.TRANSFORM: _transform,
}
