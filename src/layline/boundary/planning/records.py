"""Operations as data: what happens to a value on its way from one stage to the next."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class OpKind(Enum):
    """One kind of step at a boundary."""

    ENTER = "enter"
    LEAVE = "leave"
    UPDATE = "update"
    READ = "read"
    UPDATE_AND_READ = "update+read"


class Place(Enum):
    """Which side of the line runs an operation."""

    EXIT = "producer's exit"
    PREPARE = "consumer's prepare"


@dataclass(frozen=True)
class Op:
    """One planned step."""

    kind: OpKind
    place: Place

    def __str__(self) -> str:
        return f"{self.kind.value} ({self.place.value})"
