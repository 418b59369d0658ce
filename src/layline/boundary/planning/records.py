"""Operations as data: what happens to a value on its way from one stage to the next."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from layline.boundary.layout import FULL_ROWS, Layout
from layline.topology import GroupName


class OpKind(Enum):
    """One kind of step at a boundary."""

    # Residual steps.
    ENTER = "enter"
    READ = "norm"
    UPDATE = "add"
    UPDATE_AND_READ = "add+norm"
    LEAVE = "leave"
    TRANSFORM = "transform"
    FORMAT = "to the read's format"
    JOIN = "residual joins the sum"
    JOIN_SLICE = "residual slice joins the sum"
    TAKE_RESIDUAL = "own slot is the residual"
    # Row steps without communication.
    SLICE = "slice"
    PLACE = "place in the global buffer"
    PAD = "pad to the slot"
    # Collectives.
    ALL_REDUCE = "all-reduce"
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    REDUCE_SCATTER_V = "reduce-scatter-v"


COLLECTIVES = frozenset(
    {OpKind.ALL_REDUCE, OpKind.ALL_GATHER, OpKind.REDUCE_SCATTER, OpKind.REDUCE_SCATTER_V}
)


class Place(Enum):
    """Where an operation runs."""

    COMPUTE = "compute"
    EXIT = "producer's exit"
    PREPARE = "consumer's prepare"


class Operand(Enum):
    """What an operation works on."""

    VALUE = "value"
    RESIDUAL = "residual"
    INPUT = "input"


class Writers(Enum):
    """Which ranks write their rows into the global buffer; the others leave zeros."""

    ALL = "every rank"
    FIRST_TP = "attention TP rank 0"
    FIRST_CP = "attention CP rank 0"
    FIRST_CP_TP = "attention CP and TP rank 0"


@dataclass(frozen=True, slots=True)
class Op:
    """One planned step.

    ``group`` is the collective's group; ``before`` and ``after`` are the operand's rows around the
    step; ``writers`` belongs to PLACE. A ``quantised`` all-reduce sends 8-bit rows in prefill.
    """

    kind: OpKind
    place: Place
    operand: Operand = Operand.VALUE
    group: GroupName | None = None
    before: Layout = FULL_ROWS
    after: Layout = FULL_ROWS
    writers: Writers | None = None
    quantised: bool = False

    @property
    def is_collective(self) -> bool:
        """True when the step communicates."""
        return self.kind in COLLECTIVES

    def __str__(self) -> str:
        group = "" if self.group is None else f" {self.group.value}"
        operand = "" if self.operand is Operand.VALUE else f" of the {self.operand.value}"
        quantised = " (int8 in prefill)" if self.quantised else ""
        return f"{self.kind.value}{group}{operand}{quantised}"
