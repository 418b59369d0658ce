"""A toy stack on simulated ranks, and the same stack computed by hand on one.

Every stage works on each row alone, but adds something that only this row's token gets, so that a
row in another's place shows. Rows of padding come out of compute as NaN.

Shape suffixes: N rows, H hidden, I inner columns.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from layline.boundary import StageBoundary, StageKind, get_forward, make_stages
from layline.boundary.contracts import ProducerReduction, StageDeclaration
from layline.boundary.layout import BatchVariant, Layout, TokenAxis
from layline.boundary.mesh import Mesh, MeshSpec, make_mesh
from layline.boundary.planning.moves import Ground
from layline.boundary.residual import batch
from layline.boundary.rows import RankRows, StepRows, kind_of, rank_rows
from layline.comm.recording import Recorder, record_groups
from layline.comm.simulated import run_ranks
from layline.layers.norm import RMSNorm
from layline.topology import GroupName, Topology
from support.stacks import STAGES

HIDDEN, INNER = 8, 24
Token = tuple[int, int, int]
"""Attention DP rank, CP rank (0 outside context-parallel batches), row."""


@functools.cache
def _random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def embedding(tokens: Sequence[Token]) -> torch.Tensor:
    """What enters the stack, [N, H]."""
    return _per_token(0, tokens)


def _per_token(stage: int, tokens: Sequence[Token]) -> torch.Tensor:
    if not tokens:
        return torch.empty(0, HIDDEN)
    seeds = (1 + hash((stage, *token)) % 2**31 for token in tokens)
    return torch.stack([_random(HIDDEN, seed=seed) for seed in seeds])


@functools.cache
def norm_of(stage: int) -> RMSNorm:
    """The norm of a stage's input; the final norm's after the last."""
    return RMSNorm(_random(HIDDEN, seed=7000 + stage), 1e-5)


def part(stage: int, x_NH: torch.Tensor, tokens: Sequence[Token], share: int, of: int) -> Any:
    """Share ``share`` of ``of`` of a stage's output, [N, H]: the shares add up to the whole."""
    columns = slice(share * INNER // of, (share + 1) * INNER // of)
    up_HI = _random(HIDDEN, INNER, seed=8000 + stage)[:, columns]
    down_IH = _random(INNER, HIDDEN, seed=9000 + stage)[columns]
    out_NH = torch.tanh(x_NH @ up_HI) @ down_IH * 0.3
    return out_NH + _per_token(stage + 1, tokens) / of


def tail(x_NH: torch.Tensor) -> torch.Tensor:
    """The replicated component of a LOCAL_TAIL stage."""
    return torch.sin(x_NH) * 0.5


def has_tail(declaration: StageDeclaration) -> bool:
    """True for a stage whose compute adds :func:`tail`."""
    return declaration.reduction is ProducerReduction.LOCAL_TAIL


@dataclass
class Reference:
    """The stack by hand: residual [N, H] before each stage and at the end, and the final norm."""

    tokens: list[Token]
    residuals: list[torch.Tensor] = field(default_factory=list)
    result: torch.Tensor | None = None

    def rows(self, of: torch.Tensor, tokens: Sequence[Token]) -> torch.Tensor:
        """The rows of ``of`` that belong to these tokens."""
        return of[[self.tokens.index(token) for token in tokens]]


def extra(stage: int, tokens: Sequence[Token]) -> torch.Tensor:
    """Something to add to a stage's output, [N, H]."""
    return _per_token(500 + stage, tokens)


def reference(names: Sequence[str], step: StepRows, extras: Sequence[int] = ()) -> Reference:
    """Every token of the step on one rank, without boundaries.

    :func:`extra` is added to the output of the stages ``extras``.
    """
    found = Reference(all_tokens(step))
    residual = embedding(found.tokens)
    found.residuals.append(residual)
    for stage, name in enumerate(names):
        declaration = STAGES[name]
        x = norm_of(stage)(residual)
        y = part(stage, x, found.tokens, 0, 1)
        if has_tail(declaration):
            y = y + tail(x)
        if declaration.transform is not None:
            y = declaration.transform.apply(y)
        if stage in extras:
            y = y + extra(stage, found.tokens)
        weight = getattr(declaration.update, "weight", 1.0)
        residual = residual + weight * y
        found.residuals.append(residual)
    found.result = norm_of(len(names))(residual)
    return found


def all_tokens(step: StepRows) -> list[Token]:
    """The step's tokens, each once, in slot order."""
    parallel = step.variant is BatchVariant.CONTEXT_PARALLEL
    return [
        (dp, cp, row)
        for dp, counts in enumerate(step.counts)
        for cp, count in enumerate(counts if parallel else counts[:1])
        for row in range(count)
    ]


@dataclass
class Seat:
    """One rank in one step: its tokens on each layout."""

    topology: Topology
    step: StepRows
    rows: RankRows

    @property
    def own(self) -> list[Token]:
        """Tokens of the rank's attention rows."""
        here = self.topology.coordinates
        cp = here.attn_cp if self.step.variant is BatchVariant.CONTEXT_PARALLEL else 0
        return [(here.attn_dp, cp, row) for row in range(self.rows.own)]

    @property
    def every(self) -> list[Token | None]:
        """Tokens of all rows: each slot in order, None where it is padding."""
        parallel = self.step.variant is BatchVariant.CONTEXT_PARALLEL
        slots = [
            (dp, cp, count)
            for dp, counts in enumerate(self.step.counts)
            for cp, count in enumerate(counts if parallel else counts[:1])
        ]
        tokens: list[Token | None] = []
        for (dp, cp, count), size in zip(slots, self.rows.slots, strict=True):
            tokens += [(dp, cp, row) if row < count else None for row in range(size)]
        return tokens

    @property
    def sliced(self) -> list[Token | None]:
        """Tokens of the rank's slice over attention TP."""
        size, index = self.rows.shard, self.topology.coordinates.attn_tp
        own: list[Token | None] = list(self.own[index * size : (index + 1) * size])
        return own + [None] * (size - len(own))

    def on(self, layout: Layout, ground: Ground) -> list[Token | None]:
        """Tokens of a layout's rows."""
        if TokenAxis.ATTN_TP_SCATTER in layout.sharded:
            return self.sliced
        return list(self.own) if layout == ground.attention else self.every


class ToyRank:
    """One rank's compute and boundaries."""

    def __init__(
        self, spec: MeshSpec, names: Sequence[str], step: StepRows, groups: Any, **facts: Any
    ) -> None:
        topology = spec.topology
        self.spec, self.names = spec, names
        self.dtype = torch.float32
        self.recorder = Recorder()
        self.mesh = make_mesh(spec, *record_groups(groups, self.recorder))
        rows = rank_rows(step, topology, **facts)
        self.seat = Seat(topology, step, rows)
        kind = kind_of(step, topology)
        self.ground = Ground(spec, kind)
        self.batch: Any = types.SimpleNamespace(residual_stream=None, kind=kind, rows=rows)
        self.stages = boundaries(names, self.mesh)

    def start(self, *, partial: bool = False) -> torch.Tensor:
        """Start the stream: what enters the stack. ``partial`` leaves the embedding's sum."""
        batch.start(self.batch, partial=partial)
        tokens = self.seat.own
        x = embedding(tokens)
        if partial:
            size, rank = self.spec.topology.tp, self.spec.topology.rank
            mine = [sum(token) % size == rank for token in tokens]
            x[[not here for here in mine]] = 0
        return x

    def finish(self, hidden: Any) -> torch.Tensor:
        """Leave the stack through the final norm."""
        return self.finish_with(hidden, norm_of(len(self.names)))

    def finish_with(self, hidden: Any, norm: Any, **options: Any) -> torch.Tensor:
        """Leave the stack through another norm, or with its result captured."""
        return batch.norm(hidden, self.batch, norm, skip_empty=True, **options)

    def run(self, hidden: Any, first: int = 0, last: int | None = None, **prepare: Any) -> Any:
        """Stages ``first`` to ``last``; attention inputs are prepared with ``prepare``."""
        for index in range(first, len(self.names) if last is None else last):
            boundary = self.stages[index]
            attention = boundary.declaration.kind is StageKind.ATTN
            options = prepare if attention else {}
            x = boundary.prepare(hidden, self.batch, **options)
            hidden = self.leave(index, x)
        return hidden

    def leave(self, index: int, x: torch.Tensor) -> Any:
        """Compute stage ``index`` on ``x`` and leave its output."""
        boundary = self.stages[index]
        if boundary.declaration.reduction is ProducerReduction.PARTIAL:
            return boundary.finish(self.compute(index, x), self.batch)
        with boundary.exit(self.batch) as output:
            y = self.compute(index, x)
        return output.finish(y)

    def compute(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """The stage's output as its contract asks for it, NaN on padding rows."""
        declaration = self.stages[index].declaration
        decl = self.stages[index].plan.path(self.batch.kind).decl
        tokens = self.seat.on(decl.input.layout, self.ground)
        assert x.shape == (len(tokens), HIDDEN), f"stage {index}: input {tuple(x.shape)}"
        real = [row for row, token in enumerate(tokens) if token is not None]
        assert torch.isfinite(x[real]).all(), f"stage {index}: padding reached a real row"
        if decl.input.layout not in (self.ground.attention, self.ground.local):
            padding = [row for row, token in enumerate(tokens) if token is None]
            assert (x[padding] == 0).all(), f"stage {index}: padding of joined rows is not zero"
        attention = declaration.kind is StageKind.ATTN
        axis = GroupName.ATTN_TP if attention else GroupName.TP
        if self.ground.variant is BatchVariant.SEQUENCE_PARALLEL:
            return self._scatter(index, x, declaration)
        if decl.input.layout != decl.output.layout:
            # Latent input: attention gathers the slices itself.
            x = self.mesh.compute_groups[GroupName.TP].all_gather(x)[: self.seat.rows.own]
            tokens = list(self.seat.own)
        alone = not attention and self.spec.topology.dense_tp == 1
        of = 1 if alone else self.spec.topology.size(axis)
        share = self.spec.topology.index_in(axis) if of > 1 else 0
        y = _padded(lambda x, tokens: part(index, x.float(), tokens, share, of), x, tokens)
        y = y.to(self.dtype)
        reduces = of > 1 and declaration.reduction is not ProducerReduction.PARTIAL
        flags = get_forward()
        skips = flags.fuse_mlp_allreduce or flags.mlp_reduce_scatter
        if reduces and not skips and y.shape[0]:
            y = self.mesh.compute_groups[axis].all_reduce(y)
        if has_tail(declaration) and (share == 0 or not skips):
            y = y + tail(x)
        return y

    def _scatter(self, index: int, x: torch.Tensor, declaration: StageDeclaration) -> torch.Tensor:
        """Linear layers of a sequence-parallel batch: gather, compute, scatter."""
        group, rows = self.mesh.compute_groups[GroupName.TP], self.seat.rows
        x = group.all_gather(x)[: rows.own]
        y = part(index, x, self.seat.own, group.rank, group.size)
        if has_tail(declaration) and group.rank == 0:
            y = y + tail(x)
        padded = torch.full((rows.shard * group.size, HIDDEN), float("nan"))
        padded[: rows.own] = y
        return group.reduce_scatter(padded)


def _padded(
    compute: Callable[[torch.Tensor, list[Token]], torch.Tensor],
    x: torch.Tensor,
    tokens: Sequence[Token | None],
) -> torch.Tensor:
    y = torch.full((len(tokens), HIDDEN), float("nan"))
    real = [row for row, token in enumerate(tokens) if token is not None]
    y[real] = compute(x[real], [token for token in tokens if token is not None])
    return y


def boundaries(names: Sequence[str], mesh: Mesh) -> tuple[StageBoundary, ...]:
    """The stack's boundaries."""
    items = [(STAGES[name], norm_of(stage)) for stage, name in enumerate(names)]
    return make_stages(*items, terminal=True, mesh=mesh)


def on_ranks(
    spec: MeshSpec,
    names: Sequence[str],
    step: StepRows,
    walk: Callable[[ToyRank], Any],
    **facts: Any,
) -> list[Any]:
    """``walk(rank)`` on every simulated rank, memory that is not written being NaN."""

    def run(topology: Topology, groups: Any) -> Any:
        here = dataclasses.replace(spec, topology=topology)
        return walk(ToyRank(here, names, step, groups, **facts))

    with poisoned():
        return run_ranks(spec.topology, run)


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Uninitialised memory is NaN inside."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.isnan(torch.empty(3)).all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def each_group(topology: Topology) -> Iterator[tuple[GroupName, tuple[int, ...]]]:
    """Every group of more than one rank once."""
    for name in GroupName:
        if topology.size(name) > 1:
            for ranks in sorted({topology.at(rank).group(name) for rank in range(topology.tp)}):
                yield name, ranks
