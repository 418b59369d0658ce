"""A cut between processes of one machine: each stage's own task writes and reads the slots.

So nobody has to be woken between two stages. The two slots and what orders them are those of every
cut; see shared_memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from layline.pipeline.cells import Inlet
from layline.pipeline.link_header import HEADER_BYTES, pack, unpack
from layline.pipeline.payload import Payload, layout_of
from layline.pipeline.process_link import LinkEnds
from layline.pipeline.shared_memory import SharedSlots
from layline.pipeline.stages import StageProgram


class SharedSender:
    """The producer's end: the stage's program hands each payload on before its task ends."""

    kind = "memory shared between processes"

    def __init__(self, ends: LinkEnds, slots: SharedSlots, timeout_s: float) -> None:
        self._ends = ends
        self._slots = slots
        self._timeout_s = timeout_s
        self._sequence = 0

    @property
    def waited_s(self) -> float:
        """Seconds that the producer has waited for a free slot."""
        return self._slots.waited_s

    def put(self, payload: Payload) -> None:
        """Copy the payload into the next slot, once that is free."""
        number, self._sequence = self._sequence, self._sequence + 1
        layout = layout_of(payload)
        what = self._ends.sending(number)
        slot = self._slots.room(number, HEADER_BYTES + layout.size, what, self._timeout_s)
        slot[:HEADER_BYTES] = pack(self._ends.cut, number, layout)
        body = slot[HEADER_BYTES:]
        for part in layout.parts:
            part.of(body).copy_(payload[part.name])
        self._slots.put(number)

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
        what = self._ends.receiving(number)
        slot = self._slots.arrived(number, what, self._timeout_s)
        layout = unpack(slot[:HEADER_BYTES], self._ends.cut, number)
        body = slot[HEADER_BYTES:]
        payload = {part.name: part.of(body).clone() for part in layout.parts}
        self._slots.taken(number)
        return payload
