"""Ranks that die, stop, hang or talk nonsense, as processes of a script without a model."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import PIPE
from typing import Any

import psutil
import pytest

from layline.boundary.rows import DpPadding
from layline.engine import wire
from layline.engine.balance import SampleRow
from layline.engine.launch import start_rank, worker_environment
from layline.engine.outcome import FailedRow, StepResult
from layline.engine.ranks import Limits, RankLink, is_sibling, rank_title
from layline.engine.remote import RemoteExecutor
from layline.engine.step import IDLE, MeshStep, RankStep, ordinary_step
from layline.engine.supervisor import Supervisor
from layline.errors import CheckpointError, CollectiveError, RunError, TensorError
from layline.layers.spans import SequenceSpan
from layline.topology import Topology

SCRIPT = Path(__file__).parents[2] / "support" / "fake_rank.py"
TOPOLOGY = Topology(tp=3)
# A rank beats once a second.
QUICK = Limits(silence=1.6, starting=20.0, stopping=1.0)


class Run:
    """An executor over fake ranks, and their processes."""

    def __init__(
        self, *behaviours: str, limits: Limits = QUICK, topology: Topology | None = None
    ) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        topology = topology or Topology(tp=len(behaviours))

        def open_ranks() -> Iterator[RankLink]:
            for rank, behaviour in enumerate(behaviours):
                log = tempfile.TemporaryFile()  # noqa: SIM115
                command = [sys.executable, str(SCRIPT), behaviour, str(rank)]
                sock, process = start_rank(command, worker_environment(1), log.fileno())
                self.processes.append(process)
                title = rank_title(topology.at(rank))
                yield RankLink(rank, title, sock, process, log)

        self.supervisor = Supervisor(open_ranks, limits)
        self.executor = RemoteExecutor(self.supervisor, topology)
        self.starts = [
            wire.Start({}, rank, "", "", 1, rank, 3) for rank in range(topology.world_size)
        ]

    def start(self) -> Run:
        self.executor.start(self.starts)
        return self

    def execute(self, step: MeshStep, rows: list[list[SampleRow]]) -> StepResult:
        return self.executor.collect(self.executor.launch(step, rows, None))

    def alive(self) -> list[int]:
        return [process.pid for process in self.processes if process.poll() is None]


@pytest.fixture
def run() -> Iterator[Callable[..., Run]]:
    made: list[Run] = []

    def make(*behaviours: str, **options: Any) -> Run:
        made.append(Run(*behaviours, **options))
        return made[-1]

    yield make
    for each in made:
        each.executor.close()
        assert each.alive() == []


def a_step() -> tuple[MeshStep, list[list[SampleRow]]]:
    part = RankStep(1, (SequenceSpan(3, 1, [1], 4),), (5,), (True,))
    return ordinary_step((part,), 1, DpPadding.MAX_LEN), [[SampleRow(0, 1)]]


def test_ranks_answer_and_end_when_told(run: Callable[..., Run]) -> None:
    it = run("good", "good", "good").start()
    assert it.executor.num_blocks == 40, "the smallest that a rank can have"
    for number in range(1, 50):
        assert it.execute(*a_step()).tokens == [[(number, None)]]
    used = it.executor.memory()
    assert (used.weights, used.kv_cache, used.worker_peaks) == (3000, 1200, (100, 101, 102))
    it.executor.close(5)
    assert [process.returncode for process in it.processes] == [5, 5, 5]
    with pytest.raises(RunError, match="the engine is closed"):
        it.execute(*a_step())
    it.executor.release(0, 0)
    it.executor.close()


def test_steps_are_sent_ahead_and_their_answers_kept_apart(run: Callable[..., Run]) -> None:
    """Two leaders: one may be steps ahead of the other."""
    it = run("good", "slow", topology=Topology(tp=2, attn_dp=2)).start()
    part = RankStep(1, (SequenceSpan(3, 1, [1], 4),), (5,), (True,))
    step = ordinary_step((part, part), 1, DpPadding.MAX_LEN)
    rows = [[SampleRow(0, 1)], [SampleRow(1, 1)]]
    first = it.executor.launch(step, rows, None)
    second = it.executor.launch(step, rows, first)
    # What is asked in between loses none of them.
    assert it.executor.memory().worker_peaks == (100, 101)
    third = it.executor.launch(step, rows, second)
    for number, launched in ((1, first), (2, second), (3, third)):
        # Every fake rank answers for all rows.
        tokens = it.executor.collect(launched).tokens
        assert tokens == [[(number, None), (number, None)]] * 2
    # Steps that nobody asks for are forgotten with the next that somebody does.
    dropped = it.executor.launch(step, rows, third)
    assert it.execute(step, rows).tokens == [[(5, None), (5, None)]] * 2
    assert dropped != third
    assert it.execute(step, rows).tokens == [[(6, None), (6, None)]] * 2
    assert len(it.supervisor._steps) == 1


def test_an_interrupted_wait_keeps_what_has_come(run: Callable[..., Run]) -> None:
    it = run("good", "slow", topology=Topology(tp=2, attn_dp=2)).start()
    part = RankStep(1, (SequenceSpan(3, 1, [1], 4),), (5,), (True,))
    step = ordinary_step((part, part), 1, DpPadding.MAX_LEN)
    rows = [[SampleRow(0, 1)], [SampleRow(1, 1)]]
    launched = it.executor.launch(step, rows, None)
    inbox: Any = it.supervisor._inbox

    class Interrupted:
        """The quick rank's answer, and then somebody presses Ctrl-C."""

        calls = 0

        def put(self, item: Any) -> None:
            inbox.put(item)

        def get(self) -> Any:
            self.calls += 1
            if self.calls == 2:
                raise KeyboardInterrupt
            return inbox.get()

    waiting: Any = it.supervisor
    waiting._inbox = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        it.executor.collect(launched)
    waiting._inbox = inbox
    assert it.executor.collect(launched).tokens == [[(1, None), (1, None)]] * 2


def step_until_it_fails(it: Run) -> None:
    """The leader may answer before the loss of another rank is seen."""
    deadline = time.monotonic() + 12
    while time.monotonic() < deadline:
        it.execute(*a_step())
        time.sleep(0.05)


def failing_step(it: Run) -> tuple[RunError, float]:
    begin = time.monotonic()
    with pytest.raises(RunError) as caught:
        step_until_it_fails(it)
    seconds = time.monotonic() - begin
    assert it.alive() == []
    # Not a hang, however often it is asked, and the same line each time.
    for _ in range(2):
        with pytest.raises(RunError, match="rank") as again:
            it.execute(*a_step())
        assert str(again.value) == str(caught.value)
    return caught.value, seconds


GONE = {
    "die": r"rank 2 \(attention DP 0, TP 2\) ended unexpectedly, killed by SIGKILL",
    "exit:9": r"rank 2 \(attention DP 0, TP 2\) ended unexpectedly with exit status 9",
    "stop": r"rank 2 \(attention DP 0, TP 2\) stopped answering: no heartbeat for 1.6 s",
    "garbage": r"rank 2 \(attention DP 0, TP 2\) sent a frame of \d+ bytes",
}


@pytest.mark.parametrize(
    ("behaviour", "others"),
    [
        ("die", "good"),
        ("die", "raise:CollectiveError"),
        ("exit:9", "hang"),
        ("stop", "good"),
        # What rank 0 reports at once is not the cause: its collective failed as rank 2 stopped.
        ("stop", "raise:CollectiveError"),
        ("garbage", "hang"),
    ],
)
def test_a_rank_that_is_gone_is_named(run: Callable[..., Run], behaviour: str, others: str) -> None:
    error, seconds = failing_step(run(others, "hang", behaviour).start())
    assert type(error) is RunError
    assert re.search(GONE[behaviour], str(error)), str(error)
    assert "\n" not in str(error)
    assert seconds < 10


def test_the_shipped_limits_find_a_stopped_rank_within_ten_seconds() -> None:
    limits = Limits()
    assert limits.silence + 2 * 0.25 + 1.0 < 10


def test_a_rank_that_stops_before_its_first_word_is_silent_at_once(run: Callable[..., Run]) -> None:
    begin = time.monotonic()
    with pytest.raises(RunError, match=r"^rank 1 \(.*no heartbeat for 1.6 s; the run is over$"):
        run("good", "early:stop").start()
    assert time.monotonic() - begin < 10


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_rank_may_be_silent_as_long_as_it_loads_libraries(run: Callable[..., Run]) -> None:
    it = run("early:quiet:3", "good", limits=Limits(silence=1.6, starting=20.0)).start()
    assert it.execute(*a_step()).tokens == [[(1, None)]]


def test_the_limit_that_was_broken_is_printed(run: Callable[..., Run]) -> None:
    with pytest.raises(RunError, match=r"^rank 0 \(.*no heartbeat for 3 s; the run is over$"):
        run("early:quiet:30", "good", limits=Limits(silence=1.6, starting=3.0)).start()


def test_silence_counts_in_full_on_a_busy_host(
    run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    turn = Supervisor._turn

    def slow_turn(self: Supervisor, *arguments: Any) -> None:
        turn(self, *arguments)
        time.sleep(1.5)

    it = run("hang", "stop", limits=Limits(silence=3.0, starting=20.0)).start()
    monkeypatch.setattr(Supervisor, "_turn", slow_turn)
    _, seconds = failing_step(it)
    assert seconds < 8


def test_the_first_to_end_is_the_cause(run: Callable[..., Run]) -> None:
    """Whoever started the ranks may end the others as soon as one is gone."""
    it = run("hang", "hang").start()
    it.processes[1].kill()
    it.processes[1].wait()
    time.sleep(0.1)
    it.processes[0].kill()
    error, _ = failing_step(it)
    assert str(error).startswith("rank 1 (attention DP 0, TP 1) ended unexpectedly")


def test_a_failure_can_be_awaited_once(run: Callable[..., Run]) -> None:
    it = run("die", "hang").start()
    assert not it.supervisor.await_failure(0.1)
    it.supervisor.post(wire.Step(1, 0, [], "", [], "", [], {}, []))
    with pytest.raises(RunError, match=r"^rank 0 .* ended unexpectedly"):
        it.supervisor.await_failure(5.0)
    assert it.supervisor.await_failure(5.0), "it has been told"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_stopped_sibling_is_ended_with_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under torchrun, which gives a stopped process half a minute."""
    ours, theirs = socket.socketpair()
    with theirs, subprocess.Popen([sys.executable, "-c", "input()"], stdin=PIPE) as process:
        process.send_signal(signal.SIGSTOP)
        assert not is_sibling(process.pid), "a child"
        monkeypatch.setattr(os, "getppid", os.getpid)
        assert is_sibling(process.pid)
        assert not is_sibling(os.getpid()), "itself"
        theirs.sendall(wire.frame(wire.Hello(1, process.pid)))
        link = RankLink(0, "rank 1", ours, is_sibling=True)
        supervisor = Supervisor(lambda: [link], Limits(silence=0.5))
        with pytest.raises(RunError, match=r"^rank 1 stopped answering: no heartbeat for 0.5 s"):
            supervisor.collect((wire.Loaded,), [0])
        try:
            assert process.wait(timeout=5) == -signal.SIGKILL
        finally:
            process.kill()


def test_last_words_are_kept_with_the_error(run: Callable[..., Run]) -> None:
    error, _ = failing_step(run("good", "exit:4").start())
    notes = "".join(getattr(error.__cause__, "__notes__", []))
    assert "last words of the rank" in notes
    assert "last words" not in str(error)


def test_an_error_of_ours_keeps_its_class(run: Callable[..., Run]) -> None:
    for behaviours in [("raise:TensorError", "hang"), ("hang", "raise:TensorError")]:
        it = run(*behaviours).start()
        with pytest.raises(TensorError, match=r"^what TensorError says$") as caught:
            it.execute(*a_step())
        assert caught.value.exit_status == CheckpointError.exit_status == 2
        assert it.alive() == []


@pytest.mark.parametrize("name", ["MemoryError", "nearest", "CollectiveError"])
def test_any_other_error_is_the_runs(run: Callable[..., Run], name: str) -> None:
    it = run("hang", f"raise:{name}").start()
    error, _ = failing_step(it)
    assert str(error).startswith("rank 1 (attention DP 0, TP 1) failed: ")
    assert f"what {name} says" in str(error)


@pytest.mark.parametrize("behaviour", ["load:die", "load:raise:TensorError"])
def test_a_rank_that_fails_to_load_ends_the_start(run: Callable[..., Run], behaviour: str) -> None:
    it = run("good", behaviour)
    with pytest.raises((RunError, TensorError), match=r"rank 1|what TensorError says"):
        it.start()
    assert it.alive() == []


def test_a_program_that_cannot_start_is_an_error() -> None:
    def open_ranks() -> Iterator[RankLink]:
        start_rank(["/no/such/program"], {}, 1)
        yield from ()

    supervisor = Supervisor(open_ranks)
    with pytest.raises(RunError, match=r"cannot start a rank: .*No such file"):
        supervisor.collect((wire.Loaded,), [0])
    supervisor.close()


def test_a_row_without_a_token_leaves_the_ranks_running(run: Callable[..., Run]) -> None:
    it = run("refuse", "good").start()
    for _ in range(2):
        assert it.execute(*a_step()).tokens == [[FailedRow("no token", "a place")]]
    assert len(it.alive()) == 2


def test_an_interrupted_step_can_be_taken_again(run: Callable[..., Run]) -> None:
    it = run("slow", "good").start()
    timer = threading.Timer(0.15, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        it.execute(*a_step())
    # The reply to the first is dropped: the second step has its own number.
    assert it.execute(*a_step()).tokens == [[(2, None)]]
    assert it.execute(*a_step()).tokens == [[(3, None)]]


def test_a_driver_that_was_stopped_itself_accuses_nobody(run: Callable[..., Run]) -> None:
    """Time that passes while the watcher does not run is no silence."""
    it = run("good", "good").start()
    before = time.monotonic
    import layline.engine.supervisor as watched

    offset = [0.0]
    original = watched.monotonic
    try:
        watched.monotonic = lambda: before() + offset[0]
        time.sleep(0.4)
        offset[0] = 3600.0
        time.sleep(0.8)
        assert it.execute(*a_step()).tokens == [[(1, None)]]
    finally:
        watched.monotonic = original


PARENT = """
import os, sys, tempfile, time
sys.path.insert(0, {tests!r})
from unit_supervisor import Run
run = Run(*{behaviours!r}).start()
print(*[p.pid for p in run.processes], flush=True)
{then}
"""


@pytest.mark.parametrize(
    ("behaviour", "how"),
    [("good", signal.SIGKILL), ("hang", signal.SIGKILL), ("hang", signal.SIGTERM)],
)
def test_no_rank_outlives_its_driver(tmp_path: Path, behaviour: str, how: signal.Signals) -> None:
    (tmp_path / "unit_supervisor.py").write_text(Path(__file__).read_text(encoding="utf-8"))
    code = PARENT.format(
        tests=str(tmp_path),
        behaviours=("good", behaviour),
        then="run.execute(*__import__('unit_supervisor').a_step())\ntime.sleep(600)",
    ).replace(
        "from unit_supervisor",
        f"SCRIPT = {str(SCRIPT)!r}\nimport unit_supervisor\n"
        "from pathlib import Path\nunit_supervisor.SCRIPT = Path(SCRIPT)\nfrom unit_supervisor",
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pids = list(map(int, parent.stdout.readline().split()))
        assert len(pids) == 2
        assert all(psutil.pid_exists(pid) for pid in pids)
        time.sleep(0.1)
        parent.send_signal(how)
        parent.wait(timeout=10)
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and any(map(psutil.pid_exists, pids)):
        time.sleep(0.02)
    assert [pid for pid in pids if psutil.pid_exists(pid)] == []


def test_titles_name_the_place() -> None:
    assert rank_title(Topology(tp=4, attn_dp=2).at(3)) == "rank 3 (attention DP 1, TP 1)"
    title = rank_title(Topology(tp=8, attn_dp=2, attn_cp=2).at(6))
    assert title == "rank 6 (attention DP 1, CP 1, TP 0)"


def test_the_idle_part_travels(run: Callable[..., Run]) -> None:
    it = run("good", "good", topology=Topology(tp=2, attn_dp=2)).start()
    part = RankStep(1, (SequenceSpan(3, 1, [1], 4),), (5,), (True,))
    step = ordinary_step((IDLE, part), 1)
    # A fake rank answers the rows of all.
    answers = [[(1, None)], [(1, None)]]
    assert it.execute(step, [[], [SampleRow(0, 0)]]).tokens == answers


def test_a_collective_error_is_a_run_error() -> None:
    assert issubclass(CollectiveError, RunError)
