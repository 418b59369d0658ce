"""Contracts at a boundary: what a model declares, and what it resolves to for one topology.

A :class:`StageDeclaration` is what a model author writes: no norm, no plan, no topology. Resolving
it gives a :class:`StageDecl` (one input, one output), and two neighbours give an :class:`EdgeDecl`,
which the planner turns into operations. Nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from layline.boundary.layout import BatchVariant, Layout, SumGroup
from layline.boundary.residual import StageRead, StageUpdate


class StageKind(Enum):
    """What a stage computes: token mixing, or a feed-forward network."""

    ATTN = "attention"
    FFN = "ffn"


class ProducerReduction(Enum):
    """How a stage's compute cooperates with the boundary's decision about its output sum."""

    PARTIAL = "partial"
    SCOPED = "scoped"
    LOCAL_TAIL = "local tail"


@dataclass(frozen=True, kw_only=True)
class StageDeclaration:
    """Model-facing description of one stage and of where its input comes from."""

    kind: StageKind
    reduction: ProducerReduction
    read: StageRead
    update: StageUpdate
    previous: StageDeclaration | None = None
    terminal: bool = False


@dataclass(frozen=True)
class StageInput:
    """The rows a stage computes on, and how it reads the residual."""

    layout: Layout
    read: StageRead


@dataclass(frozen=True)
class StageOutput:
    """The rows a stage hands on, the sum they still owe, and how they update the residual."""

    layout: Layout
    owed: SumGroup | None
    update: StageUpdate


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
    """What a boundary needs of a forward batch."""

    residual_stream: Any
    variant: BatchVariant
