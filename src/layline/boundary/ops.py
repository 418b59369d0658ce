"""Row movement and collectives: the function that carries out each planned operation.

A step reads and changes a :class:`Transit`: the value on its way, the residual, and the compute
input. Padding rows are written as zeros wherever a step makes them.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from layline.boundary.layout import TokenAxis
from layline.boundary.mesh import Mesh
from layline.boundary.planning.records import Op, Operand, OpKind, Writers
from layline.boundary.residual import StageRead, StageUpdate
from layline.boundary.rows import RankRows
from layline.comm.groups import Group
from layline.topology import GroupName


class Transit:
    """What one boundary works on: ``value`` and ``residual`` before, ``input`` after the read."""

    __slots__ = ("input", "norm", "read", "residual", "rows", "update", "value")

    def __init__(
        self,
        rows: RankRows | None,
        value: Any,
        residual: Any = None,
        update: StageUpdate | None = None,
        read: StageRead | None = None,
        norm: Any = None,
    ) -> None:
        self.rows: Any = rows
        self.value = value
        self.residual = residual
        self.update: Any = update
        self.read: Any = read
        self.norm = norm
        self.input: Any = None


Step = Callable[[Transit], None]


def bind(
    ops: tuple[Op, ...], mesh: Mesh, transform: Callable[[Any], Any] | None = None
) -> tuple[Step, ...]:
    """One function for each operation; ``transform`` is what a TRANSFORM applies."""
    return tuple(
        _transform(transform) if op.kind is OpKind.TRANSFORM else _bind_one(op, mesh) for op in ops
    )


def _transform(apply: Callable[[Any], Any] | None) -> Step:
    assert apply is not None, "a planned transform comes with its declaration"

    def step(transit: Transit) -> None:
        transit.value = apply(transit.value)

    return step


def _bind_one(op: Op, mesh: Mesh) -> Step:
    if op.kind is OpKind.READ:
        return _read if op.operand is Operand.RESIDUAL else _read_value
    plain = _RESIDUAL_STEPS.get(op.kind)
    if plain is not None:
        return plain
    if op.kind is OpKind.JOIN:
        return _join if mesh.topology.coordinates.attn_tp == 0 else _cast_to_residual
    if op.kind is OpKind.JOIN_SLICE:
        return _join_slice(mesh.topology.coordinates.attn_tp)
    if op.kind is OpKind.TAKE_RESIDUAL:
        return _take_slot if op.before != op.after else _take_all
    return _on_operand(op.operand, _ROW_STEPS[op.kind](op, mesh))


def _on_operand(operand: Operand, change: Callable[[Any, Any], Any]) -> Step:
    name = operand.value
    get = attrgetter(name)

    def step(transit: Transit) -> None:
        setattr(transit, name, change(get(transit), transit.rows))

    return step


def pad_rows(x: Any, rows: int) -> Any:
    """``x`` [n, hidden] with zero rows after it, up to ``rows`` in all."""
    count = x.shape[0]
    if count == rows:
        return x
    out = x.new_zeros((rows, x.shape[1]))
    if count:
        out[:count] = x
    return out


# Steps on the residual.


def _enter(transit: Transit) -> None:
    # A stream that is already written entered the stack elsewhere; its residual stands.
    if transit.residual is None:
        transit.residual = transit.read.enter(transit.value)


def _read(transit: Transit) -> None:
    transit.input, transit.residual = transit.read.read(transit.residual, transit.norm)


def _read_value(transit: Transit) -> None:
    # The sum holds the residual already; this rank keeps its own rows of it as the residual.
    transit.input, _ = transit.read.read(transit.value, transit.norm)


def _update_and_read(transit: Transit) -> None:
    transit.input, transit.residual = transit.read.update_and_read(
        transit.update, transit.value, transit.residual, transit.norm
    )


def _format(transit: Transit) -> None:
    transit.input = transit.read.format(transit.input)


def _update(transit: Transit) -> None:
    transit.value = transit.update.apply(transit.value, transit.residual)


_RESIDUAL_STEPS: dict[OpKind, Step] = {
    OpKind.ENTER: _enter,
    OpKind.FORMAT: _format,
    OpKind.UPDATE: _update,
    OpKind.UPDATE_AND_READ: _update_and_read,
}


def _join(transit: Transit) -> None:
    transit.value = transit.update.apply(transit.value, transit.residual)


def _cast_to_residual(transit: Transit) -> None:
    # The rank that adds the residual sends its dtype; the sum needs one dtype on all ranks.
    if transit.value.dtype != transit.residual.dtype:
        transit.value = transit.value.to(transit.residual.dtype)


def _join_slice(index: int) -> Step:
    def step(transit: Transit) -> None:
        residual, rows = transit.residual, transit.rows
        value = transit.value.to(residual.dtype)
        if value is transit.value:
            value = value.clone()
        first = index * rows.shard
        count = min(rows.shard, max(0, rows.own - first))
        value[first : first + count] += residual[:count]
        transit.value = value

    return step


def _take_slot(transit: Transit) -> None:
    # A copy: the gathered buffer is freed with the layer, and the residual outlives it.
    rows = transit.rows
    transit.residual = transit.value[rows.offset : rows.offset + rows.own].clone()


def _take_all(transit: Transit) -> None:
    transit.residual = transit.value


# Steps on rows. Each factory gives ``change(x, rows)``, [n, hidden] to [m, hidden].

Change = Callable[[Any, RankRows], Any]


def _slice(op: Op, mesh: Mesh) -> Change:
    if TokenAxis.ATTN_TP_SCATTER not in op.after.sharded - op.before.sharded:
        return lambda x, rows: x[rows.offset : rows.offset + rows.own]
    index = mesh.topology.coordinates.attn_tp

    def change(x: Any, rows: RankRows) -> Any:
        first = index * rows.shard
        own = x[first : min(first + rows.shard, rows.own)] if first < rows.own else x[:0]
        return pad_rows(own, rows.shard)

    return change


def _place(op: Op, mesh: Mesh) -> Change:
    here = mesh.topology.coordinates
    writes = {
        Writers.ALL: True,
        Writers.FIRST_TP: here.attn_tp == 0,
        Writers.FIRST_CP: here.attn_cp == 0,
        Writers.FIRST_CP_TP: here.attn_cp == 0 and here.attn_tp == 0,
    }[op.writers or Writers.ALL]

    def change(x: Any, rows: RankRows) -> Any:
        buffer = x.new_zeros((rows.total, x.shape[1]))
        if writes and rows.own:
            buffer[rows.offset : rows.offset + rows.own] = x
        return buffer

    return change


def _pad(op: Op, mesh: Mesh) -> Change:
    return lambda x, rows: pad_rows(x, rows.slot)


def _all_reduce(op: Op, mesh: Mesh) -> Change:
    group = _group(op, mesh)
    if not op.quantised:
        return lambda x, rows: group.all_reduce(x)
    from layline.boundary.quantised import quantised_all_reduce

    return lambda x, rows: quantised_all_reduce(x, group) if rows.prefill else group.all_reduce(x)


def _all_gather(op: Op, mesh: Mesh) -> Change:
    group = _group(op, mesh)
    if op.group is GroupName.ATTN_TP:
        return lambda x, rows: group.all_gather(x)[: rows.own]
    return lambda x, rows: group.all_gather(x)


def _reduce_scatter(op: Op, mesh: Mesh) -> Change:
    group = _group(op, mesh)
    size = group.size
    if TokenAxis.ATTN_TP_SCATTER not in op.after.sharded:
        return lambda x, rows: group.reduce_scatter(x)[: rows.own]
    if size == mesh.topology.attn_tp:
        return lambda x, rows: group.reduce_scatter(pad_rows(x, rows.shard * size))
    # Slots are padded alike, so the shares are the slices of each slot in rank order.
    return lambda x, rows: group.reduce_scatter(x)


def _reduce_scatter_v(op: Op, mesh: Mesh) -> Change:
    group = _group(op, mesh)
    return lambda x, rows: group.reduce_scatter_v(x, rows.slots)[: rows.own]


_ROW_STEPS: dict[OpKind, Callable[[Op, Mesh], Change]] = {
    OpKind.SLICE: _slice,
    OpKind.PLACE: _place,
    OpKind.PAD: _pad,
    OpKind.ALL_REDUCE: _all_reduce,
    OpKind.ALL_GATHER: _all_gather,
    OpKind.REDUCE_SCATTER: _reduce_scatter,
    OpKind.REDUCE_SCATTER_V: _reduce_scatter_v,
}


def _group(op: Op, mesh: Mesh) -> Group:
    assert op.group is not None
    return mesh.groups[op.group]
