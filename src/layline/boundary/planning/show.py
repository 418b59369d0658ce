"""A planned stack as lines that can be printed, written as JSON and compared with a run.

A line is one boundary, or the collectives that one compute runs itself. Equal lines of a stack are
shown once, with how often they occur.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from layline.boundary.contracts import StageKind
from layline.boundary.layout import FULL_ROWS, Layout
from layline.boundary.planning.cost import Collective, Element, planned
from layline.boundary.planning.moves import Ground
from layline.boundary.planning.reasons import reason_of
from layline.boundary.planning.records import Op, Operand, OpKind
from layline.boundary.planning.stage import StagePlan
from layline.boundary.planning.walk import Crossing, enters_partial, walk

LEGEND = {
    "F": "every row of the step",
    "A": "the rows of this rank's attention",
    "L": "those divided over attention TP",
}


@dataclass(frozen=True)
class ComputeCollectives:
    """Collectives that a model's compute runs besides the sums that boundaries plan."""

    hidden_size: int
    fed: tuple[Collective, ...] = ()
    entry: tuple[Collective, ...] = ()
    attention: tuple[Collective, ...] = ()
    ffn: tuple[Collective, ...] = ()
    head: tuple[Collective, ...] = ()


@dataclass(frozen=True)
class Step:
    """One operation of a line: its words, and the collective it is, if it is one."""

    text: str
    collective: Collective | None = None


@dataclass(frozen=True)
class Line:
    """One boundary (``exit`` and ``prepare``), or one compute's collectives (``compute``).

    ``rows`` and ``residual`` are those before and after, by their names in LEGEND.
    """

    name: str
    rows: tuple[str, str]
    owed: str | None = None
    compute: tuple[Step, ...] = ()
    exit: tuple[Step, ...] = ()
    prepare: tuple[Step, ...] = ()
    residual: tuple[str, str] | None = None
    reason: str = ""

    @property
    def steps(self) -> tuple[Step, ...]:
        """All of them, in the order in which they run."""
        return (*self.compute, *self.exit, *self.prepare)

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """Those steps that communicate."""
        return tuple(step.collective for step in self.steps if step.collective is not None)


def lines_of(
    plans: Sequence[StagePlan], ground: Ground, compute: ComputeCollectives
) -> Iterator[Line]:
    """Every line of a step with tokens, in the order in which ranks run them."""
    held: Line | None = None
    for line in _pieces(plans, ground, compute):
        if held is not None and held.compute and line.compute and held.name == line.name:
            # One stage's compute: what it runs first, and the sum at its end.
            held = replace(held, compute=(*held.compute, *line.compute))
            continue
        if held is not None:
            yield held
        held = line
    if held is not None:
        yield held


def _pieces(
    plans: Sequence[StagePlan], ground: Ground, compute: ComputeCollectives
) -> Iterator[Line]:
    writer = _Writer(ground, compute)
    known: dict[tuple[object, ...], list[Line]] = {}
    yield from writer.compute_line("sampled ids", ground.attention, compute.fed)
    yield from writer.compute_line("embedding", ground.attention, compute.entry)
    for crossing in walk(plans, ground, partial_entry=enters_partial(ground.spec, ground.kind)):
        # Deep stacks repeat a few boundaries.
        key = (id(crossing.producer), id(crossing.consumer), crossing.residual_before)
        if key not in known:
            known[key] = list(writer.lines(crossing))
        yield from known[key]


def counted(lines: Iterable[Line]) -> dict[Line, int]:
    """Distinct lines in order of first use, and how often each occurs."""
    counts: dict[Line, int] = {}
    for line in lines:
        counts[line] = counts.get(line, 0) + 1
    return counts


class _Writer:
    """Writes the lines of one kind of batch."""

    def __init__(self, ground: Ground, compute: ComputeCollectives) -> None:
        self._ground = ground
        self._compute = compute

    def lines(self, crossing: Crossing) -> Iterator[Line]:
        """The producer's own collectives, the boundary, and what the consumer's compute adds."""
        producer, leaving = crossing.producer, crossing.leaving
        exits: tuple[Step, ...] = ()
        if producer is not None and leaving is not None:
            kind = _short(producer)
            sums = [
                planned(op, self._ground.topology, self._compute.hidden_size, Element.SUMMED)
                for op in leaving.compute
            ]
            layout = producer.path(self._ground.kind).decl.output.layout
            yield from self.compute_line(kind, layout, sums, leaving.reason)
            exits, _ = self._steps(leaving.ops)
        prepare, arrives = self._steps(crossing.prepare)
        yield Line(
            name=crossing.name,
            rows=(
                self._row_name(self._rows_before(crossing)),
                self._row_name(crossing.compute_rows),
            ),
            owed=self._owed(crossing),
            exit=exits,
            prepare=prepare,
            residual=(
                self._row_name(crossing.residual_before),
                self._row_name(crossing.residual_after),
            ),
            reason=reason_of(self._ground, crossing),
        )
        own = self._compute.head
        name = "head"
        if crossing.consumer is not None:
            name = _short(crossing.consumer)
            own = self._compute.attention if name == "attn" else self._compute.ffn
        arrived = [
            replace(one, element=arrives) if one.element is Element.INPUT else one for one in own
        ]
        yield from self.compute_line(name, crossing.compute_rows, arrived)

    def compute_line(
        self, name: str, layout: Layout, collectives: Sequence[Collective], reason: str = ""
    ) -> Iterator[Line]:
        """A line for compute's own collectives, where there are any."""
        if collectives:
            rows = self._row_name(layout)
            steps = tuple(Step(f"{one.kind.value} {one.group.name}", one) for one in collectives)
            yield Line(name, (rows, rows), compute=steps, reason=reason)

    def _steps(self, ops: Sequence[Op]) -> tuple[tuple[Step, ...], Element]:
        """Steps, and the type of the compute input that they make."""
        arrives = Element.RUN
        steps = []
        for op in ops:
            collective = None
            if op.is_collective:
                element = arrives if op.operand is Operand.INPUT else Element.SUMMED
                hidden = self._compute.hidden_size
                collective = planned(op, self._ground.topology, hidden, element)
            steps.append(Step(self._text(op), collective))
            if op.kind is OpKind.UPDATE_AND_READ:
                # The fused read gives what it was given, so as not to round twice.
                arrives = Element.SUMMED
        return tuple(steps), arrives

    def _text(self, op: Op) -> str:
        if op.kind is OpKind.TAKE_RESIDUAL and op.before == op.after:
            return "the sum is the residual"
        words = [op.kind.value]
        if op.group is not None:
            words.append(op.group.name)
        if op.operand is not Operand.VALUE and op.kind is not OpKind.READ:
            words.append(op.operand.value)
        if op.before != op.after and op.kind is not OpKind.TAKE_RESIDUAL:
            words.append(f"-> {self._row_name(op.after)}")
        return " ".join(words)

    def _rows_before(self, crossing: Crossing) -> Layout:
        if crossing.producer is None:
            return self._ground.attention
        return crossing.producer.path(self._ground.kind).decl.output.layout

    def _owed(self, crossing: Crossing) -> str | None:
        if crossing.producer is None:
            return "TP" if enters_partial(self._ground.spec, self._ground.kind) else None
        owed = crossing.producer.path(self._ground.kind).decl.output.owed
        return None if owed is None else owed.name

    def _row_name(self, layout: Layout) -> str:
        if layout == FULL_ROWS:
            return "F"
        return "A" if layout == self._ground.attention else "L"


def _short(plan: StagePlan) -> str:
    return "attn" if plan.declaration.kind is StageKind.ATTN else "ffn"
