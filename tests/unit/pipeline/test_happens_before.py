"""The race checker itself, on programs small enough to see through."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from layline.pipeline.access import Buffer
from layline.pipeline.controllers import ScriptedController
from layline.pipeline.device import StageDevice
from layline.pipeline.streams import Event, Stream, Streams, make_streams
from support.happens_before import HappensBefore

WAIT_S = 30.0
HERE = StageDevice("cpu", 0)


@dataclass
class Scene:
    """Three streams, one event and one buffer."""

    checker: HappensBefore
    streams: Streams
    first: Stream
    second: Stream
    third: Stream
    event: Event
    buffer: Buffer

    def read(self, stream: Stream) -> None:
        stream.run(lambda: None, reads=[self.buffer], label=f"read on {stream.name}")

    def write(self, stream: Stream) -> None:
        stream.run(lambda: None, writes=[self.buffer], label=f"write on {stream.name}")


@pytest.fixture
def scene() -> Iterator[Scene]:
    checker = HappensBefore()
    with make_streams("cpu", recorder=checker, controller=ScriptedController()) as streams:
        first, second, third = (streams.stream(name) for name in ("first", "second", "third"))
        yield Scene(
            checker, streams, first, second, third, streams.event("event"), Buffer("slot", HERE)
        )


def test_a_write_and_a_read_without_an_order_is_a_race(scene: Scene) -> None:
    scene.write(scene.first)
    scene.read(scene.second)
    assert scene.checker.races == [
        "slot: write by 'write on first' on first and read by 'read on second' on second are not "
        "ordered"
    ]
    with pytest.raises(AssertionError, match="1 found, first of all: slot: write by"):
        scene.checker.check()


def test_two_writes_are_a_race_and_two_reads_are_not(scene: Scene) -> None:
    scene.read(scene.first)
    scene.read(scene.second)
    assert scene.checker.races == []
    scene.write(scene.third)
    assert len(scene.checker.races) == 2
    scene.write(scene.first)
    assert len(scene.checker.races) == 4


def test_an_event_orders(scene: Scene) -> None:
    scene.write(scene.first)
    scene.first.record(scene.event)
    scene.second.wait(scene.event)
    scene.read(scene.second)
    assert scene.checker.races == []
    # What comes after the record is not behind the wait.
    scene.write(scene.first)
    assert len(scene.checker.races) == 1


def test_order_carries_over_a_third_stream(scene: Scene) -> None:
    scene.write(scene.first)
    scene.first.record(scene.event)
    scene.second.wait(scene.event)
    other = scene.streams.event("other")
    scene.second.record(other)
    scene.third.wait(other)
    scene.write(scene.third)
    assert scene.checker.races == []


def test_a_wait_before_the_record_orders_nothing(scene: Scene) -> None:
    scene.second.wait(scene.event)
    scene.write(scene.first)
    scene.first.record(scene.event)
    scene.read(scene.second)
    assert len(scene.checker.races) == 1


def test_a_wait_binds_to_the_record_of_its_time(scene: Scene) -> None:
    scene.write(scene.first)
    scene.first.record(scene.event)
    scene.second.wait(scene.event)
    scene.write(scene.first)
    scene.first.record(scene.event)
    scene.read(scene.second)
    assert len(scene.checker.races) == 1
    assert "write by 'write on first'" in scene.checker.races[0]


def test_the_hosts_wait_orders_what_it_issues_later(scene: Scene) -> None:
    scene.write(scene.first)
    scene.first.synchronize(WAIT_S)
    scene.read(scene.second)
    scene.second.record(scene.event)
    scene.event.synchronize(WAIT_S)
    scene.write(scene.third)
    assert scene.checker.races == []


def test_a_hosts_wait_for_another_stream_orders_nothing(scene: Scene) -> None:
    scene.write(scene.first)
    scene.second.synchronize(WAIT_S)
    scene.read(scene.second)
    assert len(scene.checker.races) == 1


def test_reading_a_result_counts_although_nobody_declared_it(scene: Scene) -> None:
    cell = scene.first.run(lambda: 1, label="makes")
    scene.second.run(cell.get, label="takes")
    scene.first.synchronize(WAIT_S)
    scene.second.synchronize(WAIT_S)
    (race,) = scene.checker.races
    assert race == (
        "result of 'makes': write by 'makes' on first and read by 'takes' on second are not ordered"
    )


def test_the_host_may_read_a_result_only_after_a_wait(scene: Scene) -> None:
    cell = scene.first.run(lambda: 1, label="makes")
    # Lucky: all has run, and the host has not asked whether it has.
    while not scene.first.is_idle:
        scene.second.run(lambda: None, label="other work")
        scene.second.synchronize(WAIT_S)
    cell.get()
    assert "read by 'the host' on the host are not ordered" in scene.checker.races[0]
    scene.checker.races.clear()
    scene.first.synchronize(WAIT_S)
    cell.get()
    assert scene.checker.races == []


def test_an_access_to_announced_memory_that_nobody_declared_is_seen(scene: Scene) -> None:
    memory = torch.zeros(64, dtype=torch.uint8)
    scene.checker.allocated(scene.buffer, memory)
    view = memory[16:32].view(torch.float32)

    scene.first.run(lambda: view.add_(1), writes=[scene.buffer], label="says so")
    scene.first.synchronize(WAIT_S)
    assert scene.checker.undeclared == []

    scene.second.run(lambda: view + 1, label="reads")
    scene.third.run(view.zero_, reads=[scene.buffer], label="writes")
    scene.third.run(lambda: memory[:8].view(torch.int64), label="only looks")
    scene.second.synchronize(WAIT_S)
    scene.third.synchronize(WAIT_S)
    assert sorted(scene.checker.undeclared) == [
        "'reads' reads slot and does not say so",
        "'writes' writes slot and does not say so",
    ]
    assert len(scene.checker.races) == 1, "and they race with each other"


def test_reads_of_another_devices_memory_are_listed(scene: Scene) -> None:
    far = Buffer("weights", StageDevice("cpu", 1))
    scene.first.run(lambda: None, reads=[far], label="layers 0 to 3")
    scene.first.run(lambda: None, writes=[far], label="fills a slot")
    assert scene.checker.remote_reads == ["'layers 0 to 3' on cpu:0 reads weights on cpu:1"]
