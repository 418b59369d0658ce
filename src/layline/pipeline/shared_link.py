"""A cut between processes of one machine: each stage's own task writes and reads the slots.

So nobody has to be woken between two stages. The two slots and what orders them are those of every
cut; see shared_memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from layline.pipeline.cells import Inlet
from layline.pipeline.link_header import HEADER_BYTES, pack, unpack
from layline.pipeline.payload import Payload, layout_of
from layline.pipeline.process_link import LinkEnds
from layline.pipeline.shared_memory import SharedSlots
from layline.pipeline.stages import StageProgram

Kind = tuple[str, torch.Size, torch.dtype]


class SharedSender:
    """The producer's end: the stage's program hands each payload on before its task ends."""

    kind = "memory shared between processes"

    def __init__(self, ends: LinkEnds, slots: SharedSlots, timeout_s: float) -> None:
        self._ends = ends
        self._slots = slots
        self._timeout_s = timeout_s
        self._sequence = 0
        # By slot, what it is laid out for, and its tensors.
        self._laid_out: list[tuple[list[Kind] | None, list[Tensor]]] = [(None, [])] * 2

    @property
    def waited_s(self) -> float:
        """Seconds that the producer has waited for a free slot."""
        return self._slots.waited_s

    def put(self, payload: Payload) -> None:
        """Copy the payload into the next slot, once that is free."""
        number, self._sequence = self._sequence, self._sequence + 1
        self._slots.await_room(number, self._ends.sending(number), self._timeout_s)
        begin = perf_counter()
        kinds = [(name, each.shape, each.dtype) for name, each in payload.items()]
        known, targets = self._laid_out[number % 2]
        if kinds != known:
            targets = self._lay_out(number, payload)
            self._laid_out[number % 2] = kinds, targets
        for target, tensor in zip(targets, payload.values(), strict=True):
            target.copy_(tensor)
        self._slots.put(number)
        self._slots.note(f"tx #{number}", begin, perf_counter())

    def _lay_out(self, number: int, payload: Payload) -> list[Tensor]:
        layout = layout_of(payload)
        slot = self._slots.renew(number, HEADER_BYTES + layout.size)
        # A slot's layout outlives the payload, so it has no number.
        slot[:HEADER_BYTES] = pack(self._ends.cut, 0, layout)
        return [part.of(slot[HEADER_BYTES:]) for part in layout.parts]

    def close(self) -> None:
        """Let a wait for the other end fail."""
        self._slots.close()


@dataclass(frozen=True)
class HandingOn:
    """Implements stages.StageProgram: a stage whose payload goes to another process."""

    program: StageProgram
    after: SharedSender

    def room(self, step: Any) -> int:
        """See StageProgram."""
        return self.program.room(step)

    def prepare(self, step: Any) -> None:
        """See StageProgram."""
        self.program.prepare(step)

    def run(self, step: Any, entering: Payload | None) -> None:
        """See StageProgram."""
        self.after.put(self.program.run(step, entering))


class SharedReceiver:
    """The receiver's end: the stage's task takes each payload when it gets there."""

    kind = SharedSender.kind

    def __init__(self, ends: LinkEnds, slots: SharedSlots, timeout_s: float) -> None:
        self._ends = ends
        self._slots = slots
        self._timeout_s = timeout_s
        self._sequence = 0
        # By slot, the version that its tensors are of.
        self._laid_out: list[tuple[int, Payload]] = [(0, {})] * 2

    @property
    def waited_s(self) -> float:
        """Seconds that the receiver has waited for payloads."""
        return self._slots.waited_s

    def receive(self) -> Inlet[Payload]:
        """The next payload, to be read in the stage's task."""
        return Inlet(self._take)

    def close(self) -> None:
        """Let a wait for the other end fail."""
        self._slots.close()

    def _take(self) -> Payload:
        number, self._sequence = self._sequence, self._sequence + 1
        version = self._slots.arrived(number, self._ends.receiving(number), self._timeout_s)
        begin = perf_counter()
        known, sources = self._laid_out[number % 2]
        if version != known:
            slot = self._slots.slot(number)
            layout = unpack(slot[:HEADER_BYTES], self._ends.cut, 0)
            sources = {part.name: part.of(slot[HEADER_BYTES:]) for part in layout.parts}
            self._laid_out[number % 2] = version, sources
        payload = {name: tensor.clone() for name, tensor in sources.items()}
        self._slots.taken(number)
        self._slots.note(f"rx #{number}", begin, perf_counter())
        return payload
