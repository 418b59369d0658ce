"""Run the planned operations that turn a producer's output into a consumer's input."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from layline.boundary.layout import Layout
from layline.boundary.mesh import Mesh
from layline.boundary.ops import Step, Transit, bind
from layline.boundary.planning.edge import PreparePlan
from layline.boundary.planning.moves import Ground, move
from layline.boundary.planning.records import Op, Operand, OpKind, Place
from layline.boundary.residual import StageUpdate
from layline.boundary.residual.stream import Contribution, ResidualStream
from layline.errors import StreamError
from layline.topology import GroupName

NO_PRODUCER = (
    "an output is pending, but this stage's declaration names no previous stage that leaves one; "
    "give make_stages the actual producer as previous"
)
NOT_PARTIAL = (
    "the embedding left its sum, start(partial=True), but only an input-scattered batch has a path "
    "that completes it"
)
NOT_ENTERED = "this stage follows another one, but the residual stream is still initial"


@dataclass(frozen=True, slots=True)
class CaptureMoves:
    """Where captured residuals go: back to the producer's rows, and on to the compute's rows.

    ``allocates`` tells that the first move gathers, so that its result is nobody else's;
    ``untouched`` that the following local stage never writes to the residual.
    """

    to_producer: tuple[Step, ...]
    to_compute: tuple[Step, ...]
    allocates: bool
    untouched: bool


@dataclass(frozen=True, slots=True)
class BoundPrepare:
    """One prepare plan with its functions, for a residual that arrives on ``source`` rows.

    ``entry_sum`` completes what the embedding left, for a capture.
    """

    source: Layout
    entry: tuple[Step, ...]
    entry_partial: tuple[Step, ...] | None
    entry_sum: tuple[Step, ...]
    written: tuple[Step, ...]
    complete: tuple[Step, ...] | None
    declared: tuple[Step, ...] | None
    residual_rows: Layout
    captures: CaptureMoves
    follows: bool
    expected: StageUpdate | None

    def pick(
        self, stream: ResidualStream, contribution: Contribution | None, transit: Transit
    ) -> tuple[Step, ...]:
        """The steps for what has arrived, a dynamic sum's first. Nothing has run yet."""
        if contribution is None:
            if stream.residual is not None:
                return self.written
            if self.follows:
                raise StreamError(NOT_ENTERED)
            if not stream.partial:
                return self.entry
            if self.entry_partial is None:
                raise StreamError(NOT_PARTIAL)
            return self.entry_partial
        if self.complete is None:
            raise StreamError(NO_PRODUCER)
        update = contribution.update
        if update is not self.expected:
            _require_capabilities(update, self.expected)
        transit.value = contribution.value
        transit.update = update
        owed = contribution.owed
        if owed is None:
            return self.complete
        if owed.declared:
            if self.declared is None:
                raise StreamError(
                    f"an output is pending that owes {owed.reason}, but this stage's previous "
                    "declares no such sum; both neighbours must describe each other"
                )
            return self.declared
        return (*owed.steps, *self.complete)


def bind_prepare(
    plan: PreparePlan,
    ground: Ground,
    mesh: Mesh,
    expected: StageUpdate | None,
    *,
    follows: bool,
    untouched: bool,
) -> BoundPrepare:
    """Bind one prepare plan. ``expected`` is the update that the declared producer applies."""
    producer_rows = ground.attention if plan.edge.producer is None else plan.edge.producer.handoff
    back = move(ground, plan.residual_rows, producer_rows, Operand.RESIDUAL)
    onward = move(ground, plan.residual_rows, plan.edge.consumer.layout, Operand.RESIDUAL)
    return BoundPrepare(
        source=plan.edge.residual_source,
        entry=bind(plan.entry, mesh),
        entry_partial=None if plan.entry_partial is None else bind(plan.entry_partial, mesh),
        entry_sum=() if plan.entry_partial is None else bind((_entry_sum(ground),), mesh),
        written=bind(plan.written, mesh),
        complete=None if plan.complete is None else bind(plan.complete, mesh),
        declared=None if plan.declared is None else bind(plan.declared, mesh),
        residual_rows=plan.residual_rows,
        captures=CaptureMoves(
            to_producer=bind(back, mesh),
            to_compute=bind(onward, mesh),
            allocates=any(op.kind is OpKind.ALL_GATHER for op in back),
            untouched=untouched,
        ),
        follows=follows,
        expected=expected,
    )


def _entry_sum(ground: Ground) -> Op:
    """Completes what the embedding left, for a capture of it."""
    rows, group = ground.attention, GroupName.TP
    return Op(OpKind.ALL_REDUCE, Place.PREPARE, Operand.VALUE, group, rows, rows)


def capture_entry(
    capture: Callable[..., None], bound: BoundPrepare, transit: Transit, *, partial: bool
) -> None:
    """Hand what enters the stack to a collector, a partial one completed on a copy."""
    if not partial:
        capture(transit.value, owned=False)
        return
    whole = Transit(transit.rows, transit.value.clone())
    for step in bound.entry_sum:
        step(whole)
    capture(whole.value, owned=True)


def run_capture(
    capture: Callable[..., None], moves: tuple[Step, ...], transit: Transit, *, owned: bool
) -> None:
    """Hand the updated residual, moved by ``moves``, to a collector."""
    moved = Transit(transit.rows, None, transit.residual)
    for step in moves:
        step(moved)
    capture(moved.residual, owned=owned)


def _require_capabilities(actual: StageUpdate, expected: StageUpdate | None) -> None:
    """The paths were planned for the declared update's capabilities, not for another's."""
    if expected is not None and (actual.plain, actual.at_producer) == (
        expected.plain,
        expected.at_producer,
    ):
        return
    raise StreamError(
        f"the pending update is {_named(actual)}, but this stage's previous declares "
        f"{_named(expected)}; both neighbours must describe each other"
    )


def _named(update: StageUpdate | None) -> str:
    if update is None:
        return "none"
    kind = "plain" if update.plain else "not plain"
    return f"{type(update).__name__} ({kind}{', at the producer' if update.at_producer else ''})"
