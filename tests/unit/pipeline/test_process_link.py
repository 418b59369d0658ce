"""Cuts between processes: what goes ahead of a payload, and both ends over a wire in memory."""

from __future__ import annotations

import queue
import struct
import threading
from collections.abc import Iterator

import msgspec
import pytest
import torch
from torch import Tensor

from layline.errors import RunError, TransferError
from layline.pipeline.controllers import ScriptedController, Seeded
from layline.pipeline.link_header import HEADER_BYTES, Header, pack, unpack
from layline.pipeline.payload import Layout, Part, Payload, layout_of, room_for
from layline.pipeline.process_link import LinkReceiver, LinkSender
from layline.pipeline.streams import Streams, make_streams
from layline.pipeline.transport import CutOptions
from support.cut_chain import TIMEOUT_S, WIDTH, Stage, reference, same_bits, steps
from support.happens_before import HappensBefore

WAIT_S = 30.0


class MemoryWire:
    """A wire within one process: what is sent is copied, and waits until it is received."""

    def __init__(self, timeout_s: float = WAIT_S) -> None:
        self.timeout_s = timeout_s
        self.under_way: queue.Queue[tuple[Tensor, Tensor]] = queue.Queue()
        self.taken = threading.Semaphore(0)
        self.blocking = False

    def send(self, sequence: int, layout: Layout, memory: Tensor) -> None:
        self.under_way.put((pack("cut 0", sequence, layout), memory[: layout.size].clone()))
        if self.blocking and not self.taken.acquire(timeout=self.timeout_s):
            raise TransferError("nobody took it")

    def receive(self, sequence: int) -> Payload:
        try:
            header, body = self.under_way.get(timeout=self.timeout_s)
        except queue.Empty:
            raise TransferError(f"#{sequence} of cut 0 did not come") from None
        self.taken.release()
        layout = unpack(header, "cut 0", sequence)
        return {part.name: part.of(body) for part in layout.parts}


def layout() -> Layout:
    return layout_of(
        {"hidden_states": torch.zeros(3, 6, dtype=torch.bfloat16), "residual": torch.zeros(3, 6)}
    )


def test_a_header_tells_the_layout() -> None:
    header = pack("cut 0", 7, layout())
    assert header.shape == (HEADER_BYTES,)
    assert unpack(header, "cut 0", 7) == layout()


@pytest.mark.parametrize(
    ("cut", "sequence", "message"),
    [
        ("cut 0", 8, "#7 of cut 0 came where #8 was due; the processes run different steps"),
        ("cut 0", 6, "#7 of cut 0 came where #6 was due"),
        ("cut 1", 7, "cut 1: #7 of cut 0 came where #7 was due"),
    ],
)
def test_another_steps_or_cuts_payload_is_refused(cut: str, sequence: int, message: str) -> None:
    with pytest.raises(TransferError, match=message):
        unpack(pack("cut 0", 7, layout()), cut, sequence)


def forged(**changes: object) -> Tensor:
    fields = {"cut": "cut 0", "sequence": 0, "parts": [("x", [2], "float32")], "size": 64}
    encoded = msgspec.msgpack.encode(Header(**{**fields, **changes}))  # type: ignore[arg-type]
    framed = struct.pack(">I", len(encoded)) + encoded
    return torch.frombuffer(bytearray(framed.ljust(HEADER_BYTES, b"\0")), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (torch.zeros(HEADER_BYTES, dtype=torch.uint8), "is no header of a payload"),
        (torch.full((HEADER_BYTES,), 255, dtype=torch.uint8), "is no header of a payload"),
        (forged(size=128), "announces 128 bytes for tensors that take 64"),
        (forged(parts=[], size=0), "announces 0 bytes"),
        (forged(parts=[("x", [-2], "float32")]), r"shape \[-2\]"),
        (forged(parts=[("x", [2], "string")]), "of dtype string"),
        (forged(parts=[("x", [1 << 40], "float32")], size=1 << 42), "announces 4398046511104"),
        (forged(sequence="zero"), "is no header of a payload"),
    ],
)
def test_what_is_no_header_is_refused(header: Tensor, message: str) -> None:
    assert unpack(forged(), "cut 0", 0).size == 64
    with pytest.raises(TransferError, match=message):
        unpack(header, "cut 0", 0)


def test_what_cannot_be_announced_is_refused() -> None:
    with pytest.raises(TransferError, match="dtype complex64 is not sent; expected one of float32"):
        pack("cut 0", 0, layout_of({"x": torch.zeros(1, dtype=torch.complex64)}))
    parts = tuple(Part("name" * 20, (1,), torch.float32, 64 * n, 4) for n in range(20))
    with pytest.raises(TransferError, match="the header of 20 tensors takes"):
        pack("cut 0", 0, Layout(parts, 64 * 20))


class Ends:
    """Stage 0 and stage 1, each with streams of its own as in two processes, and a wire."""

    def __init__(self, wire: MemoryWire, sender: Streams, receiver: Streams) -> None:
        self.first = Stage(0, sender.stream("stage 0"))
        self.second = Stage(1, receiver.stream("stage 1"))
        self.sender = LinkSender(
            "cut 0", self.first.stream, sender, wire, options=CutOptions(TIMEOUT_S, poison=True)
        )
        self.receiver = LinkReceiver("cut 0", self.second.stream, receiver, wire)

    def send(self, x: Tensor, *, overlap: bool = True) -> int:
        cell = self.first.stream.run(
            lambda: self.first.compute({"hidden_states": x}),
            reads=(self.first.state,),
            writes=(self.first.state,),
            label="layers of stage 0",
        )
        return self.sender.send(cell, room_for((x.shape[0], WIDTH), x.dtype), overlap=overlap)

    def receive(self) -> list[Tensor]:
        """Issue one step of the second stage; its output comes into the list."""
        outputs: list[Tensor] = []
        incoming = self.receiver.receive()
        self.second.stream.run(
            lambda: outputs.append(self.second.compute(incoming.get())["hidden_states"]),
            reads=(self.second.state, *incoming.buffers),
            writes=(self.second.state,),
            label="layers of stage 1",
        )
        return outputs


@pytest.fixture
def wire() -> MemoryWire:
    return MemoryWire()


@pytest.fixture
def ends(wire: MemoryWire) -> Iterator[Ends]:
    checkers = HappensBefore(), HappensBefore()
    with (
        make_streams("cpu", recorder=checkers[0]) as sender,
        make_streams("cpu", recorder=checkers[1]) as receiver,
    ):
        yield Ends(wire, sender, receiver)
    for checker in checkers:
        checker.check()


@pytest.mark.parametrize("overlap", [False, True])
def test_both_ends_give_the_bits_of_one_thread(ends: Ends, overlap: bool) -> None:
    # pipeline G13, G16
    inputs = steps(12)
    slots = [ends.send(x, overlap=overlap) for x in inputs]
    outputs = [ends.receive() for _ in inputs]
    ends.second.stream.synchronize(WAIT_S)
    ends.first.stream.synchronize(WAIT_S)
    assert same_bits([each for step in outputs for each in step], reference(inputs, 2))
    assert slots == ([0, 1] * 6 if overlap else [0] * 12)
    assert (ends.sender.kind, ends.receiver.kind) == ("messages between processes",) * 2


def test_the_senders_stage_goes_on_until_both_slots_are_full(ends: Ends, wire: MemoryWire) -> None:
    """Nobody receives: two steps leave the stage, and the third waits for a slot."""
    # pipeline G18
    wire.blocking = True
    ends.sender.prewarm(1024)
    for x in steps(4):
        ends.send(x)
    with pytest.raises(RunError, match="'stage 0' waits for event 'cut 0 rx 0' of 'cut 0 out'"):
        ends.first.stream.synchronize(0.3)
    outputs = [ends.receive() for _ in range(4)]
    ends.second.stream.synchronize(WAIT_S)
    ends.first.stream.synchronize(WAIT_S)
    assert same_bits([each for step in outputs for each in step], reference(steps(4), 2))


def test_random_interleavings_of_the_sender(wire: MemoryWire) -> None:
    inputs = steps(8)
    for seed in range(40):
        checker = HappensBefore()
        script = ScriptedController(Seeded(seed))
        with (
            make_streams("cpu", recorder=checker, controller=script) as sender,
            make_streams("cpu") as receiver,
        ):
            ends = Ends(wire, sender, receiver)
            outputs = []
            for x in inputs:
                ends.send(x, overlap=bool(seed % 2))
                outputs.append(ends.receive())
            script.run_all()
            ends.second.stream.synchronize(WAIT_S)
        assert same_bits([each for step in outputs for each in step], reference(inputs, 2))
        checker.check()


def test_a_payload_that_does_not_come_is_an_error_of_the_stage(
    ends: Ends, wire: MemoryWire
) -> None:
    wire.timeout_s = 0.05
    ends.receive()
    with pytest.raises(TransferError, match="#0 of cut 0 did not come"):
        ends.second.stream.synchronize(WAIT_S)


def test_a_payload_of_another_step_is_an_error_of_the_stage(ends: Ends, wire: MemoryWire) -> None:
    """As when the other process has skipped a step."""
    for x in steps(2):
        ends.send(x)
    ends.first.stream.synchronize(WAIT_S)
    wire.under_way.get(timeout=WAIT_S)
    ends.receive()
    with pytest.raises(TransferError, match="#1 of cut 0 came where #0 was due"):
        ends.second.stream.synchronize(WAIT_S)
