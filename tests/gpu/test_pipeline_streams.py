"""Streams, cuts and readback on CUDA: one device for what needs one, a pair for peer copies.

Streams are stalled with a kernel that spins, so that what must wait would be seen not to.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, distributed

from layline.errors import RunError, UsageError
from layline.pipeline.copies import choose_transport
from layline.pipeline.cuda_driver import CudaRuntime
from layline.pipeline.device import StageDevice
from layline.pipeline.faults import Fault, Faults
from layline.pipeline.payload import Payload, layout_of, room_for
from layline.pipeline.process_link import LinkEnds, LinkReceiver, LinkSender
from layline.pipeline.readback import PendingLogits
from layline.pipeline.streams import Stream, Streams, make_streams
from layline.pipeline.torch_wire import TorchWire
from layline.pipeline.transport import Boundary, CutOptions
from layline.topology import Topology
from support.cut_chain import TIMEOUT_S, WIDTH, Chain, Stage, reference, same_bits, steps
from support.happens_before import HappensBefore
from support.ranks import Settings, run_processes

# Streams that share one of the driver's few queues wait for each other; read when CUDA starts.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 1, reason="no CUDA device"),
]
two_devices = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="fewer than two CUDA devices"
)
# Some tenths of a second on any clock of today's GPUs.
LONG = 600_000_000
PAIRS = [pytest.param((0, 1), marks=two_devices), pytest.param((1, 0), marks=two_devices)]
PLACES = [pytest.param((0, 0), id="one device"), *PAIRS]


def stall(stream: Stream) -> None:
    """Keep a stream's GPU work from going on for a while."""
    stream.run(partial(torch.cuda._sleep, LONG), label="stall")


def warm_up(*made: Stream) -> None:
    """First uses of kernels and memory may wait for a whole device: let them be behind us."""
    for stream in made:
        device = stream.device.torch_device
        stream.run(partial(_touch, device), label="warm")
        stall(stream)
        stream.synchronize(TIMEOUT_S)


def _touch(device: torch.device) -> None:
    blocks = [torch.full((1 << 19,), 1.0, device=device) for _ in range(8)]
    blocks[0].view(64, -1).mul(1.0).clone()
    torch.zeros(64, dtype=torch.uint8, device=device).fill_(1)
    torch.ones(4, device=device)


class Cut:
    """One cut between two streams on ``places``."""

    def __init__(
        self, streams: Streams, places: tuple[int, int], fault: Fault | None = None
    ) -> None:
        faults = Faults() if fault is None else Faults(frozenset({fault}))
        self.producer = streams.stream("producer", places[0])
        self.receiver = streams.stream("receiver", places[1])
        self.readback = streams.stream("readback", places[1])
        self.streams = streams
        self.boundary = Boundary(
            "cut 0",
            self.producer,
            self.receiver,
            streams,
            options=CutOptions(TIMEOUT_S, faults=faults),
        )
        warm_up(self.producer, self.receiver, self.readback)
        # One payload over a cut that nobody looks at.
        warm = Boundary("warm", self.producer, self.receiver, streams)
        cell = self.producer.run(lambda: {"hidden_states": value(0, places[0])}, label="warm")
        arrived = warm.receive(warm.send(cell, 1 << 19))
        output = self.receiver.run(lambda: arrived.get()["hidden_states"] * 1.0, label="warm")
        PendingLogits(output, self.receiver, self.readback, streams).wait(TIMEOUT_S)

    def send(self, make: Callable[[], Tensor], room: int, *, overlap: bool = False) -> int:
        cell = self.producer.run(lambda: {"hidden_states": make()}, label="layers")
        return self.boundary.send(cell, room, overlap=overlap)

    def receive(self, slot: int) -> PendingLogits:
        """Consumed by a later task of the receiver, as a stage's layers would."""
        cell = self.boundary.receive(slot)
        taken = self.receiver.run(
            lambda: cell.get()["hidden_states"] * 1.0, reads=cell.buffers, label="layers"
        )
        return PendingLogits(taken, self.receiver, self.readback, self.streams)


def value(number: int, device: int, num_rows: int = 64) -> Tensor:
    return torch.full((num_rows, 1024), float(number), device=torch.device("cuda", device))


def expected(number: int, num_rows: int = 64) -> Tensor:
    return torch.full((num_rows, 1024), float(number))


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_a_payload_crosses_bit_by_bit(places: tuple[int, int], dtype: torch.dtype) -> None:
    # pipeline G16, G13
    with make_streams("cuda") as streams:
        producer = streams.stream("producer", places[0])
        receiver = streams.stream("receiver", places[1])
        cut = Boundary("cut 0", producer, receiver, streams)
        assert cut.transport.kind == ("local copy" if places[0] == places[1] else "peer copy")
        raw = torch.randint(0, 2 if dtype is torch.bool else 256, (17, 96, 8), dtype=torch.uint8)
        sent = {"hidden_states": raw.view(dtype), "residual": torch.randn(31, 7).t()}
        room = layout_of(sent).size

        def make() -> Payload:
            return {name: each.to(producer.device.torch_device) for name, each in sent.items()}

        got = cut.receive(cut.send(producer.run(make, label="layers"), room))
        receiver.synchronize(TIMEOUT_S)
        for name, tensor in got.get().items():
            assert tensor.device == receiver.device.torch_device
            assert torch.equal(
                tensor.cpu().contiguous().view(torch.uint8),
                sent[name].contiguous().view(torch.uint8),
            )


@two_devices
def test_both_ways_to_the_driver_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVIDIA's bindings where they are, and the library that torch loaded."""
    for without_bindings in (False, True):
        if without_bindings:
            monkeypatch.setitem(sys.modules, "cuda.bindings", None)
        with make_streams("cuda") as streams:
            stream = streams.stream("producer", 0)
            transport = choose_transport(
                StageDevice("cuda", 0), StageDevice("cuda", 1), CudaRuntime()
            )
            source = value(3, 0)
            target = torch.zeros(64, 1024, device="cuda:1")
            torch.cuda.synchronize(0)
            torch.cuda.synchronize(1)
            stream.run(partial(transport.copy, target, source, stream), label="copy")
            stream.synchronize(TIMEOUT_S)
            assert torch.equal(target.cpu(), expected(3))


@two_devices
def test_devices_that_reach_each_other_are_taken_twice_without_a_trace() -> None:
    """Access that is enabled already leaves no error behind for torch's next kernel."""
    # pipeline G15
    for _ in range(2):
        choose_transport(StageDevice("cuda", 0), StageDevice("cuda", 1))
        for device in (0, 1):
            assert (torch.ones(3, device=f"cuda:{device}") + 1).sum().item() == 6


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("window", [1, 3])
def test_chains_give_the_bits_of_no_cut(
    places: tuple[int, int], overlap: bool, window: int
) -> None:
    # pipeline G16, G18, G19, G20
    inputs = steps(40)
    checker = HappensBefore()
    with make_streams("cuda", recorder=checker) as streams:
        chain = Chain(streams, 2, ordinals=places)
        run = chain.run(inputs, window=window, overlap=overlap)
    assert same_bits(run.outputs, reference(inputs, 2, StageDevice("cuda", 0)))
    assert run.slots == ([0, 1] * 20 if overlap else [0] * 40)
    checker.check()
    assert checker.remote_reads == []


def first_use(places: tuple[int, int], fault: Fault | None) -> bool:
    """Whether the first payload arrives although the receiver is stalled when its slot grows."""
    with make_streams("cuda") as streams:
        cut = Cut(streams, places, fault)
        stall(cut.receiver)
        pending = cut.receive(cut.send(lambda: value(1, places[0]), 1 << 19))
        return bool(torch.equal(pending.wait(TIMEOUT_S), expected(1)))


@pytest.mark.parametrize("places", PLACES)
def test_the_first_use_of_a_slot_is_behind_its_clear(places: tuple[int, int]) -> None:
    # pipeline G17
    assert first_use(places, None)
    assert not first_use(places, Fault.SKIP_GROWTH_SYNC)


def reuse(places: tuple[int, int], fault: Fault | None, *, consumer: bool = False) -> bool:
    """Whether four payloads arrive although the receiver is stalled before it reads them."""
    with make_streams("cuda") as streams:
        cut = Cut(streams, places, fault)
        cut.boundary.prewarm(1 << 19)
        pending = []
        if not consumer:
            stall(cut.receiver)
        for number in range(4):
            slot = cut.send(partial(value, number, places[0]), 1 << 19)
            cell = cut.boundary.receive(slot)
            if consumer:
                stall(cut.receiver)
            taken = cut.receiver.run(
                lambda cell=cell: cell.get()["hidden_states"] * 1.0,
                reads=cell.buffers,
                label="layers",
            )
            pending.append(PendingLogits(taken, cut.receiver, cut.readback, streams))
        return all(
            bool(torch.equal(each.wait(TIMEOUT_S), expected(number)))
            for number, each in enumerate(pending)
        )


@pytest.mark.parametrize("places", PLACES)
def test_a_slot_is_filled_again_only_when_it_has_been_read(places: tuple[int, int]) -> None:
    # pipeline G18
    assert reuse(places, None)
    assert not reuse(places, Fault.DROP_RX_WAIT)


@pytest.mark.parametrize("places", PLACES)
def test_what_was_received_survives_the_slots_next_payload(places: tuple[int, int]) -> None:
    # pipeline G19
    assert reuse(places, None, consumer=True)
    assert not reuse(places, Fault.RETURN_SLOT_VIEW, consumer=True)


def early_read(places: tuple[int, int], fault: Fault | None) -> bool:
    """Whether a payload arrives although its producer is stalled before it fills the slot."""
    with make_streams("cuda") as streams:
        cut = Cut(streams, places, fault)
        first = cut.receive(cut.send(lambda: value(1, places[0]), 1 << 19))
        first.wait(TIMEOUT_S)
        stall(cut.producer)
        second = cut.receive(cut.send(lambda: value(2, places[0]), 1 << 19))
        return bool(torch.equal(second.wait(TIMEOUT_S), expected(2)))


@pytest.mark.parametrize("places", PLACES)
def test_a_stalled_producer_is_waited_for(places: tuple[int, int]) -> None:
    # pipeline G18
    assert early_read(places, None)
    assert not early_read(places, Fault.DROP_TX_WAIT)


# The last two depend on luck in the bits: nothing can stall a device between the host's two calls.
CHECKED = [
    Fault.DROP_RX_WAIT,
    Fault.DROP_TX_WAIT,
    Fault.EARLY_RX_RECORD,
    Fault.FIRST_USE_CLEAR_LATE,
]


@pytest.mark.parametrize("fault", CHECKED)
def test_the_race_checker_sees_faults_here_too(fault: Fault) -> None:
    checker = HappensBefore()
    with make_streams("cuda", recorder=checker) as streams:
        options = CutOptions(TIMEOUT_S, faults=Faults(frozenset({fault})))
        Chain(streams, 2, options=options, ordinals=(0, 0)).run(steps(8), window=3)
    assert any("cut 0 slot 0" in race for race in checker.races)


@pytest.mark.parametrize("places", PLACES)
def test_slots_grow_and_narrow_payloads_are_exact(places: tuple[int, int]) -> None:
    # pipeline G20
    with make_streams("cuda") as streams:
        cut = Cut(streams, places)
        for number, num_rows in enumerate((3, 1, 64, 2, 0, 65, 5)):
            room = room_for((num_rows, 1024), torch.float32, 1)
            pending = cut.receive(cut.send(partial(value, number, places[0], num_rows), room))
            assert torch.equal(pending.wait(TIMEOUT_S), expected(number, num_rows))
        assert cut.boundary.capacities == (65 * 4096, 0)


def test_a_wait_binds_to_the_latest_record_when_it_is_issued() -> None:
    """A record that comes later does not move it, and an unrecorded event holds nobody up."""
    with make_streams("cuda") as streams:
        first, second = streams.stream("first"), streams.stream("second")
        warm_up(first, second)
        event = streams.event("done")
        second.wait(event)
        event.synchronize(0.0)
        assert event.is_done()
        first.record(event)
        second.wait(event)
        stall(first)
        first.record(event)
        second.run(lambda: torch.ones(4, device="cuda:0"), label="after")
        second.synchronize(TIMEOUT_S)
        assert not event.is_done()
        assert not first.is_idle
        second.wait(event)
        assert not second.is_idle
        first.synchronize(TIMEOUT_S)
        second.synchronize(TIMEOUT_S)


def test_waits_have_a_timeout_and_a_name() -> None:
    with make_streams("cuda") as streams:
        stream = streams.stream("stage 0")
        warm_up(stream)
        event = streams.event("cut 0 tx 0")
        stall(stream)
        stream.record(event)
        with pytest.raises(RunError, match=r"waited 0\.001 s for the end of stream 'stage 0'"):
            stream.synchronize(0.001)
        with pytest.raises(RunError, match=r"waited 0\.001 s for event 'cut 0 tx 0'"):
            event.synchronize(0.001)
        stream.synchronize(TIMEOUT_S)


def test_a_task_that_raises_poisons_as_on_the_cpu() -> None:
    def fail() -> None:
        raise ValueError("no such layer")

    ran: list[str] = []
    with make_streams("cuda") as streams:
        first, second = streams.stream("stage 0"), streams.stream("stage 1")
        event = streams.event("done")
        first.run(fail, label="layers 0 to 3")
        first.run(lambda: ran.append("skipped"), label="skipped")
        first.record(event)
        second.wait(event)
        second.run(lambda: ran.append("skipped too"), label="skipped too")
        for wait in (first.synchronize, second.synchronize, event.synchronize):
            with pytest.raises(ValueError, match="no such layer"):
                wait(TIMEOUT_S)
    assert ran == []


def test_a_wait_for_one_steps_logits_leaves_the_later_ones() -> None:
    # pipeline G35
    with make_streams("cuda") as streams:
        last, readback = streams.stream("last"), streams.stream("readback")
        warm_up(last, readback)

        def pending(number: int) -> PendingLogits:
            cell = last.run(partial(value, number, 0), label=f"logits {number}")
            return PendingLogits(cell, last, readback, streams)

        first = pending(1)
        first.wait(TIMEOUT_S)  # Pinned memory is now there: allocating it synchronises.
        first = pending(2)
        stall(last)
        second = pending(3)
        assert torch.equal(first.wait(TIMEOUT_S), expected(2))
        assert not second.is_done()
        assert not last.is_idle
        assert torch.equal(second.wait(TIMEOUT_S), expected(3))


def test_logits_that_nobody_waits_for_may_be_dropped() -> None:
    # pipeline G36
    inputs = steps(30)
    with make_streams("cuda") as streams:
        chain = Chain(streams, 2, ordinals=(0, 0))
        kept = []
        for number, x in enumerate(inputs):
            pending = chain.issue(x, overlap=True)
            if number % 3 == 2:
                kept.append(pending.wait(TIMEOUT_S))
            del pending
    assert same_bits(kept, reference(inputs, 2, StageDevice("cuda", 0))[2::3])


def linked(topology: Topology, groups: dict[Any, Any]) -> list[Tensor]:
    """One process of two: stage 0 or 1, each on its GPU, with an NCCL link between."""
    rank = topology.rank
    control = distributed.new_group([0, 1], backend="gloo")
    data = distributed.new_group([0, 1], backend="nccl")
    device = torch.device("cuda", rank)
    wire = TorchWire(
        LinkEnds("cut 0", 0, 1, peer=1 - rank), control, device=device, data=data, timeout_s=30.0
    )
    inputs = steps(20)
    with make_streams("cuda") as streams:
        stage = Stage(rank, streams.stream(f"stage {rank}", rank))
        readback = streams.stream("readback", rank)
        pending: list[PendingLogits] = []
        if rank == 0:
            link = LinkSender("cut 0", stage.stream, streams, wire)
            for x in inputs:
                cell = stage.stream.run(
                    lambda x=x: stage.compute({"hidden_states": x.to(device)}), label="layers"
                )
                link.send(cell, room_for((x.shape[0], WIDTH), x.dtype), overlap=True)
        else:
            receiver = LinkReceiver("cut 0", stage.stream, streams, wire)
            for _ in inputs:
                incoming = receiver.receive()
                output = stage.stream.run(
                    lambda incoming=incoming: stage.compute(incoming.get())["hidden_states"],
                    label="layers",
                )
                pending.append(PendingLogits(output, stage.stream, readback, streams))
        outputs = [each.wait(TIMEOUT_S) for each in pending]
        stage.stream.synchronize(TIMEOUT_S)
        streams.close(TIMEOUT_S)
    torch.cuda.synchronize()
    distributed.barrier(group=control)
    return outputs


@two_devices
def test_two_processes_give_the_bits_of_no_cut() -> None:
    """Headers over gloo, bytes over NCCL."""  # pipeline G13, G16
    settings = Settings(backend="nccl", group_timeout_s=60.0)
    _, outputs = run_processes(Topology(tp=2), linked, settings=settings, timeout_s=120.0)
    assert same_bits(outputs, reference(steps(20), 2, StageDevice("cuda", 0)))


def test_a_missing_device_is_named() -> None:
    with (
        make_streams("cuda") as streams,
        pytest.raises(UsageError, match="on CUDA device 99; expected one of 0 to"),
    ):
        streams.stream("stage 0", 99)
