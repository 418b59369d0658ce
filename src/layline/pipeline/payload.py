"""What crosses a cut in one step: named tensors, one behind the other in a slot's bytes."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from layline.errors import TransferError

# "hidden_states", and "residual" where an update is pending; any other tensors alike.
Payload = dict[str, Tensor]

# Every tensor starts at a multiple: enough for any dtype's view and for the widest vector loads.
ALIGNMENT = 64


@dataclass(frozen=True)
class Part:
    """One tensor's place: ``offset`` and ``size`` in bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    size: int

    def of(self, memory: Tensor) -> Tensor:
        """The part as a view into ``memory`` (uint8 [bytes])."""
        return memory[self.offset : self.offset + self.size].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class Layout:
    """All parts of one payload, in order. ``size`` is what they take together, in bytes."""

    parts: tuple[Part, ...]
    size: int


def aligned(size: int) -> int:
    """``size`` bytes rounded up to where a next tensor may start."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def layout_of(payload: Payload) -> Layout:
    """Where each tensor goes. Raises TransferError for a payload without tensors."""
    if not payload:
        raise TransferError("the payload has no tensors; expected hidden_states at least")
    parts, offset = [], 0
    for name, tensor in payload.items():
        parts.append(Part(name, tuple(tensor.shape), tensor.dtype, offset, tensor.nbytes))
        offset += aligned(tensor.nbytes)
    return Layout(tuple(parts), offset)


def room_for(shape: tuple[int, ...], dtype: torch.dtype, num_tensors: int = 2) -> int:
    """Bytes that a slot needs for ``num_tensors`` tensors of one shape and dtype."""
    return num_tensors * aligned(prod(shape) * dtype.itemsize)


def copied(result: Any) -> Any:
    """A tensor in memory of its own; anything else as it is."""
    return result.clone() if isinstance(result, Tensor) else result
