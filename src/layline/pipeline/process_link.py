"""A cut between processes: the sender's slots, a wire, and fresh memory at the receiver.

At the sending end a stream of its own takes the receiver's part: it waits until a slot is filled,
sends from it, and lets go. At the receiving end one brings what comes into new memory, and the
stage waits for that. So neither stage's stream stands still while bytes are under way.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Protocol

from torch import Tensor

from layline.pipeline.cells import Cell
from layline.pipeline.copies import LocalCopy
from layline.pipeline.handovers import Note
from layline.pipeline.payload import Layout, Payload
from layline.pipeline.streams import Stream, Streams
from layline.pipeline.transport import Boundary, CutOptions


@dataclass(frozen=True)
class LinkEnds:
    """Who speaks: the cut's name, the stages, and the global rank of the other process."""

    cut: str
    from_stage: int
    to_stage: int
    peer: int

    def sending(self, sequence: int) -> str:
        """What the sending end waits for, in words."""
        return (
            f"stage {self.from_stage} waited for stage {self.to_stage} (rank {self.peer}) to take "
            f"#{sequence} of {self.cut}"
        )

    def receiving(self, sequence: int) -> str:
        """What the receiving end waits for, in words."""
        return (
            f"stage {self.to_stage} waited for #{sequence} of {self.cut} from stage "
            f"{self.from_stage} (rank {self.peer})"
        )


class Wire(Protocol):
    """One direction of bytes between two processes, called by one stream's tasks in order."""

    def send(self, sequence: int, layout: Layout, memory: Tensor) -> None:
        """Send the first ``layout.size`` bytes of ``memory`` (uint8) as payload ``sequence``.

        On the CPU they have been taken when this returns; on CUDA, when the current stream gets
        there. Raises TransferError when the other end does not take them in time.
        """

    def receive(self, sequence: int) -> Payload:
        """Payload ``sequence`` in new memory. Raises TransferError when it does not come."""


@dataclass(frozen=True)
class NotedWire:
    """Implements Wire by another one, and notes when; a receive is a wait for the most part."""

    wire: Wire
    note: Note

    def send(self, sequence: int, layout: Layout, memory: Tensor) -> None:
        """See Wire.send."""
        begin = perf_counter()
        self.wire.send(sequence, layout, memory)
        self.note(f"tx #{sequence}", begin, perf_counter())

    def receive(self, sequence: int) -> Payload:
        """See Wire.receive."""
        begin = perf_counter()
        payload = self.wire.receive(sequence)
        self.note(f"rx #{sequence}", begin, perf_counter())
        return payload


class LinkSender:
    """The producer's end.

    ``stream`` is the one that sends, and ``taken`` its task for the latest payload.
    """

    kind = "messages between processes"
    waited_s = 0.0
    """The stage's own stream waits for events alone, which it counts itself."""

    def __init__(
        self,
        name: str,
        producer: Stream,
        streams: Streams,
        wire: Wire,
        *,
        options: CutOptions | None = None,
    ) -> None:
        self.stream = link = streams.stream(f"{name} out", producer.device.ordinal)
        self._boundary = Boundary(
            name, producer, link, streams, transport=LocalCopy(self.kind), options=options
        )
        self._wire = wire
        self._sequence = 0
        self.taken: Cell[None] | None = None

    def prewarm(self, room: int) -> None:
        """See Boundary.prewarm."""
        self._boundary.prewarm(room)

    def close(self) -> None:
        """Nothing of its own to end: whoever waits does so in the wire."""

    def send(self, payload: Cell[Payload], room: int, *, overlap: bool = False) -> int:
        """Send the payload to the other process; returns the slot's index here.

        Raises as Boundary.send does. That the other end is gone shows where streams are waited for.
        """
        index = self._boundary.send(payload, room, overlap=overlap)
        self.taken = self._boundary.deliver(partial(self._wire.send, self._sequence), index)
        self._sequence += 1
        return index


class LinkReceiver:
    """The receiver's end. Its ``receive`` is :meth:`transport.Boundary.receive`, with no slot.

    Payloads come in the order in which the other process sends them, checked by number.
    """

    kind = LinkSender.kind
    waited_s = 0.0
    """As of the sender."""

    def __init__(self, name: str, receiver: Stream, streams: Streams, wire: Wire) -> None:
        self._name = name
        self._receiver = receiver
        self._link = streams.stream(f"{name} in", receiver.device.ordinal)
        self._arrived = streams.event(f"{name} arrived")
        self._wire = wire
        self._sequence = 0

    def close(self) -> None:
        """See LinkSender.close."""

    def receive(self) -> Cell[Payload]:
        """The next payload, in memory of the receiver's own."""
        number, self._sequence = self._sequence, self._sequence + 1
        label = f"{self._name} rx #{number}"
        cell = self._link.run(partial(self._wire.receive, number), label=label)
        self._link.record(self._arrived)
        # The event stands for this payload until the host issues the next receive.
        self._receiver.wait(self._arrived)
        return self._receiver.run(
            partial(self._own, cell), reads=cell.buffers, label=f"{label} taken over"
        )

    def _own(self, cell: Cell[Payload]) -> Payload:
        payload = cell.get()
        for tensor in payload.values():
            self._receiver.adopt(tensor)
        return payload
