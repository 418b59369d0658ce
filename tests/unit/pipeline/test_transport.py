"""A cut's two slots: bits, growth, order, with receivers and producers stalled on purpose."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from layline.errors import TransferError
from layline.pipeline.controllers import Listed, ScriptedController
from layline.pipeline.copies import choose_transport
from layline.pipeline.device import StageDevice
from layline.pipeline.payload import ALIGNMENT, Layout, Payload, layout_of, room_for
from layline.pipeline.streams import Stream, make_streams
from layline.pipeline.transport import Boundary, CutOptions
from support.happens_before import HappensBefore

WAIT_S = 30.0


class Cut:
    """One cut with both ends, a script and a race checker."""

    def __init__(self, *, poison: bool = True) -> None:
        self.counts: Counter[str] = Counter()
        self.script = ScriptedController(Listed("producer"))
        self.checker = HappensBefore()
        self.streams = make_streams("cpu", controller=self.script, recorder=self.checker)
        self.producer: Stream = self.streams.stream("producer", 0)
        self.receiver: Stream = self.streams.stream("receiver", 1)
        self.boundary = Boundary(
            "cut 0",
            self.producer,
            self.receiver,
            self.streams,
            options=CutOptions(
                WAIT_S, poison=poison, count=lambda name: self.counts.update([name])
            ),
        )

    def send(self, payload: Payload, room: int | None = None, *, overlap: bool = False) -> int:
        cell = self.producer.run(lambda: payload, label="layers")
        room = layout_of(payload).size if room is None else room
        return self.boundary.send(cell, room, overlap=overlap)

    def cross(self, payload: Payload, room: int | None = None, *, overlap: bool = False) -> Payload:
        cell = self.boundary.receive(self.send(payload, room, overlap=overlap))
        self.receiver.synchronize(WAIT_S)
        return cell.get()


@pytest.fixture
def cut() -> Iterator[Cut]:
    made = Cut()
    with made.streams:
        yield made
    made.checker.check()


def rows(number: int, num_rows: int = 3, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(num_rows, 6, generator=generator).to(dtype)


def bits(x: Tensor) -> bytes:
    return x.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn),
        *(torch.float8_e5m2, torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64),
    ],
)
def test_a_payload_crosses_bit_by_bit(cut: Cut, dtype: torch.dtype) -> None:
    """Both tensors, in any dtype, NaN payloads and negative zeros included."""  # pipeline G16
    raw = torch.randint(0, 256, (5, 7, 16), dtype=torch.uint8)
    if dtype is torch.bool:
        raw %= 2
    hidden = raw.view(dtype)
    residual = rows(1, 9).t()  # Not contiguous.
    got = cut.cross({"hidden_states": hidden, "residual": residual})
    assert list(got) == ["hidden_states", "residual"]
    for name, sent in (("hidden_states", hidden), ("residual", residual)):
        assert got[name].dtype == sent.dtype
        assert got[name].shape == sent.shape
        assert bits(got[name]) == bits(sent)


def test_one_tensor_none_of_a_row_and_a_scalar_cross(cut: Cut) -> None:
    """A written stream has one tensor; a rank may have no rows."""  # pipeline G16
    for payload in (
        {"hidden_states": rows(1)},
        {"hidden_states": torch.empty(0, 6), "residual": torch.empty(0, 6)},
        {"hidden_states": torch.tensor(3.5)},
    ):
        got = cut.cross(payload)
        assert list(got) == list(payload)
        assert all(torch.equal(got[name], payload[name]) for name in payload)
        assert all(got[name].shape == payload[name].shape for name in payload)


def test_tensors_start_aligned_and_keep_apart() -> None:
    layout = layout_of({"a": torch.zeros(3, dtype=torch.uint8), "b": rows(1), "c": rows(2)})
    assert [part.offset for part in layout.parts] == [0, ALIGNMENT, 3 * ALIGNMENT]
    assert layout.size == 5 * ALIGNMENT
    assert room_for((3, 6), torch.float32) == 4 * ALIGNMENT
    with pytest.raises(TransferError, match="the payload has no tensors"):
        layout_of({})


def test_the_first_use_of_a_slot_is_behind_its_clear(cut: Cut) -> None:
    """With a stalled receiver: the host waits for it once, and the payload is not wiped."""
    # pipeline G17
    cut.script.stall("receiver")
    cut.receiver.run(lambda: None, label="earlier work")
    slot = cut.send({"hidden_states": rows(1)})
    labels = [label for _, label in cut.script.history]
    assert "clear cut 0 slot 0" in labels
    cell = cut.boundary.receive(slot)
    cut.receiver.synchronize(WAIT_S)
    assert bits(cell.get()["hidden_states"]) == bits(rows(1))
    assert cut.counts == {"growth_events": 1, "growth_syncs": 1}


@pytest.mark.parametrize("overlap", [False, True])
def test_a_slot_is_filled_again_only_when_it_has_been_read(cut: Cut, overlap: bool) -> None:
    """With a stalled receiver the producer stops at the slot that is still read."""
    # pipeline G18
    cut.boundary.prewarm(256)
    cut.script.hold("receiver")
    cells = []
    for number in range(4):
        slot = cut.send({"hidden_states": rows(number)}, overlap=overlap)
        cells.append(cut.boundary.receive(slot))
    cut.script.run_all()
    sent = [label for _, label in cut.script.history if "tx #" in label]
    assert sent == (["cut 0 tx #0", "cut 0 tx #1"] if overlap else ["cut 0 tx #0"])
    cut.script.release("receiver")
    cut.receiver.synchronize(WAIT_S)
    for number, cell in enumerate(cells):
        assert bits(cell.get()["hidden_states"]) == bits(rows(number))


def test_a_stalled_producer_is_waited_for(cut: Cut) -> None:
    """The receiver does not read what the slot held before."""  # pipeline G18
    cut.cross({"hidden_states": rows(1)})
    cut.script.hold("producer")
    cell = cut.boundary.receive(cut.send({"hidden_states": rows(2)}))
    cut.script.run_all()
    assert not cell.is_filled
    cut.script.release("producer")
    cut.receiver.synchronize(WAIT_S)
    assert bits(cell.get()["hidden_states"]) == bits(rows(2))


def test_what_was_received_survives_the_slots_next_payloads(cut: Cut) -> None:
    """It shares no memory with the slot, nor with another step's."""  # pipeline G19
    cells = []
    for number in range(5):
        cells.append(cut.boundary.receive(cut.send({"hidden_states": rows(number)})))
        cut.receiver.synchronize(WAIT_S)
    tensors = [cell.get()["hidden_states"] for cell in cells]
    assert [bits(each) for each in tensors] == [bits(rows(number)) for number in range(5)]
    assert len({each.untyped_storage().data_ptr() for each in tensors}) == 5
    with torch.inference_mode():
        tensors[0].fill_(7.0)
    assert bits(cut.cross({"hidden_states": rows(9)})["hidden_states"]) == bits(rows(9))


def test_slots_only_grow_and_narrow_payloads_are_exact(cut: Cut) -> None:
    # pipeline G20, G21
    largest = 0
    for number, num_rows in enumerate((3, 1, 40, 2, 0, 40, 41, 5)):
        sent = rows(number, num_rows)
        got = cut.cross({"hidden_states": sent})["hidden_states"]
        assert got.shape == sent.shape
        assert bits(got) == bits(sent)
        largest = max(largest, room_for((num_rows, 6), torch.float32, 1))
        assert cut.boundary.capacities == (largest, 0)
    assert cut.counts["growth_events"] == 3
    assert cut.counts["growth_syncs"] <= cut.counts["growth_events"]


def test_a_slot_may_grow_while_its_last_payload_is_still_to_be_read(cut: Cut) -> None:
    """The receive was issued: it reads the old memory, whatever the slot has now."""
    # pipeline G17, G20
    cut.script.stall("receiver")
    first = cut.boundary.receive(cut.send({"hidden_states": rows(1, 2)}))
    second = cut.boundary.receive(cut.send({"hidden_states": rows(2, 50)}))
    cut.receiver.synchronize(WAIT_S)
    assert bits(first.get()["hidden_states"]) == bits(rows(1, 2))
    assert bits(second.get()["hidden_states"]) == bits(rows(2, 50))


def test_prewarmed_slots_drain_nobody_later(cut: Cut) -> None:
    # pipeline G21
    cut.boundary.prewarm(1024)
    assert cut.boundary.capacities == (1024, 1024)
    assert cut.counts == {"growth_events": 2, "growth_syncs": 2}
    cut.script.hold("receiver")
    for number in range(2):
        cut.boundary.receive(cut.send({"hidden_states": rows(number, 30)}, overlap=True))
    assert cut.counts["growth_syncs"] == 2
    cut.script.release("receiver")
    cut.receiver.synchronize(WAIT_S)
    cut.boundary.prewarm(8)
    assert cut.boundary.capacities == (1024, 1024)


def test_overlap_alternates_slots_and_without_it_slot_0_serves(cut: Cut) -> None:
    """Read at every call, so that it can be turned on and off."""  # pipeline G22, G23
    used = []
    for overlap in (True, True, True, True, False, False, False, True, True, False, True):
        used.append(cut.send({"hidden_states": rows(1)}, overlap=overlap))
        cut.boundary.receive()
    cut.receiver.synchronize(WAIT_S)
    assert used == [0, 1, 0, 1, 0, 0, 0, 0, 1, 0, 0]


def test_two_slots_are_two_steps_in_flight(cut: Cut) -> None:
    """Overlap is real: the second step crosses while the first is still unread."""
    # pipeline G22
    cut.boundary.prewarm(256)
    cut.script.hold("receiver")
    slots = [cut.send({"hidden_states": rows(number)}, overlap=True) for number in range(2)]
    cells = [cut.boundary.receive(slot) for slot in slots]
    cut.script.run_all()
    assert cut.producer.is_idle
    cut.script.release("receiver")
    cut.receiver.synchronize(WAIT_S)
    assert [bits(cell.get()["hidden_states"]) for cell in cells] == [bits(rows(0)), bits(rows(1))]


def test_a_send_before_the_receive_of_what_the_slot_holds_is_refused(cut: Cut) -> None:
    """Its wait would bind to an older record, and overwrite what nobody has read."""
    # pipeline G24
    assert cut.send({"hidden_states": rows(0)}) == 0
    with pytest.raises(TransferError, match="transfer #1 needs slot 0 before the receive of #0"):
        cut.send({"hidden_states": rows(1)})
    with pytest.raises(TransferError, match="slot 0 before the receive of #0"):
        cut.boundary.prewarm(4096)
    cut.boundary.receive(0)
    # With two slots it is the third that comes too early.
    for number in range(2):
        cut.send({"hidden_states": rows(number)}, overlap=True)
    with pytest.raises(TransferError, match="transfer #3 needs slot 0 before the receive of #1"):
        cut.send({"hidden_states": rows(2)}, overlap=True)
    with pytest.raises(TransferError, match="slot 1 was to be received; the oldest payload, #1"):
        cut.boundary.receive(1)
    cut.boundary.receive(0)
    cut.boundary.receive(1)
    with pytest.raises(TransferError, match="a receive was issued, and nothing was sent"):
        cut.boundary.receive()
    cut.receiver.synchronize(WAIT_S)


def test_a_payload_larger_than_announced_is_an_error_where_it_is_waited_for(cut: Cut) -> None:
    cut.boundary.receive(cut.send({"hidden_states": rows(1, 40)}, room=128))
    with pytest.raises(TransferError, match="has 960 bytes; the host announced at most 128"):
        cut.receiver.synchronize(WAIT_S)


def test_a_stage_that_raises_is_heard_of_behind_every_cut() -> None:
    def fail() -> Payload:
        raise ValueError("no such layer")

    cut = Cut()
    with cut.streams:
        last = cut.streams.stream("last", 2)
        second = Boundary("cut 1", cut.receiver, last, cut.streams)
        cell = cut.producer.run(fail, label="layers")
        arrived = cut.boundary.receive(cut.boundary.send(cell, 256))
        second.receive(second.send(arrived, 256))
        with pytest.raises(ValueError, match="no such layer"):
            last.synchronize(WAIT_S)


def test_unread_memory_is_poison(cut: Cut) -> None:
    """A new slot, and one that has been read, hold NaN: reading them shows."""
    seen: list[Tensor] = []
    untouched: list[Tensor] = []

    def take(layout: Layout, memory: Tensor) -> None:
        seen.append(memory)
        untouched.append(memory[layout.size :].clone())

    cut.boundary.deliver(take, cut.send({"hidden_states": rows(1)}, room=512))
    cut.receiver.synchronize(WAIT_S)
    assert seen[0].numel() == 512
    assert untouched[0].numel() == 512 - 2 * ALIGNMENT
    for memory in (seen[0], untouched[0]):
        assert memory.view(torch.float32).isnan().all()
        assert memory.view(torch.bfloat16).isnan().all()


@pytest.mark.parametrize(
    ("producer", "receiver", "kind"),
    [
        (StageDevice("cpu", 0), StageDevice("cpu", 0), "local copy"),
        (StageDevice("cpu", 0), StageDevice("cpu", 1), "peer copy"),
        (StageDevice("cuda", 1), StageDevice("cuda", 1), "local copy"),
    ],
)
def test_the_transport_follows_the_devices(
    producer: StageDevice, receiver: StageDevice, kind: str
) -> None:
    # pipeline G13
    assert choose_transport(producer, receiver).kind == kind


def test_every_cut_has_the_transport_of_its_own_devices() -> None:
    # pipeline G13
    with make_streams("cpu") as streams:
        stages = [streams.stream(f"stage {n}", place) for n, place in enumerate((0, 0, 1, 0))]
        cuts = [
            Boundary(f"cut {n}", stages[n], stages[n + 1], streams) for n in range(len(stages) - 1)
        ]
        assert [each.transport.kind for each in cuts] == ["local copy", "peer copy", "peer copy"]


def test_nothing_goes_between_kinds_of_devices() -> None:
    with pytest.raises(TransferError, match="nothing goes from cpu:0 to cuda:1"):
        choose_transport(StageDevice("cpu", 0), StageDevice("cuda", 1))


class FakeCuda:
    """CudaCalls that remember, and copy in the CPU's memory. ``access``: which reach each other."""

    def __init__(self, *access: tuple[int, int]) -> None:
        self.access = access
        self.enabled: list[tuple[int, int]] = []
        self.copied: list[tuple[tuple[int, int], tuple[int, int], int, int]] = []

    def can_access(self, device: int, peer: int) -> bool:
        return (device, peer) in self.access

    def enable_access(self, device: int, peer: int) -> None:
        self.enabled.append((device, peer))

    def copy_peer(
        self, target: tuple[int, int], source: tuple[int, int], size: int, stream: int
    ) -> None:
        self.copied.append((target, source, size, stream))
        ctypes.memmove(target[0], source[0], size)


@pytest.mark.parametrize("access", [(), ((0, 1),), ((1, 0),)])
def test_devices_without_peer_access_are_refused(access: tuple[tuple[int, int], ...]) -> None:
    """In either direction; nothing is enabled and nothing goes by way of the host."""
    # pipeline G14
    calls = FakeCuda(*access)
    with pytest.raises(TransferError, match=r"cuda:. has no peer access to cuda:."):
        choose_transport(StageDevice("cuda", 0), StageDevice("cuda", 1), calls)
    assert calls.enabled == []


def test_a_peer_copy_takes_the_producers_stream_and_whole_tensors() -> None:
    """Through the raw call: the right addresses, devices, size and stream."""  # pipeline G13

    class OnStream:
        native = SimpleNamespace(cuda_stream=4711)

    calls = FakeCuda((0, 1), (1, 0))
    transport = choose_transport(StageDevice("cuda", 1), StageDevice("cuda", 0), calls)
    assert transport.kind == "peer copy"
    assert sorted(calls.enabled) == [(0, 1), (1, 0)]
    target, source = torch.zeros(3, 6), rows(1)
    transport.copy(target, source, OnStream())  # type: ignore[arg-type]
    assert calls.copied == [((target.data_ptr(), 0), (source.data_ptr(), 1), 72, 4711)]
    assert torch.equal(target, source)
    # Columns of a wider tensor are gathered first; empty tensors need no call.
    narrow = torch.zeros(3, 2)
    transport.copy(narrow, source[:, :2], OnStream())  # type: ignore[arg-type]
    assert calls.copied[-1][2] == 24
    assert torch.equal(narrow, source[:, :2])
    transport.copy(target[:0], source[:0], OnStream())  # type: ignore[arg-type]
    assert len(calls.copied) == 2
