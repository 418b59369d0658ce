"""What a stream promises: order, events, errors, threads."""

from __future__ import annotations

import contextvars
import gc
import threading
import time
import weakref

import pytest
import torch

from layline.errors import CellNotReadyError, RunError, UsageError
from layline.pipeline.controllers import ScriptedController
from layline.pipeline.device import StageDevice
from layline.pipeline.streams import make_streams, thread_share

WAIT_S = 30.0


def test_tasks_of_one_stream_run_in_order_and_never_in_the_caller() -> None:
    seen: list[tuple[int, str]] = []
    with make_streams("cpu") as streams:
        stream = streams.stream("stage 0")
        for number in range(50):
            stream.run(
                lambda number=number: seen.append((number, threading.current_thread().name)),
                label=f"task {number}",
            )
        stream.synchronize(WAIT_S)
        assert stream.is_idle
        assert stream.device == StageDevice("cpu", 0)
    assert seen == [(number, "stream stage 0") for number in range(50)]


def test_tasks_run_in_inference_mode_and_the_callers_context() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")

    def task() -> tuple[str, bool]:
        value = variable.get()
        variable.set("changed by the task")
        return value, torch.is_inference_mode_enabled()

    with make_streams("cpu") as streams:
        stream = streams.stream("stage 0")
        variable.set("first")
        first = stream.run(task, label="first")
        variable.set("second")
        second = stream.run(task, label="second")
        stream.synchronize(WAIT_S)
        assert first.get() == ("first", True)
        assert second.get() == ("second", True)
    assert variable.get() == "second"
    assert not torch.is_inference_mode_enabled()


def test_a_wait_holds_until_the_record_is_reached() -> None:
    go = threading.Event()
    seen: list[str] = []
    with make_streams("cpu") as streams:
        first, second = streams.stream("first"), streams.stream("second")
        event = streams.event("done")
        first.run(lambda: go.wait(WAIT_S), label="slow")
        first.run(lambda: seen.append("first"), label="last of first")
        first.record(event)
        assert not event.is_done()
        second.wait(event)
        second.run(lambda: seen.append("second"), label="after")
        assert not second.is_idle
        go.set()
        second.synchronize(WAIT_S)
        assert event.is_done()
    assert seen == ["first", "second"]


def test_a_wait_binds_to_the_latest_record_when_it_is_issued() -> None:
    """Neither to an older record nor to one that the host issues later."""
    script = ScriptedController()
    with make_streams("cpu", controller=script) as streams:
        first, second = streams.stream("first"), streams.stream("second")
        event = streams.event("done")
        for number in range(2):
            first.run(lambda: None, label=f"task {number}")
            first.record(event)
        second.wait(event)
        second.run(lambda: None, label="after")
        first.run(lambda: None, label="task 2")
        first.record(event)

        script.advance("first", 2)
        with pytest.raises(RunError, match="'second' waits for event 'done' of 'first'"):
            script.advance("second")
        script.advance("first", 2)
        script.advance("second", 2)
        assert second.is_idle
        assert not first.is_idle


def test_waiting_for_an_event_that_was_never_recorded_is_nothing() -> None:
    with make_streams("cpu") as streams:
        stream, event = streams.stream("stage 0"), streams.event("never")
        stream.wait(event)
        event.synchronize(0.0)
        assert event.is_done()
        assert stream.run(lambda: 7, label="task") is not None
        stream.synchronize(WAIT_S)


def test_an_event_is_waited_for_without_what_comes_after_it() -> None:
    go = threading.Event()
    with make_streams("cpu") as streams:
        stream, event = streams.stream("stage 0"), streams.event("first done")
        cell = stream.run(lambda: 1, label="first")
        stream.record(event)
        stream.run(lambda: go.wait(WAIT_S), label="second")
        event.synchronize(WAIT_S)
        assert cell.get() == 1
        assert not stream.is_idle
        go.set()
        stream.synchronize(WAIT_S)


def test_a_result_is_not_there_before_its_task_has_run() -> None:
    with make_streams("cpu", controller=ScriptedController()) as streams:
        stream = streams.stream("stage 0")
        cell = stream.run(lambda: 1, label="layers 0 to 3")
        assert not cell.is_filled
        with pytest.raises(CellNotReadyError, match="'layers 0 to 3' is read before"):
            cell.get()
        stream.synchronize(WAIT_S)
        assert cell.get() == 1


def test_a_task_that_raises_poisons_its_stream_and_who_waits_for_it() -> None:
    ran: list[str] = []

    def fail() -> None:
        raise ValueError("no such layer")

    with make_streams("cpu") as streams:
        first, second, third = (streams.stream(f"stage {n}") for n in range(3))
        event, later = streams.event("first done"), streams.event("second done")
        first.run(fail, label="layers 0 to 3")
        skipped = first.run(lambda: ran.append("after the error"), label="skipped")
        first.record(event)
        second.wait(event)
        second.run(lambda: ran.append("after the wait"), label="skipped too")
        second.record(later)
        third.run(lambda: ran.append("third"), label="own work")
        for wait in (first.synchronize, second.synchronize, event.synchronize, later.synchronize):
            with pytest.raises(ValueError, match="no such layer") as caught:
                wait(WAIT_S)
            notes = [note for note in caught.value.__notes__ if "stage" in note]
            assert notes == ["in task 'layers 0 to 3' on stream 'stage 0'"]
        with pytest.raises(ValueError, match="no such layer"):
            skipped.get()
        third.synchronize(WAIT_S)
        # What a poisoned stream is given later ends too, without running.
        first.run(lambda: ran.append("much later"), label="much later")
        with pytest.raises(ValueError, match="no such layer"):
            first.synchronize(WAIT_S)
    assert ran == ["third"]


def test_a_wait_that_takes_too_long_says_for_what() -> None:
    go = threading.Event()
    with make_streams("cpu") as streams:
        first, second = streams.stream("stage 0"), streams.stream("stage 1")
        event = streams.event("cut 0 tx 1")
        first.run(lambda: go.wait(WAIT_S), label="layers 0 to 3")
        first.record(event)
        second.wait(event)
        second.run(lambda: None, label="layers 4 to 7")
        with pytest.raises(RunError) as caught:
            second.synchronize(0.05)
        assert str(caught.value) == (
            "waited 0.05 s for the end of stream 'stage 1'; 'stage 0' runs 'layers 0 to 3' with 1 "
            "queued; 'stage 1' waits for event 'cut 0 tx 1' of 'stage 0' with 2 queued"
        )
        with pytest.raises(RunError, match=r"waited 0\.05 s for event 'cut 0 tx 1' of stream"):
            event.synchronize(0.05)
        go.set()
        second.synchronize(WAIT_S)
        assert second.blocked_s > 0  # type: ignore[attr-defined]
        assert first.busy_s > 0  # type: ignore[attr-defined]


def test_a_task_issues_and_waits_for_nothing_itself() -> None:
    with make_streams("cpu") as streams:
        first, second = streams.stream("stage 0"), streams.stream("stage 1")
        first.run(lambda: second.run(lambda: None, label="inner"), label="outer")
        with pytest.raises(RunError, match="task 'outer' issues work on stream 'stage 1'"):
            first.synchronize(WAIT_S)
    with make_streams("cpu") as streams:
        first, second = streams.stream("stage 0"), streams.stream("stage 1")
        first.run(lambda: second.synchronize(WAIT_S), label="outer")
        with pytest.raises(RunError, match="task 'outer' waits for the end of stream 'stage 1'"):
            first.synchronize(WAIT_S)


def test_closing_ends_threads_and_discards_what_has_not_begun() -> None:
    go, begun = threading.Event(), threading.Event()
    ran: list[str] = []

    def slow() -> None:
        begun.set()
        go.wait(WAIT_S)
        ran.append("slow")

    streams = make_streams("cpu")
    stream = streams.stream("stage 0")
    stream.run(slow, label="slow")
    stream.run(lambda: ran.append("queued"), label="queued")
    begun.wait(WAIT_S)
    with pytest.raises(RunError, match=r"stream stage 0 still runs 0\.05 s after it should end"):
        streams.close(0.05)
    go.set()
    streams.close()
    streams.close()
    assert ran == ["slow"]
    with pytest.raises(RunError, match="the streams were closed"):
        stream.run(lambda: None, label="late")
    with pytest.raises(RunError, match="the end of stream 'stage 0' will not come"):
        stream.synchronize(WAIT_S)


def test_threads_end_with_the_last_reference() -> None:
    streams = make_streams("cpu")
    stream = streams.stream("stage 0")
    gone = weakref.ref(streams)
    (worker,) = [each for each in threading.enumerate() if each.name == "stream stage 0"]
    del streams
    gc.collect()
    assert gone() is not None, "a stream keeps its set alive"
    stream.synchronize(WAIT_S)
    del stream
    gc.collect()
    worker.join(WAIT_S)
    assert not worker.is_alive()


def test_a_host_that_waits_learns_of_the_end() -> None:
    go, begun = threading.Event(), threading.Event()
    raised: list[BaseException] = []

    def slow() -> None:
        begun.set()
        go.wait(WAIT_S)

    def wait() -> None:
        try:
            stream.synchronize(WAIT_S)
        except RunError as error:
            raised.append(error)

    streams = make_streams("cpu")
    stream = streams.stream("stage 0")
    stream.run(slow, label="slow")
    stream.run(lambda: None, label="queued")
    begun.wait(WAIT_S)
    waiter = threading.Thread(target=wait)
    waiter.start()
    threading.Timer(0.05, go.set).start()
    streams.close()
    waiter.join(WAIT_S)
    assert "will not come: the streams were closed" in str(raised[0])


def test_nothing_of_a_task_outlives_it() -> None:
    """So that what a step frees is free."""

    class Memory:
        pass

    memory = Memory()
    gone = weakref.ref(memory)
    with make_streams("cpu") as streams:
        stream = streams.stream("stage 0")
        cell = stream.run(lambda memory=memory: id(memory), label="reads memory")
        del memory
        stream.synchronize(WAIT_S)
        assert cell.is_filled
        # The worker lets go of the task right after it has said that it has ended.
        deadline = time.monotonic() + WAIT_S
        while gone() is not None and time.monotonic() < deadline:
            time.sleep(0.001)
        assert gone() is None


def test_every_stream_has_its_own_number_of_threads() -> None:
    """And no stream changes what the caller, or a thread born later, has."""
    before = torch.get_num_threads()
    numbers: dict[str, int] = {}

    def note(name: str) -> None:
        torch.randn(200, 200) @ torch.randn(200, 200)
        numbers[name] = torch.get_num_threads()

    try:
        torch.set_num_threads(2)
        with make_streams("cpu") as streams:
            first = streams.stream("first", num_threads=1)
            second = streams.stream("second", num_threads=3)
            assert torch.get_num_threads() == 2
            later = threading.Thread(target=note, args=("later",))
            later.start()
            later.join(WAIT_S)
            torch.set_num_threads(4)
            for stream in (first, second):
                stream.run(lambda name=stream.name: note(name), label="note")
            first.synchronize(WAIT_S)
            second.synchronize(WAIT_S)
            assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)
    assert numbers == {"first": 1, "second": 3, "later": 2}


@pytest.mark.parametrize(("total", "active", "share"), [(8, 2, 4), (2, 3, 1), (7, 2, 3), (4, 0, 4)])
def test_active_streams_share_the_threads(total: int, active: int, share: int) -> None:
    assert thread_share(total, active) == share


def test_bad_requests_are_named() -> None:
    with make_streams("cpu") as streams:
        streams.stream("stage 0")
        with pytest.raises(UsageError, match="there is a stream 'stage 0' already"):
            streams.stream("stage 0")
        with pytest.raises(UsageError, match="on device -1 with 1 threads"):
            streams.stream("stage 1", -1)
        with pytest.raises(UsageError, match="with 0 threads"):
            streams.stream("stage 1", num_threads=0)
    with pytest.raises(UsageError, match="device 'cdua' is not one of cpu, cuda; did you mean"):
        make_streams("cdua")
    with pytest.raises(UsageError, match="a controller decides over CPU streams"):
        make_streams("cuda", controller=ScriptedController())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_streams_need_a_device() -> None:
    with pytest.raises(UsageError, match="device 'cuda' is not here"):
        make_streams("cuda")


def test_an_error_in_the_body_is_not_hidden_by_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even by a task that does not end in time."""

    def late(self: object) -> None:
        raise RunError("still runs")

    streams = make_streams("cpu")
    with monkeypatch.context() as patch:
        patch.setattr(type(streams), "close", late)
        with pytest.raises(ValueError, match="of the body"), streams:
            raise ValueError("of the body")
        with pytest.raises(RunError, match="still runs"), streams:
            pass
    streams.close()
