"""A cut between two pipeline stages of one process: two persistent slots and what orders them.

The producer fills a slot when its last reader has let go of it (rx), and says when it is filled
(tx). The receiver waits for that, copies into memory of its own, and lets go. Nothing else crosses.

A slot holds bytes, and beside them the layout that says what they are; the same events order both.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from torch import Tensor

from layline.errors import TransferError
from layline.pipeline.access import Buffer
from layline.pipeline.cells import Cell
from layline.pipeline.copies import Transport, choose_transport
from layline.pipeline.faults import Fault, Faults
from layline.pipeline.payload import Layout, Payload, layout_of
from layline.pipeline.streams import Event, Stream, Streams

Value = TypeVar("Value")

# Written over memory that nobody may read any more: NaN in every floating dtype.
POISON = 0xFF


@dataclass(frozen=True)
class CutOptions:
    """What a cut is made with beside its streams.

    Attributes:
        timeout_s: How long the host waits for the receiver when a slot grows.
        poison: Fill what nobody may read with NaN, so that reading it shows.
        faults: Failure classes to re-create.
        count: Called with "growth_events", "growth_syncs" and "slot_switches" as these happen.
    """

    timeout_s: float = 300.0
    poison: bool = False
    faults: Faults = field(default_factory=Faults)
    count: Callable[[str], None] = lambda name: None


@dataclass(eq=False)
class SlotMemory:
    """A slot's bytes (uint8) on the receiver's device, and the layout of what they hold."""

    tensor: Tensor
    buffer: Buffer
    layout: Layout | None = None


@dataclass(eq=False)
class Slot:
    """One of a cut's two. ``filled_by`` is the transfer in it that has not been received."""

    index: int
    tx: Event
    rx: Event
    memory: SlotMemory | None = None
    filled_by: int | None = None

    @property
    def capacity(self) -> int:
        """Bytes."""
        return 0 if self.memory is None else self.memory.tensor.numel()


class Boundary:
    """The cut between ``producer`` and ``receiver``. Host threads may share it.

    Send and receive are issued by the host and return at once, but for a growth of a slot. Receives
    come in the order of sends. The receive of what a slot holds must be issued before the send that
    fills the slot again, because a wait binds to what was recorded before it.
    """

    def __init__(
        self,
        name: str,
        producer: Stream,
        receiver: Stream,
        streams: Streams,
        *,
        transport: Transport | None = None,
        options: CutOptions | None = None,
    ) -> None:
        self.name = name
        self.transport = transport or choose_transport(producer.device, receiver.device)
        self._options = options or CutOptions()
        self._producer = producer
        self._receiver = receiver
        self._log = streams.log
        self._slots = tuple(
            Slot(index, streams.event(f"{name} tx {index}"), streams.event(f"{name} rx {index}"))
            for index in range(2)
        )
        self._lock = threading.RLock()
        self._sent = 0
        self._alternations = 0
        self._latest: int | None = None
        self._on_the_way: deque[Slot] = deque()

    @property
    def capacities(self) -> tuple[int, int]:
        """Bytes in each slot."""
        first, second = self._slots
        return first.capacity, second.capacity

    def prewarm(self, room: int) -> None:
        """Grow both slots to ``room`` bytes now, so that no growth drains the receiver later.

        Raises TransferError while a slot holds a payload.
        """
        with self._lock:
            for slot in self._slots:
                self._check_free(slot)
                self._grow(slot, room)

    def send(self, payload: Cell[Payload], room: int, *, overlap: bool = False) -> int:
        """Fill a slot with what the producer's task has left in ``payload``; returns its index.

        ``room`` is how many bytes the host expects at most (:func:`payload.room_for`); the payload
        itself may have fewer and crosses exactly. With ``overlap`` slots alternate, else all go
        through slot 0.

        Raises TransferError when the slot's last payload has not been received, and in the task
        when the payload needs more than the slot has.
        """
        with self._lock:
            slot = self._slots[self._next_index(overlap)]
            self._check_free(slot)
            if Fault.DROP_RX_WAIT not in self._options.faults:
                self._producer.wait(slot.rx)
            memory = self._grow(slot, room)
            self._producer.run(
                partial(self._fill, memory, payload),
                reads=payload.buffers,
                writes=(memory.buffer,),
                label=f"{self.name} tx #{self._sent}",
            )
            self._producer.record(slot.tx)
            slot.filled_by = self._sent
            if self._latest not in (None, slot.index):
                self._options.count("slot_switches")
            self._latest = slot.index
            self._on_the_way.append(slot)
            self._sent += 1
            self._alternations += overlap
            return slot.index

    def receive(self, index: int | None = None) -> Cell[Payload]:
        """The oldest payload that was sent and not received, in memory of the receiver's own.

        ``index`` is the slot that ``send`` gave. Raises TransferError when nothing was sent or
        another slot's turn is first.
        """
        return self.deliver(self._copy_out, index)

    def deliver(
        self, take: Callable[[Layout, Tensor], Value], index: int | None = None
    ) -> Cell[Value]:
        """Like :meth:`receive`, with what ``take(layout, bytes)`` makes of the slot.

        ``take`` runs as a task of the receiver, and must keep no view of the bytes.
        """
        faults = self._options.faults
        with self._lock:
            slot, memory = self._oldest(index)
            if Fault.DROP_TX_WAIT not in faults:
                self._receiver.wait(slot.tx)
            if Fault.EARLY_RX_RECORD in faults:
                self._receiver.record(slot.rx)
            cell = self._receiver.run(
                partial(self._empty_out, memory, take),
                reads=(memory.buffer,),
                writes=(memory.buffer,) if self._options.poison else (),
                label=f"{self.name} rx #{slot.filled_by}",
            )
            if Fault.RETURN_SLOT_VIEW in faults:
                cell.buffers = (*cell.buffers, memory.buffer)
            if Fault.EARLY_RX_RECORD not in faults:
                self._receiver.record(slot.rx)
            slot.filled_by = None
            return cell

    def _next_index(self, overlap: bool) -> int:
        if Fault.ONE_SLOT_ONLY in self._options.faults:
            return 0
        return self._alternations % 2 if overlap else 0

    def _check_free(self, slot: Slot) -> None:
        if slot.filled_by is None or Fault.SKIP_ISSUE_CHECK in self._options.faults:
            return
        raise TransferError(
            f"{self.name}: transfer #{self._sent} needs slot {slot.index} before the receive of "
            f"#{slot.filled_by} in it was issued; issue receives first"
        )

    def _oldest(self, index: int | None) -> tuple[Slot, SlotMemory]:
        if not self._on_the_way:
            raise TransferError(f"{self.name}: a receive was issued, and nothing was sent")
        slot = self._on_the_way[0]
        if index is not None and index != slot.index:
            raise TransferError(
                f"{self.name}: slot {index} was to be received; the oldest payload, "
                f"#{slot.filled_by}, is in slot {slot.index}"
            )
        assert slot.memory is not None
        return self._on_the_way.popleft(), slot.memory

    def _grow(self, slot: Slot, room: int) -> SlotMemory:
        """The slot's memory, of at least ``room`` bytes.

        Memory comes from the receiver, in whose order its last use and its clear are. The producer
        is on another stream, so the host waits for the receiver once.
        """
        if slot.memory is not None and slot.capacity >= room:
            return slot.memory
        faults, count = self._options.faults, self._options.count
        tensor = self._receiver.empty(max(room, 1))
        memory = SlotMemory(tensor, Buffer(f"{self.name} slot {slot.index}", self._receiver.device))
        slot.memory = memory
        self._log.recorder.allocated(memory.buffer, tensor)
        count("growth_events")
        if Fault.FIRST_USE_CLEAR_LATE not in faults:
            self._clear(memory)
        if Fault.SKIP_GROWTH_SYNC not in faults:
            self._receiver.synchronize(self._options.timeout_s)
            count("growth_syncs")
        if Fault.FIRST_USE_CLEAR_LATE in faults:
            self._clear(memory)
        return memory

    def _clear(self, memory: SlotMemory) -> None:
        value = POISON if self._options.poison else 0
        self._receiver.run(
            partial(memory.tensor.fill_, value),
            writes=(memory.buffer,),
            label=f"clear {memory.buffer.name}",
        )

    def _fill(self, memory: SlotMemory, payload: Cell[Payload]) -> None:
        tensors = payload.get()
        layout = layout_of(tensors)
        if layout.size > memory.tensor.numel():
            raise TransferError(
                f"{self.name}: the payload has {layout.size} bytes; the host announced at most "
                f"{memory.tensor.numel()}"
            )
        for part in layout.parts:
            target = part.of(memory.tensor)
            self.transport.copy(target, tensors[part.name], self._producer)
        wider = memory.layout is not None and memory.layout.size > layout.size
        if not (wider and Fault.KEEP_WIDER_LAYOUT in self._options.faults):
            memory.layout = layout

    def _empty_out(self, memory: SlotMemory, take: Callable[[Layout, Tensor], Value]) -> Value:
        if memory.layout is None:
            raise TransferError(f"{self.name}: {memory.buffer.name} was read before it was filled")
        taken = take(memory.layout, memory.tensor)
        if self._options.poison:
            memory.tensor.fill_(POISON)
        return taken

    def _copy_out(self, layout: Layout, slot: Tensor) -> Payload:
        if Fault.RETURN_SLOT_VIEW in self._options.faults:
            return {part.name: part.of(slot) for part in layout.parts}
        return {part.name: part.of(slot).clone() for part in layout.parts}
