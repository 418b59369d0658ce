"""How two processes are linked: by memory that they share, or by messages where they cannot.

The sending end offers memory and the receiving end says whether it found it, so that both choose
alike. Processes on two machines, or in containers that do not see each other's, do not find it.
"""

from __future__ import annotations

import os
import secrets
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed

from layline.errors import TransferError
from layline.pipeline.handovers import HandoverLog, Note
from layline.pipeline.process_link import LinkEnds, LinkReceiver, LinkSender, NotedWire
from layline.pipeline.shared_link import SharedReceiver, SharedSender
from layline.pipeline.shared_memory import (
    TOKEN_BYTES,
    SharedBoard,
    SharedMemory,
    SharedSlots,
    is_supported,
)
from layline.pipeline.streams import Stream, Streams
from layline.pipeline.torch_wire import TorchWire
from layline.pipeline.transport import CutOptions

Memory = TypeVar("Memory", bound=SharedMemory)
Sender = LinkSender | SharedSender
Receiver = LinkReceiver | SharedReceiver
_OFFER = struct.Struct(f">QQ{TOKEN_BYTES}s")


@dataclass(frozen=True)
class LinkPlan:
    """One link: ``group`` is a gloo group of its two processes, for it alone.

    ``shares`` False has it use messages in any case. On a CUDA device it always does. What the ends
    do is told to ``log``.
    """

    ends: LinkEnds
    group: Any
    shares: bool
    timeout_s: float
    log: HandoverLog = field(default_factory=HandoverLog)

    def sender(self, producer: Stream, streams: Streams) -> Sender:
        """The producer's end. Waits for the other process to make its own."""
        slots = self._offered(SharedSlots.create if self._may_share(producer) else None)
        if slots is not None:
            return SharedSender(self.ends, slots, self.timeout_s)
        return self.messages_from(producer, streams)

    def receiver(self, receiver: Stream, streams: Streams) -> Receiver:
        """The receiver's end. Waits for the other process to make its own."""
        slots = self._accepted(SharedSlots.open if self._may_share(receiver) else None)
        if slots is not None:
            return SharedReceiver(self.ends, slots, self.timeout_s)
        return self.messages_to(receiver, streams)

    def posting(self, producer: Stream, depth: int, most_ids: int) -> SharedBoard | None:
        """The producer's end of a board, None where there is none. Waits as :meth:`sender`."""

        def make(name: str, token: bytes) -> SharedBoard:
            board = SharedBoard.create(name, token)
            board.lay_out(depth, most_ids)
            return board

        return self._offered(make if self._may_share(producer) else None)

    def reading(self, receiver: Stream) -> SharedBoard | None:
        """The reader's end of a board, None where there is none. Waits as :meth:`receiver`."""
        return self._accepted(SharedBoard.open if self._may_share(receiver) else None)

    def messages_from(self, producer: Stream, streams: Streams) -> LinkSender:
        """The producer's end of messages; nothing is agreed on."""
        wire = self._wire(self.ends.from_stage)
        options = CutOptions(self.timeout_s)
        return LinkSender(self.ends.cut, producer, streams, wire, options=options)

    def messages_to(self, receiver: Stream, streams: Streams) -> LinkReceiver:
        """The receiver's end of messages."""
        wire = self._wire(self.ends.to_stage)
        return LinkReceiver(self.ends.cut, receiver, streams, wire)

    def _wire(self, stage: int) -> NotedWire:
        wire = TorchWire(self.ends, self.group, timeout_s=self.timeout_s)
        return NotedWire(wire, self._note(stage))

    def _note(self, stage: int) -> Note:
        note, cut = self.log.of_stage(stage), self.ends.cut
        return lambda what, begin, end: note(f"{cut} {what}", begin, end)

    def _may_share(self, stream: Stream) -> bool:
        return self.shares and stream.device.kind == "cpu" and is_supported()

    def _offered(self, make: Callable[[str, bytes], Memory] | None) -> Memory | None:
        token, memory, offer = secrets.token_bytes(TOKEN_BYTES), None, bytes(_OFFER.size)
        if make is not None:
            memory = make(f"layline {self.ends.cut}", token)
            memory.note = self._note(self.ends.from_stage)
            offer = _OFFER.pack(os.getpid(), memory.descriptor, token)
        # No process has number 0.
        self._send(offer)
        return memory if self._receive(1) == b"\1" else None

    def _accepted(self, find: Callable[[int, int, bytes], Memory | None] | None) -> Memory | None:
        process, descriptor, token = _OFFER.unpack(self._receive(_OFFER.size))
        memory = find(process, descriptor, token) if find is not None and process else None
        if memory is not None:
            memory.note = self._note(self.ends.to_stage)
        self._send(b"\0" if memory is None else b"\1")
        return memory

    def _send(self, data: bytes) -> None:
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self._move(distributed.isend, tensor)

    def _receive(self, size: int) -> bytes:
        tensor: Tensor = torch.empty(size, dtype=torch.uint8)
        self._move(distributed.irecv, tensor)
        return tensor.numpy().tobytes()

    def _move(self, call: Callable[..., Any], tensor: Tensor) -> None:
        # Where the other process is gone already, the call itself fails.
        try:
            work = call(tensor, self.ends.peer, group=self.group)
            if work is not None:
                work.wait(timedelta(seconds=self.timeout_s))
        except (RuntimeError, ValueError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise TransferError(
                f"{self.ends.cut}: rank {self.ends.peer} did not make its end of the link "
                f"(timeout {self.timeout_s:g} s): {reason}"
            ) from error
