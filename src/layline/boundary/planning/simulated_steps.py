"""What each operation of one rank makes of its simulated rows.

The memo lives as long as one operation runs on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable

from layline.boundary.layout import TokenAxis
from layline.boundary.planning.records import Op, Operand, OpKind, Writers
from layline.boundary.planning.simulated_rows import (
    ZERO,
    Memo,
    RankState,
    Rows,
    SimulationError,
    add_rows,
    norm_rows,
    opaque_row,
    remembered,
    transform_parts,
    transform_whole,
)


def _enter(state: RankState, op: Op, memo: Memo) -> None:
    state.residual = state.value


def _read(state: RankState, op: Op, memo: Memo) -> None:
    source = state.residual if op.operand is Operand.RESIDUAL else state.value
    assert source is not None
    state.input = remembered(memo, norm_rows, source)


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
    return [opaque_row(row) for row in rows]


def _add_lists(left: Rows, right: Rows) -> Rows:
    return [add_rows(a, b) for a, b in zip(left, right, strict=True)]


def _update_and_read(state: RankState, op: Op, memo: Memo) -> None:
    state.residual = _added(state, memo)
    state.input = remembered(memo, norm_rows, state.residual)


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
    return [transform_whole(row) for row in rows]


def _transformed_parts(rows: Rows) -> Rows:
    return [transform_parts(row) for row in rows]


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
    # Every row keeps its parts; only their format changes.
    OpKind.FORMAT: lambda state, op, memo: None,
    OpKind.TRANSFORM: _transform,
}
