"""Contracts at a boundary: what a model declares, and what it resolves to for one topology.

A :class:`StageDeclaration` is what a model author writes: no norm, no plan, no topology. Resolving
it gives a :class:`StageDecl` (one input, one output), and two neighbours give an :class:`EdgeDecl`,
which the planner turns into operations. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from layline.boundary.layout import BatchVariant, Layout, SumGroup
from layline.boundary.residual import StageRead, StageUpdate
from layline.boundary.rows import BatchKind, RankRows


class StageKind(Enum):
    """What a stage computes: token mixing, or a feed-forward network."""

    ATTN = "attention"
    FFN = "ffn"


class ProducerReduction(Enum):
    """How a stage's compute cooperates with the boundary's decision about its output sum."""

    PARTIAL = "partial"
    SCOPED = "scoped"
    LOCAL_TAIL = "local tail"


@dataclass(frozen=True)
class OutputTransform:
    """Work on a stage's complete output, before its residual update.

    ``apply`` takes and returns [tokens, hidden]. ``before_reduce_scatter`` is the explicit
    permission to run on rows whose sum a reduce-scatter has yet to finish; without it a stage's
    output is never scattered and its sum never left.
    """

    apply: Callable[[Any], Any]
    before_reduce_scatter: bool = False


@dataclass(frozen=True, kw_only=True)
class StageDeclaration:
    """Model-facing description of one stage and of where its input comes from.

    ``gathers_tp_input`` tells whether an attention takes an input that is divided over TP and
    gathers it itself, ``latent_input`` whether it first computes on the divided rows; only
    input-scattered batches have such an input.
    """

    kind: StageKind
    reduction: ProducerReduction
    read: StageRead
    update: StageUpdate
    gathers_tp_input: bool = True
    latent_input: bool = False
    transform: OutputTransform | None = None
    previous: StageDeclaration | None = None
    prepared_from: StageDeclaration | None = None
    terminal: bool = False


@dataclass(frozen=True)
class StageInput:
    """The rows a stage computes on, and how it reads the residual."""

    layout: Layout
    read: StageRead


@dataclass(frozen=True)
class StageOutput:
    """The rows a stage's compute produces and hands on, and the sum it owes there.

    ``leaves_for_next`` permits the exit to leave the sum to the next stage, ``leaves_for_scatter``
    to leave it to a reduce-scatter.
    """

    layout: Layout
    handoff: Layout
    owed: SumGroup | None
    update: StageUpdate
    leaves_for_next: bool = False
    leaves_for_scatter: bool = False


@dataclass(frozen=True)
class StageDecl:
    """One stage resolved for one topology and one batch variant."""

    kind: StageKind
    variant: BatchVariant
    input: StageInput
    output: StageOutput


@dataclass(frozen=True)
class EdgeDecl:
    """A producer's output meeting a consumer's input. ``producer`` is None at the stack's entry."""

    producer: StageOutput | None
    consumer: StageInput
    residual_source: Layout
    residual_destination: Layout


class BatchState(Protocol):
    """What a boundary needs of a forward batch.

    ``kind`` picks the prepared path, ``rows`` are this rank's row counts; one rank alone needs
    none. ``attn_tp_context`` is where an attention with latent inputs finds its context.
    """

    residual_stream: Any
    attn_tp_context: Any
    kind: BatchKind
    rows: RankRows | None
