"""Walk a planned stack as one step runs it: which prepared operations run at each boundary.

What the printed plan, the simulation and the comparison with a run all follow.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from layline.boundary.contracts import StageDeclaration, StageKind
from layline.boundary.layout import BatchVariant, Layout
from layline.boundary.mesh import MeshSpec
from layline.boundary.planning.edge import READ
from layline.boundary.planning.exits import ExitPlan
from layline.boundary.planning.moves import Ground
from layline.boundary.planning.records import Op, OpKind, Place
from layline.boundary.planning.stage import StagePlan, plan_stage
from layline.boundary.rows import BatchKind


@dataclass(frozen=True)
class Crossing:
    """One boundary of a step.

    Attributes:
        producer: The stage before it, None at the stack's entry.
        consumer: The stage after it, None before the final norm.
        leaving: What the producer's exit decided, None at the entry.
        prepare: What runs where the input is prepared, work that was left to it first.
        compute_rows: Rows that the consumer computes on; before the final norm those of its result.
        residual_before: Rows of the residual before ``prepare``.
        residual_after: Rows of the residual after it.
    """

    producer: StagePlan | None
    consumer: StagePlan | None
    leaving: ExitPlan | None
    prepare: tuple[Op, ...]
    compute_rows: Layout
    residual_before: Layout
    residual_after: Layout

    @property
    def name(self) -> str:
        """Such as ``attn -> ffn``; the ends of a stack are ``embed`` and ``norm``."""
        return f"{_short(self.producer, 'embed')} -> {_short(self.consumer, 'norm')}"


def plan_layers(
    layers: Iterable[Sequence[StageDeclaration]], spec: MeshSpec
) -> tuple[StagePlan, ...]:
    """The plans of a stack's stages, as a model's layers make them from linked declarations.

    A layer knows its own stages, and what is before it; equal stages share one plan.
    """
    known: dict[tuple[StageDeclaration, StageDeclaration | None], StagePlan] = {}
    plans: list[StagePlan] = []
    for layer in layers:
        neighbours = [replace(stage, previous=None, terminal=False) for stage in layer[1:]]
        for stage, following in zip(layer, [*neighbours, None], strict=True):
            key = (stage, following)
            if key not in known:
                known[key] = plan_stage(stage, following, spec)
            plans.append(known[key])
    return tuple(plans)


def enters_partial(spec: MeshSpec, kind: BatchKind) -> bool:
    """True when the embedding leaves its sum to the first boundary."""
    return kind.variant is BatchVariant.INPUT_SCATTERED and spec.topology.attn_tp > 1


def walk(
    plans: Sequence[StagePlan],
    ground: Ground,
    *,
    partial_entry: bool = False,
    has_tokens: bool = True,
) -> Iterator[Crossing]:
    """Every boundary of one step, from the stack's entry to its final norm.

    ``has_tokens`` says whether any rank of the mesh has a row in this step.
    """
    producer: StagePlan | None = None
    leaving: ExitPlan | None = None
    source: Layout | None = None
    for plan in plans:
        path = plan.path(ground.kind)
        prepare = path.prepare if source is None else path.prepares[source]
        if leaving is None:
            entry = prepare.entry_partial if partial_entry else prepare.entry
            assert entry is not None, "only an input-scattered stack is entered by a partial sum"
            ops = entry
        elif leaving.writes:
            ops = prepare.written
        elif leaving.declared is not None:
            assert prepare.declared is not None, "both neighbours describe the same edge"
            ops = prepare.declared
        else:
            assert prepare.complete is not None, "both neighbours describe the same edge"
            ops = (*leaving.owed, *prepare.complete)
        before = path.source if source is None else source
        rows = path.decl.input.layout
        yield Crossing(producer, plan, leaving, ops, rows, before, prepare.residual_rows)
        producer = plan
        leaving = path.exit.with_tokens if has_tokens else path.exit.without_tokens
        source = leaving.rows if leaving.writes else prepare.residual_rows
    assert leaving is not None, "a stack has at least one stage"
    assert source is not None
    yield Crossing(producer, None, leaving, _final(leaving), ground.attention, source, leaving.rows)


def _final(leaving: ExitPlan) -> tuple[Op, ...]:
    """The final norm: owed work, the update where it is pending, and back to attention rows."""
    read = READ
    if not leaving.writes:
        read = Op(OpKind.UPDATE_AND_READ, Place.PREPARE, before=leaving.rows, after=leaving.rows)
    done = (*leaving.owed, *leaving.completion, *leaving.residual_moves)
    return (*done, read, *leaving.after_norm)


def _short(plan: StagePlan | None, end: str) -> str:
    if plan is None:
        return end
    return "attn" if plan.declaration.kind is StageKind.ATTN else "ffn"
