"""Run a planned stack on every rank of a mesh without tensors, and check what it does.

Collectives join and add lists of rows exactly as real ones do. At each stage the compute input must
be the norm of every part that the residual should hold by then, each of them once, for the rows
that the stage is declared to compute on, in order. Whatever else a rank holds is padding: compute
makes poison of it, which would show in any sum it joined.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from layline.boundary.contracts import StageDeclaration, StageKind
from layline.boundary.layout import BatchVariant, Layout, TokenAxis
from layline.boundary.mesh import MeshSpec
from layline.boundary.planning.detours import capture_moves, detours
from layline.boundary.planning.exits import ExitPlan
from layline.boundary.planning.moves import Ground
from layline.boundary.planning.records import Op
from layline.boundary.planning.resolve import ffn_is_local
from layline.boundary.planning.simulated_rows import (
    POISONED,
    Memo,
    RankState,
    Row,
    Rows,
    SimulationError,
    contributed,
    difference,
    every_share,
    norm_row,
    norm_rows,
    remembered,
    run_collective,
    share_once,
)
from layline.boundary.planning.simulated_steps import LOCAL_STEPS
from layline.boundary.planning.stage import StagePlan
from layline.boundary.planning.walk import Crossing, walk
from layline.boundary.rows import BatchKind, StepRows, kind_of, rank_rows
from layline.topology import GroupName

Held = tuple[Rows, Rows | None, Rows]
"""Value, residual and input of one rank."""
Tokens = list[Any]
"""The token of each row, None for padding."""


@dataclass
class SimulationResult:
    """What a simulation ran.

    ``collectives`` are those of the walk in order; ``checked_rows`` counts rows of all ranks.
    ``ways`` holds each way into a stage that was taken, by the stage's plan.
    """

    collectives: list[Op]
    checked_rows: int
    stages: int
    ways: set[tuple[int, str]]


class Simulation:
    """A mesh of simulated ranks walking one stack.

    ``apply`` carries out one operation; tests replace it to plant faults.
    """

    def __init__(self, spec: MeshSpec, step: StepRows) -> None:
        self.spec = spec
        self.step = step
        self.kind: BatchKind = kind_of(step, spec.topology)
        self.ground = Ground(spec, self.kind)
        self.states = [
            RankState(here, rank_rows(step, here))
            for here in map(spec.topology.at, range(spec.topology.tp))
        ]
        self.result = SimulationResult([], 0, 0, set())
        # Every stage so far, and how many shares of its part a residual must hold by now.
        self._stages: list[tuple[StageDeclaration, int]] = []
        self._entry_shares = 1
        self._full: Tokens | None = None
        self._known_tokens: dict[tuple[int, ...], Tokens] = {}
        # Kept, because every rank asks at every stage.
        self._attention_rows = self.ground.attention
        self._positions: dict[GroupName, list[int]] = {}

    def run(
        self, plans: Sequence[StagePlan], *, partial_entry: bool = False, all_ways: bool = False
    ) -> SimulationResult:
        """Walk the stages in order and leave through a final norm.

        With ``all_ways`` each stage is also entered in every other way that is prepared for what
        arrives there, and the residual is captured before it.

        Raises SimulationError when a value is not what its declaration says.
        """
        self._enter(partial=partial_entry)
        crossings = walk(
            plans, self.ground, partial_entry=partial_entry, has_tokens=self.step.total > 0
        )
        for index, crossing in enumerate(crossings):
            if crossing.producer is not None and crossing.leaving is not None:
                self._leave(crossing.producer, crossing.leaving)
            where = "final norm"
            if crossing.consumer is not None:
                where = f"input of stage {index} ({crossing.consumer.declaration.kind.value})"
                self.result.stages += 1
                self.result.ways.add((id(crossing.consumer), "as planned"))
            arrived = self._hold()
            for op in crossing.prepare:
                self.apply(op)
            self._check(crossing.compute_rows, where)
            if all_ways:
                prepared, walked = self._hold(), self.result.collectives
                self.result.collectives = []
                self._capture(crossing, where, prepared)
                self._take_detours(crossing, where, arrived)
                self._restore(prepared)
                self.result.collectives = walked
        return self.result

    def _take_detours(self, crossing: Crossing, where: str, arrived: list[Held]) -> None:
        """Enter the stage in each other way, from what had arrived."""
        for detour in detours(self.ground, crossing):
            self._restore(arrived)
            for op in detour.first:
                self.apply(op)
            if detour.writes:
                for state in self.states:
                    state.residual = state.value
            for op in detour.then:
                self.apply(op)
            self._check(crossing.compute_rows, f"{where}, {detour.name}")
            self.result.ways.add((id(crossing.consumer), detour.name))

    def _capture(self, crossing: Crossing, where: str, prepared: list[Held]) -> None:
        """Bring the updated residual where captures get it, and check it there."""
        for ops, rows in capture_moves(self.ground, crossing):
            self._restore(prepared)
            for op in ops:
                self.apply(op)
            for state in self.states:
                state.input = norm_rows(state.residual or [])
            self._check(rows, f"{where}, captured on [{rows}]")
            self.result.ways.add((id(crossing.consumer), f"captured on [{rows}]"))

    def _hold(self) -> list[Held]:
        # Lists of rows are values: nothing changes one that is held.
        return [(state.value, state.residual, state.input) for state in self.states]

    def _restore(self, held: list[Held]) -> None:
        for state, rows in zip(self.states, held, strict=True):
            state.value, state.residual, state.input = rows

    def apply(self, op: Op) -> None:
        """Carry out one operation on every rank."""
        if op.is_collective:
            self.result.collectives.append(op)
            self._collective(op)
            return
        memo: Memo = {}
        step = LOCAL_STEPS[op.kind]
        for state in self.states:
            step(state, op, memo)

    def _enter(self, *, partial: bool) -> None:
        # A partial embedding is a sum over TP: every rank has its share of each row.
        self._entry_shares = self.spec.topology.tp if partial else 1
        for state in self.states:
            once = share_once(state.topology.rank if partial else 0)
            tokens = self._slot_tokens(state, padded=False)
            state.value = [{("embed", token): once} for token in tokens]

    def _leave(self, plan: StagePlan, leaving: ExitPlan) -> None:
        self._compute(plan.declaration, plan.path(self.kind).decl.output.layout)
        for op in (*leaving.compute, *leaving.ops):
            self.apply(op)
        if leaving.writes:
            for state in self.states:
                state.residual = state.value

    def _compute(self, declaration: StageDeclaration, layout: Layout) -> None:
        """Every rank's partial output: one share for each rank that shares a token's compute."""
        stage = len(self._stages)
        if declaration.kind is StageKind.ATTN:
            shared, axis = self.spec.topology.attn_tp, GroupName.ATTN_TP
        else:
            local = ffn_is_local(self.ground)
            shared, axis = (1 if local else self.spec.topology.tp), GroupName.TP
        # Linear layers of a sequence-parallel batch gather their rows themselves.
        gathers = self.kind.variant is BatchVariant.SEQUENCE_PARALLEL
        rows = self._attention_rows if gathers else layout
        positions = self._positions_in(axis)
        memo: Memo = {}

        def parts_of(tokens: Tokens) -> list[tuple[str, int, Any]]:
            return [("out", stage, token) for token in tokens]

        for state in self.states:
            state.producer = declaration
            tokens = self._layout_tokens(state, rows)
            parts = remembered(memo, parts_of, tokens)
            once = share_once(positions[state.topology.rank] if shared > 1 else 0)
            state.value = [
                POISONED if token is None else {part: once}
                for token, part in zip(tokens, parts, strict=True)
            ]
        self._stages.append((declaration, shared))

    def _positions_in(self, axis: GroupName) -> list[int]:
        """Every rank's position in its group of that name."""
        known = self._positions.get(axis)
        if known is None:
            known = self._positions[axis] = [s.topology.index_in(axis) for s in self.states]
        return known

    def _expected(self, token: Any) -> Row:
        parts: Row = {("embed", token): every_share(self._entry_shares)}
        for stage, (declaration, shared) in enumerate(self._stages):
            parts |= contributed({("out", stage, token): every_share(shared)}, declaration)
        return parts

    def _check(self, layout: Layout, where: str) -> None:
        """Compare every rank's compute input with the rows of ``layout``."""
        memo: Memo = {}
        sliced = TokenAxis.ATTN_TP_SCATTER in layout.sharded
        fault_in = self._fault if sliced else self._fault_or_padding
        for state in self.states:
            wanted = self._layout_tokens(state, layout)
            if len(state.input) != len(wanted):
                raise SimulationError(
                    f"{where}: rank {state.topology.rank} holds {len(state.input)} rows, expected "
                    f"{len(wanted)} of layout [{layout}]"
                )
            fault = remembered(memo, fault_in, state.input, wanted)
            if fault is not None:
                raise SimulationError(f"{where}: rank {state.topology.rank}, {fault}")
            self.result.checked_rows += remembered(memo, _num_real, wanted)

    def _fault(self, found: Rows, wanted: Tokens) -> str | None:
        """What is wrong with the first row that is not its token's, None where all are right."""
        for position, (row, token) in enumerate(zip(found, wanted, strict=True)):
            if token is None:
                continue
            parts = self._expected(token)
            if row != norm_row(parts):
                return f"row {position}, token {token}: {difference(row, parts)}"
        return None

    def _fault_or_padding(self, found: Rows, wanted: Tokens) -> str | None:
        """The same, where padding must be zeros: rows of several ranks are computed together."""
        for position, (row, token) in enumerate(zip(found, wanted, strict=True)):
            if token is None and row:
                return f"row {position} is padding, but holds {row}; expected zeros"
        return self._fault(found, wanted)

    def _slot_tokens(self, state: RankState, *, padded: bool) -> Iterator[Any]:
        slot = self._slot_of(state)
        for index in range(state.rows.slot if padded else state.rows.own):
            yield (*slot, index) if index < state.rows.own else None

    def _layout_tokens(self, state: RankState, layout: Layout) -> Tokens:
        """The tokens that a rank's rows of this layout must be, None where they are padding."""
        scattered = TokenAxis.ATTN_TP_SCATTER in layout.sharded
        if scattered or layout == self.ground.attention:
            key = (state.topology.rank,) if scattered else self._slot_of(state)
            if key not in self._known_tokens:
                self._known_tokens[key] = self._own_tokens(state, scattered=scattered)
            return self._known_tokens[key]
        if self._full is None:
            self._full = self._every_token()
        return self._full

    def _own_tokens(self, state: RankState, *, scattered: bool) -> Tokens:
        own = list(self._slot_tokens(state, padded=False))
        if not scattered:
            return own
        shard, index = state.rows.shard, state.topology.coordinates.attn_tp
        own = own[index * shard : (index + 1) * shard]
        return own + [None] * (shard - len(own))

    def _slot_of(self, state: RankState) -> tuple[int, int]:
        """The slot in the global buffer that a rank's rows belong to."""
        here = state.topology.coordinates
        parallel = self.kind.variant is BatchVariant.CONTEXT_PARALLEL
        return (here.attn_dp, here.attn_cp if parallel else 0)

    def _every_token(self) -> Tokens:
        """Every slot in order, as the first rank of each knows its own."""
        seen: set[tuple[int, int]] = set()
        tokens: Tokens = []
        for state in self.states:
            slot = self._slot_of(state)
            if slot not in seen:
                seen.add(slot)
                tokens.extend(self._slot_tokens(state, padded=True))
        return tokens

    def _collective(self, op: Op) -> None:
        assert op.group is not None
        name = op.operand.value
        done: set[int] = set()
        for state in self.states:
            if state.topology.rank in done:
                continue
            ranks = state.topology.group(op.group)
            done.update(ranks)
            members = [self.states[rank % self.spec.topology.tp] for rank in ranks]
            before = [getattr(member, name) for member in members]
            for member, rows in zip(members, run_collective(op, members, before), strict=True):
                setattr(member, name, rows)


def _num_real(tokens: Tokens) -> int:
    return sum(token is not None for token in tokens)
