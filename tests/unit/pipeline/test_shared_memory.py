"""Memory shared by two ends, here in one process on two threads: order, bits and waits."""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from layline.errors import TransferError
from layline.pipeline.fence import even_fence, layers_of
from layline.pipeline.payload import Payload
from layline.pipeline.process_link import LinkEnds
from layline.pipeline.runtime import PipelineRuntime
from layline.pipeline.shared_link import HandingOn, SharedReceiver, SharedSender
from layline.pipeline.shared_memory import (
    TOKEN_BYTES,
    SharedBoard,
    SharedMemory,
    SharedSlots,
    is_supported,
)
from layline.pipeline.stages import stage_home
from layline.pipeline.streams import make_streams
from support.toy_pipeline import NUM_LAYERS, ToyStage, one_stage, same_bits, toy_steps

pytestmark = pytest.mark.skipif(not is_supported(), reason="no such memory on this machine")

WAIT_S = 30.0
PAGE = 4096
Memory = TypeVar("Memory", bound=SharedMemory)
Value = TypeVar("Value")


def both(kind: type[Memory], lay_out: Callable[[Memory], None] | None = None) -> list[Memory]:
    """What one end makes, and what the other one finds of it."""
    token = secrets.token_bytes(TOKEN_BYTES)
    made = kind.create("test", token)
    if lay_out is not None:
        lay_out(made)
    found = kind.open(os.getpid(), made.descriptor, token)
    assert found is not None
    return [made, found]


class Link:
    """The two ends of a cut from stage 0 to stage 1."""

    def __init__(self, kind: type[SharedSlots] = SharedSlots, timeout_s: float = WAIT_S) -> None:
        self.out, self.into = both(kind)
        self.sender = SharedSender(LinkEnds("cut 0", 0, 1, peer=1), self.out, timeout_s)
        self.receiver = SharedReceiver(LinkEnds("cut 0", 0, 1, peer=0), self.into, timeout_s)

    def take(self) -> Payload:
        return self.receiver.receive().get()


def beside(function: Callable[[], Value]) -> Future[Value]:
    """Run it in a thread; the future has what becomes of it."""
    future: Future[Value] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def rows(value: float, count: int = 3) -> Payload:
    return {"hidden_states": torch.full((count, 4), value)}


def assert_same(found: Payload, wanted: Payload) -> None:
    """In names and their order, shapes, dtypes and every bit."""
    assert list(found) == list(wanted)
    for name, tensor in wanted.items():
        assert (found[name].shape, found[name].dtype) == (tensor.shape, tensor.dtype)
        bits = [each.reshape(-1).view(torch.uint8) for each in (found[name], tensor)]
        assert torch.equal(*bits), name


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(1e-3)


def descriptors() -> set[str]:
    """Those that are open, but for the one that lists them."""
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.add(f"{path.name} {path.readlink()}")
    return found


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.uint8)


Kinds = list[tuple[str, tuple[int, int], torch.dtype]]


def drawn_kinds(draw: random.Random) -> Kinds:
    """One to three tensors, sometimes without a row."""
    names = draw.sample(["hidden_states", "residual", "x"], draw.randint(1, 3))
    return [
        (name, (draw.choice((0, 1, 2, 7, 40)), draw.choice((1, 6, 33))), draw.choice(DTYPES))
        for name in names
    ]


def filled(kinds: Kinds, draw: random.Random) -> Payload:
    """Tensors of any bits, NaN among them."""
    payload = {}
    for name, shape, dtype in kinds:
        data = torch.tensor(
            [*draw.randbytes(shape[0] * shape[1] * dtype.itemsize)], dtype=torch.uint8
        )
        payload[name] = (data % 2 if dtype is torch.bool else data).view(dtype).view(shape)
    return payload


class Slow(Payload):
    """A payload whose tensors come one by one to whoever copies them."""

    pause_s = 0.0

    def values(self) -> Iterator[Tensor]:  # type: ignore[override]
        for tensor in super().values():
            time.sleep(self.pause_s)
            yield tensor
            time.sleep(self.pause_s)


class SlowSlots(SharedSlots):
    """Both ends of it dawdle around whatever they say to each other."""

    draw = random.Random(0)

    def _dawdle(self) -> None:
        if self.draw.random() < 0.3:
            time.sleep(self.draw.random() * 2e-3)

    def await_room(self, number: int, what: str, timeout_s: float) -> None:
        self._dawdle()
        super().await_room(number, what, timeout_s)

    def put(self, number: int) -> None:
        self._dawdle()
        super().put(number)
        self._dawdle()

    def arrived(self, number: int, what: str, timeout_s: float) -> int:
        version = super().arrived(number, what, timeout_s)
        self._dawdle()
        return version

    def taken(self, number: int) -> None:
        self._dawdle()
        super().taken(number)
        self._dawdle()


@pytest.mark.parametrize("seed", range(8))
def test_payloads_come_in_order_with_all_their_bits(seed: int) -> None:
    """Either end dawdles at random, and every payload may be laid out in another way."""
    # pipeline G16, G18, G20
    draw = random.Random(seed)
    known = [drawn_kinds(draw) for _ in range(2)]
    payloads = []
    for _ in range(60):
        # The same layout often comes again, with other bits.
        kinds = draw.choice(known) if draw.random() < 0.7 else drawn_kinds(draw)
        payloads.append(Slow(filled(kinds, draw)))
        payloads[-1].pause_s = draw.choice((0.0, 0.0, 0.0, 5e-4))
    SlowSlots.draw = random.Random(seed)
    link = Link(SlowSlots)

    def send() -> None:
        for payload in payloads:
            link.sender.put(payload)

    sending = beside(send)
    for payload in payloads:
        assert_same(link.take(), dict(payload.items()))
    sending.result(WAIT_S)


def test_the_third_payload_waits_until_the_first_was_taken() -> None:
    # pipeline G18
    link = Link()
    done: list[int] = []

    def send() -> None:
        for number in range(4):
            link.sender.put(rows(number))
            done.append(number)

    sending = beside(send)
    wait_for(lambda: len(done) == 2)
    for number in range(2):
        time.sleep(0.05)
        assert done == [*range(2 + number)]
        assert_same(link.take(), rows(number))
        wait_for(lambda number=number: len(done) == 3 + number)  # type: ignore[misc]
    sending.result(WAIT_S)
    for number in range(2, 4):
        assert_same(link.take(), rows(number))
    assert link.sender.waited_s > 0.04
    assert link.receiver.waited_s == 0.0


def test_a_payload_is_taken_where_it_is_read() -> None:
    """A stage is promised what comes before it is there, and takes it in its task."""
    link = Link()
    inlets = [link.receiver.receive() for _ in range(2)]
    assert [inlet.buffers for inlet in inlets] == [(), ()]
    taking = beside(inlets[0].get)
    time.sleep(0.05)
    assert not taking.done()
    link.sender.put(rows(1))
    link.sender.put(rows(2))
    assert_same(taking.result(WAIT_S), rows(1))
    assert_same(inlets[1].get(), rows(2))
    assert link.receiver.waited_s > 0.04


def test_what_was_taken_outlives_its_slot() -> None:
    # pipeline G19
    link = Link()
    link.sender.put(rows(0))
    first = link.take()
    for number in range(1, 5):
        link.sender.put(rows(number))
        link.take()
    assert_same(first, rows(0))


def test_a_slot_grows_while_the_other_one_is_in_use() -> None:
    """Both ends map what is new, and a narrower payload later leaves the memory as it is."""
    # pipeline G20
    link = Link()
    link.sender.put(rows(0))
    link.sender.put(rows(1))
    assert_same(link.take(), rows(0))
    held = link.into.slot(1)
    bits = held.clone()
    before = os.fstat(link.out.descriptor).st_size
    link.sender.put(rows(2, count=5000))
    grown = os.fstat(link.out.descriptor).st_size
    assert grown >= before + 5000 * 16
    assert torch.equal(held, bits)
    assert_same(link.take(), rows(1))
    assert_same(link.take(), rows(2, count=5000))
    for number in range(3, 9):
        link.sender.put(rows(number, count=number))
        assert_same(link.take(), rows(number, count=number))
    assert os.fstat(link.out.descriptor).st_size == grown


def test_a_slot_has_another_version_for_another_layout_alone() -> None:
    """Other lengths, another dtype, another name, one more, and the same in another order."""
    link = Link()
    row, half = torch.ones(1, 4), torch.ones(1, 4).bfloat16()
    layouts: list[Payload] = [
        {"hidden_states": torch.ones(3, 4)},
        {"hidden_states": row},
        {"hidden_states": half},
        {"x": half},
        {"x": half, "residual": half},
        {"residual": half, "x": half},
    ]
    versions: list[int] = []
    for payload in (layout for layout in layouts for _ in range(4)):
        link.sender.put({name: len(versions) * tensor for name, tensor in payload.items()})
        versions.append(link.into.arrived(len(versions), "", 0.0))
        number = len(versions) - 1
        assert_same(link.take(), {name: number * tensor for name, tensor in payload.items()})
    assert versions == [version for version in range(1, 7) for _ in range(4)]


def test_tensors_without_elements_come_as_they_are() -> None:
    link = Link()
    empty = {"hidden_states": torch.empty(0, 8), "residual": torch.empty(0, 8).bfloat16()}
    for payload in (empty, rows(1), {**empty, **rows(2)}, empty, {"x": torch.tensor(7.0)}):
        link.sender.put(payload)
        assert_same(link.take(), payload)


def test_a_payload_that_does_not_come_is_waited_for_in_vain() -> None:
    link = Link(timeout_s=0.05)
    wanted = "stage 1 waited for #{} of cut 0 from stage 0 (rank 0) in vain (timeout 0.05 s)"
    with pytest.raises(TransferError) as caught:
        link.take()
    assert str(caught.value) == wanted.format(0)
    link.sender.put(rows(0))
    link.sender.put(rows(1))
    assert_same(link.take(), rows(1))
    with pytest.raises(TransferError) as caught:
        link.take()
    assert str(caught.value) == wanted.format(2)


def test_a_payload_that_nobody_takes_is_waited_for_in_vain() -> None:
    link = Link(timeout_s=0.05)
    link.sender.put(rows(0))
    link.sender.put(rows(1))
    with pytest.raises(TransferError) as caught:
        link.sender.put(rows(2))
    assert str(caught.value) == (
        "stage 0 waited for stage 1 (rank 1) to take #2 of cut 0 in vain (timeout 0.05 s)"
    )


@pytest.mark.parametrize("after_s", [0.0, 0.1])
def test_closing_ends_a_wait_of_either_end(after_s: float) -> None:
    """While it keeps its core, and while it sleeps. The other end is not told."""
    link = Link()
    taking = beside(link.take)
    time.sleep(after_s)
    link.receiver.close()
    with pytest.raises(TransferError) as caught:
        taking.result(WAIT_S / 2)
    assert str(caught.value) == (
        "stage 1 waited for #0 of cut 0 from stage 0 (rank 0) in vain (closed meanwhile)"
    )
    link.sender.put(rows(0))
    link.sender.put(rows(1))
    sending = beside(lambda: link.sender.put(rows(2)))
    time.sleep(after_s)
    link.sender.close()
    with pytest.raises(TransferError) as caught:
        sending.result(WAIT_S / 2)
    assert str(caught.value) == (
        "stage 0 waited for stage 1 (rank 1) to take #2 of cut 0 in vain (closed meanwhile)"
    )


def test_what_cannot_be_sent_is_refused() -> None:
    for payload, message in (
        ({"x": torch.zeros(1, dtype=torch.complex64)}, "cut 0: dtype complex64 is not sent"),
        ({}, "the payload has no tensors"),
    ):
        with pytest.raises(TransferError, match=message):
            Link().sender.put(payload)


def ended_process() -> int:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
        return process.pid


def test_what_is_not_there_is_not_found_and_leaves_nothing_open() -> None:
    """Another token, a process that is gone, and whatever else may have the descriptor's number."""
    token = secrets.token_bytes(TOKEN_BYTES)
    made = SharedSlots.create("test", token)
    here, gone = os.getpid(), ended_process()
    pipe = os.pipe()
    small = os.memfd_create("small")
    shut = os.memfd_create("shut")
    os.ftruncate(shut, PAGE)
    folder = os.open("/proc", os.O_RDONLY)
    before = descriptors()
    try:
        assert SharedSlots.open(here, made.descriptor, bytes(TOKEN_BYTES)) is None
        assert SharedSlots.open(gone, made.descriptor, token) is None
        for descriptor in (*pipe, small, shut, folder, 1 << 20):
            assert SharedSlots.open(here, descriptor, token) is None
        assert descriptors() == before
        assert SharedSlots.open(here, made.descriptor, token) is not None
    finally:
        for descriptor in (*pipe, small, shut, folder):
            os.close(descriptor)


def test_memory_that_cannot_be_mapped_is_not_found() -> None:
    """As in another container, where the number is that of something else."""
    fcntl = pytest.importorskip("fcntl")
    sealed = os.memfd_create("sealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(sealed, PAGE)
    fcntl.fcntl(sealed, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    before = descriptors()
    try:
        assert SharedSlots.open(os.getpid(), sealed, bytes(range(TOKEN_BYTES))) is None
        assert descriptors() == before
    finally:
        os.close(sealed)


def test_the_memory_goes_with_its_ends() -> None:
    before = descriptors()
    link = Link()
    link.sender.put(rows(1, count=2000))
    assert len(descriptors() - before) > 0
    payload = link.take()
    link.sender.close()
    link.receiver.close()
    del link
    assert descriptors() == before
    assert_same(payload, rows(1, count=2000))


def board(depth: int, most_ids: int) -> list[SharedBoard]:
    return both(SharedBoard, lambda made: made.lay_out(depth, most_ids))


def ids_of(number: int, count: int = 3) -> Tensor:
    return torch.arange(count) + 100 * number


def test_a_board_has_the_latest_numbers() -> None:
    """A reader within the depth finds its own; one that is later is told so."""
    post, read = board(4, 5)
    for number in range(7):
        post.post(number, ids_of(number, count=number % 6))
    for number in range(3, 7):
        assert torch.equal(read.read(number, "", 0.0), ids_of(number, count=number % 6))
    with pytest.raises(TransferError, match=r"^it came too late: #6 was posted, and 4 are kept$"):
        read.read(2, "it came", 0.0)
    # In any order, and again.
    assert torch.equal(read.read(4, "", 0.0), ids_of(4, count=4))
    assert read.read(6, "", 0.0).dtype == torch.int64
    assert read.waited_s == 0.0


def test_what_was_read_outlives_its_place_on_the_board() -> None:
    post, read = board(2, 3)
    post.post(0, ids_of(0))
    first = read.read(0, "", 0.0)
    for number in range(1, 5):
        post.post(number, ids_of(number))
    assert torch.equal(first, ids_of(0))


def test_nobody_waits_for_a_reader_of_a_board_and_readers_wait_for_numbers() -> None:
    post, read = board(64, 3)
    numbers = 300
    draw = random.Random(5)
    posted = 0

    def post_all() -> None:
        nonlocal posted
        for number in range(numbers):
            # The pipeline keeps the reader within the depth, here the two threads do.
            wait_for(lambda number=number: number - done < 60)  # type: ignore[misc]
            if draw.random() < 0.05:
                time.sleep(1e-3)
            post.post(number, ids_of(number))
            posted = number + 1

    done = 0
    posting = beside(post_all)
    slow = random.Random(6)
    for number in range(numbers):
        if slow.random() < 0.05:
            time.sleep(1e-3)
        assert torch.equal(read.read(number, "", WAIT_S), ids_of(number))
        assert posted >= number
        done = number + 1
    posting.result(WAIT_S)
    assert read.waited_s > 0.0


def test_a_board_without_a_number_is_waited_for_in_vain() -> None:
    post, read = board(4, 3)
    post.post(0, ids_of(0))
    with pytest.raises(TransferError) as caught:
        read.read(1, "stage 0 waited for ids", 0.05)
    assert str(caught.value) == "stage 0 waited for ids in vain (timeout 0.05 s)"
    reading = beside(lambda: read.read(1, "stage 0 waited for ids", WAIT_S))
    time.sleep(0.05)
    read.close()
    with pytest.raises(TransferError) as caught:
        reading.result(WAIT_S / 2)
    assert str(caught.value) == "stage 0 waited for ids in vain (closed meanwhile)"


def test_two_runs_of_stages_give_the_bits_of_one() -> None:
    """Each in a runtime of its own, as in two processes; tasks hand on and take."""
    # pipeline G13, G16
    link = Link()
    fence = even_fence(NUM_LAYERS, 2)
    steps = toy_steps(3, 12)
    with make_streams("cpu") as before, make_streams("cpu") as after:
        runtimes = []
        for index, streams in enumerate((before, after)):
            stream = streams.stream(f"stage {index}")
            program = ToyStage(layers_of(fence, index), NUM_LAYERS)
            home = stage_home(
                index, stream, HandingOn(program, link.sender) if index == 0 else program
            )
            runtimes.append(PipelineRuntime([home], stream, streams))
        found = []
        for step in steps:
            runtimes[0].walk(step, overlap=True)
            result = runtimes[1].walk(step, link.receiver.receive, overlap=True)
            found.append(runtimes[1].outcome(result, runtimes[1].last.stream))
        outputs = [each.wait(WAIT_S) for each in found]
        runtimes[0].drain()
    assert same_bits(outputs, one_stage(steps))


def test_a_stage_without_payload_fails_and_says_what_it_waited_for() -> None:
    link = Link(timeout_s=0.05)
    with make_streams("cpu") as streams:
        stage = streams.stream("stage 1")
        stage.run(link.receiver.receive().get, label="layers")
        with pytest.raises(TransferError, match="stage 1 waited for #0 of cut 0 from stage 0"):
            stage.synchronize(WAIT_S)
