"""What comes back to the host: one step at a time, and nothing when nobody asks."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from torch import Tensor

from layline.errors import RunError
from layline.pipeline.controllers import ScriptedController
from layline.pipeline.readback import PendingIds, PendingLogits
from layline.pipeline.streams import Stream, Streams, make_streams
from support.cut_chain import TIMEOUT_S, Chain, reference, same_bits, steps
from support.happens_before import HappensBefore

WAIT_S = 30.0


def pending_of(
    streams: Streams, last: Stream, readback: Stream, value: Tensor, number: int = 0
) -> PendingLogits:
    cell = last.run(lambda: value * 2, label=f"logits {number}")
    return PendingLogits(cell, last, readback, streams)


def test_a_wait_drains_its_own_step_and_leaves_the_later_ones() -> None:
    """The last stage is held after the first step: the wait still ends, and touches no later."""
    # pipeline G35
    script = ScriptedController()
    with make_streams("cpu", controller=script) as streams:
        last, readback = streams.stream("last"), streams.stream("readback")
        steps_issued = [
            pending_of(streams, last, readback, torch.full((2, 3), float(n)), n) for n in range(4)
        ]
        script.hold("last")
        script.advance("last", 2)
        assert steps_issued[0].wait(WAIT_S).tolist() == [[0.0] * 3] * 2
        assert [each.is_done() for each in steps_issued] == [True, False, False, False]
        assert not last.is_idle
        with pytest.raises(RunError, match="deadlock: the host waits"):
            steps_issued[1].wait(WAIT_S)
        script.advance("last", 2)
        assert steps_issued[1].wait(WAIT_S).tolist() == [[2.0] * 3] * 2
        script.release("last")
        # In any order, and again.
        assert steps_issued[3].wait(WAIT_S).tolist() == [[6.0] * 3] * 2
        assert steps_issued[2].wait(WAIT_S).tolist() == [[4.0] * 3] * 2
        assert steps_issued[3].wait(WAIT_S) is steps_issued[3].wait(WAIT_S)


def test_free_running_steps_go_on_while_one_is_read_back() -> None:
    # pipeline G35
    go = threading.Event()
    with make_streams("cpu") as streams:
        last, readback = streams.stream("last"), streams.stream("readback")
        first = pending_of(streams, last, readback, torch.ones(1, 3))
        last.run(lambda: go.wait(WAIT_S), label="a later step")
        second = pending_of(streams, last, readback, torch.ones(1, 3), 1)
        assert first.wait(WAIT_S).tolist() == [[2.0] * 3]
        assert not second.is_done()
        go.set()
        assert second.wait(WAIT_S).tolist() == [[2.0] * 3]


def test_logits_that_nobody_waits_for_may_be_dropped() -> None:
    """The steps around them keep their bits, and the memory goes."""  # pipeline G36
    inputs = steps(12)
    checker = HappensBefore()
    with make_streams("cpu", recorder=checker) as streams:
        chain = Chain(streams, 3)
        kept: list[Tensor] = []
        for number, x in enumerate(inputs):
            pending = chain.issue(x, overlap=True)
            if number % 3 == 2:
                kept.append(pending.wait(TIMEOUT_S))
            dropped = weakref.ref(pending)
            del pending
            gc.collect()
            assert dropped() is None
        assert same_bits(kept, reference(inputs, 3)[2::3])
        chain.stages[-1].stream.synchronize(TIMEOUT_S)
        assert chain.readback.is_idle
    checker.check()


def test_a_drop_before_the_step_has_run_is_safe_and_frees_the_logits() -> None:
    # pipeline G36
    alive: list[weakref.ref[Tensor]] = []

    def logits() -> Tensor:
        made = torch.ones(2, 3)
        alive.append(weakref.ref(made))
        return made

    script = ScriptedController()
    with make_streams("cpu", controller=script) as streams:
        last, readback = streams.stream("last"), streams.stream("readback")
        pending = PendingLogits(last.run(logits, label="logits"), last, readback, streams)
        del pending
        gc.collect()
        after = pending_of(streams, last, readback, torch.ones(1, 1), 1)
        assert after.wait(WAIT_S).tolist() == [[2.0]]
        assert [each() for each in alive] == [None]


def test_the_hosts_copy_is_its_own() -> None:
    with make_streams("cpu") as streams:
        last, readback = streams.stream("last"), streams.stream("readback")
        value = torch.zeros(2, 3)
        pending = PendingLogits(last.run(lambda: value, label="logits"), last, readback, streams)
        first = pending.wait(WAIT_S)
        value.fill_(9.0)
        assert first.tolist() == [[0.0] * 3] * 2


def test_ids_come_as_numbers() -> None:
    with make_streams("cpu") as streams:
        last, readback = streams.stream("last"), streams.stream("readback")
        cell = last.run(lambda: torch.tensor([5, 0, 49151]), label="ids")
        assert PendingIds(cell, last, readback, streams).wait(WAIT_S) == (5, 0, 49151)


def test_what_a_stage_raised_comes_out_of_the_wait() -> None:
    def fail() -> Tensor:
        raise ValueError("no such layer")

    with make_streams("cpu") as streams:
        last, readback = streams.stream("last"), streams.stream("readback")
        pending = PendingLogits(last.run(fail, label="logits"), last, readback, streams)
        with pytest.raises(ValueError, match="no such layer"):
            pending.wait(WAIT_S)


def test_a_wait_that_takes_too_long_names_the_step() -> None:
    go = threading.Event()
    with make_streams("cpu") as streams:
        last, readback = streams.stream("last"), streams.stream("readback")
        last.run(lambda: go.wait(WAIT_S), label="layers 4 to 7")
        pending = pending_of(streams, last, readback, torch.ones(1, 1), 3)
        with pytest.raises(RunError) as caught:
            pending.wait(0.05)
        go.set()
        last.synchronize(WAIT_S)
    assert "waited 0.05 s for event 'logits 3 copied' of stream 'readback'" in str(caught.value)
    assert "'last' runs 'layers 4 to 7'" in str(caught.value)
    assert "'readback' waits for event 'logits 3 computed' of 'last'" in str(caught.value)
