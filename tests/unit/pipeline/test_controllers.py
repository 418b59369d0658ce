"""Scripted runs: every stream stopped where a test wants it, and the same run every time."""

from __future__ import annotations

import threading

import pytest

from layline.errors import RunError
from layline.pipeline.controllers import Listed, ScriptedController, Seeded
from layline.pipeline.streams import Streams, make_streams

WAIT_S = 30.0


def history(script: ScriptedController) -> list[str]:
    return [label for _, label in script.history]


def fill(streams: Streams, num_streams: int = 3, num_tasks: int = 4) -> None:
    """Independent tasks ``stream.task``, issued in turn."""
    made = [streams.stream(f"s{number}") for number in range(num_streams)]
    for task in range(num_tasks):
        for stream in made:
            stream.run(lambda: None, label=f"{stream.name}.{task}")


def test_nothing_runs_before_the_host_waits_and_then_the_listed_first() -> None:
    script = ScriptedController(Listed("s2", "s0"))
    with make_streams("cpu", controller=script) as streams:
        fill(streams, num_tasks=2)
        assert history(script) == []
        script.run_all()
    assert history(script) == ["s2.0", "s2.1", "s0.0", "s0.1", "s1.0", "s1.1"]


def test_a_seed_decides_everything_and_seeds_differ() -> None:
    def order(seed: int) -> list[str]:
        script = ScriptedController(Seeded(seed))
        with make_streams("cpu", controller=script) as streams:
            fill(streams)
            script.run_all()
        return history(script)

    orders = [order(seed) for seed in range(20)]
    assert orders == [order(seed) for seed in range(20)]
    assert all(sorted(each) == sorted(orders[0]) for each in orders)
    assert len({tuple(each) for each in orders}) >= 18


def test_some_seeds_let_streams_run_while_the_host_issues() -> None:
    ahead = []
    for seed in range(20):
        script = ScriptedController(Seeded(seed))
        with make_streams("cpu", controller=script) as streams:
            fill(streams)
            ahead.append(len(script.history))
    assert min(ahead) == 0
    assert max(ahead) >= 10


def test_a_stalled_stream_comes_last_but_comes() -> None:
    script = ScriptedController()
    with make_streams("cpu", controller=script) as streams:
        fill(streams, num_tasks=2)
        script.stall("s0")
        script.run_all()
    assert history(script) == ["s1.0", "s1.1", "s2.0", "s2.1", "s0.0", "s0.1"]


def test_a_stall_can_begin_at_any_item() -> None:
    script = ScriptedController()
    with make_streams("cpu", controller=script) as streams:
        fill(streams, num_streams=2, num_tasks=3)
        script.advance("s0", 2)
        script.hold("s0")
        script.run_all()
        assert history(script) == ["s0.0", "s0.1", "s1.0", "s1.1", "s1.2"]
        script.release("s0")
        script.run_all()
    assert history(script)[-1] == "s0.2"


def test_a_host_that_waits_for_a_held_stream_is_a_deadlock_with_names() -> None:
    script = ScriptedController()
    with make_streams("cpu", controller=script) as streams:
        first, second = streams.stream("stage 0"), streams.stream("stage 1")
        event = streams.event("cut 0 tx 0")
        first.run(lambda: None, label="layers 0 to 3")
        first.record(event)
        second.wait(event)
        second.run(lambda: None, label="layers 4 to 7")
        script.hold("stage 0")
        with pytest.raises(RunError) as caught:
            second.synchronize(WAIT_S)
    assert str(caught.value) == (
        "deadlock: the host waits and no stream can go on; 'stage 0' is ready with 2 queued "
        "(held); 'stage 1' waits for event 'cut 0 tx 0' of 'stage 0' with 2 queued"
    )


def test_a_task_that_does_not_end_runs_into_the_hosts_deadline() -> None:
    go = threading.Event()
    with make_streams("cpu", controller=ScriptedController()) as streams:
        stream = streams.stream("stage 0")
        stream.run(lambda: go.wait(WAIT_S), label="layers 0 to 3")
        with pytest.raises(RunError, match="'stage 0' runs 'layers 0 to 3'"):
            stream.synchronize(0.05)
        go.set()
        stream.synchronize(WAIT_S)


def test_two_host_threads_may_wait_at_once() -> None:
    script = ScriptedController(Seeded(5))
    done: list[str] = []
    with make_streams("cpu", controller=script) as streams:
        made = [streams.stream(f"s{number}") for number in range(4)]

        def drive(name: str, mine: int) -> None:
            for task in range(30):
                made[mine].run(lambda: None, label=f"{name} {task}")
                made[mine + 1].run(lambda: None, label=f"{name} {task}")
                made[mine].synchronize(WAIT_S)
            made[mine + 1].synchronize(WAIT_S)
            done.append(name)

        hosts = [threading.Thread(target=drive, args=(f"host {n}", 2 * n)) for n in range(2)]
        for host in hosts:
            host.start()
        for host in hosts:
            host.join(WAIT_S)
    assert sorted(done) == ["host 0", "host 1"]


def test_mistakes_of_a_script_are_named() -> None:
    script = ScriptedController()
    with make_streams("cpu", controller=script) as streams:
        streams.stream("stage 0")
        with pytest.raises(RunError, match="'stage 0' cannot advance; 'stage 0' is idle"):
            script.advance("stage 0")
        with pytest.raises(RunError, match="no stream 'stage 7'; there are stage 0"):
            script.stall("stage 7")
        with pytest.raises(RunError, match="one set of streams"):
            make_streams("cpu", controller=script)
