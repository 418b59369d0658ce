"""The queues behind CPU streams: one lane and one worker thread each, and who may advance.

All lanes of a process's pipeline share one lock. A worker takes its lane's next item when that can
go on and the controller lets it, runs a task without the lock, and tells whoever waits.
"""

from __future__ import annotations

import contextvars
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from layline.errors import RunError
from layline.pipeline.access import AccessLog, Operation
from layline.pipeline.cells import Cell
from layline.pipeline.device import StageDevice

# How long a worker may take to start.
START_S = 60.0


@dataclass(frozen=True)
class Task:
    """A function to run, in the context variables of whoever issued it."""

    operation: Operation
    function: Callable[[], Any]
    cell: Cell[Any]
    context: contextvars.Context


@dataclass(eq=False)
class Record:
    """One record of an event: what a wait binds to."""

    event: str
    lane: str
    done: bool = False
    error: BaseException | None = None


@dataclass(frozen=True)
class Wait:
    """A stop until a record is reached."""

    record: Record


Item = Task | Record | Wait


@dataclass(eq=False)
class Lane:
    """One stream's queue.

    Attributes:
        changed: Notified when its worker may have something to do.
        running: What its worker runs now, in words.
        error: What poisoned it.
        issued: Items enqueued so far; ``finished`` of them have ended.
        busy_s: Seconds spent in tasks.
        blocked_s: Seconds spent waiting for events, with work behind them.
    """

    name: str
    device: StageDevice
    num_threads: int
    changed: threading.Condition
    queue: deque[Item] = field(default_factory=deque)
    running: str | None = None
    error: BaseException | None = None
    issued: int = 0
    finished: int = 0
    busy_s: float = 0.0
    blocked_s: float = 0.0

    @property
    def ready(self) -> bool:
        """Whether its next item can go on now."""
        if not self.queue or self.running is not None:
            return False
        head = self.queue[0]
        return not isinstance(head, Wait) or head.record.done or self.error is not None

    @property
    def blocked_on(self) -> Record | None:
        """The record that its next item waits for."""
        head = self.queue[0] if self.queue else None
        return head.record if isinstance(head, Wait) and not self.ready else None


class Controller(Protocol):
    """Decides which lane advances. Every method but ``bind`` and ``issued`` is called locked."""

    def bind(self, lanes: Lanes) -> None:
        """Decide over these lanes, and no others."""

    def may_advance(self, lane: Lane) -> bool:
        """Whether the lane's worker may take its next item."""

    def advanced(self, lane: Lane) -> None:
        """The lane's worker has finished one item."""

    def issued(self) -> None:
        """The host has enqueued an item; not locked."""

    def wait(self, done: Callable[[], bool], deadline: float) -> bool:
        """Keep a host thread until ``done()``; False when ``time.monotonic()`` passes first.

        Raises RunError when it can never be done.
        """

    def changed(self) -> None:
        """Something has ended: let host threads go on that waited for it."""

    def note(self, lane: Lane) -> str:
        """What there is to say about the lane: why it does not advance, or nothing."""


class Lanes:
    """All lanes of one set of streams, their lock and their workers."""

    def __init__(self, controller: Controller, log: AccessLog) -> None:
        # Reentrant, because the garbage collector may end these lanes from within a locked part.
        self.lock = threading.RLock()
        self.controller = controller
        self.log = log
        self.closed = False
        # Where set, what is issued goes here and is not enqueued.
        self.capture: list[tuple[Lane, Callable[[], Item | None]]] | None = None
        self._lanes: dict[str, Lane] = {}
        self._threads: list[threading.Thread] = []
        controller.bind(self)

    def __iter__(self) -> Iterator[Lane]:
        return iter(self._lanes.values())

    def add(self, name: str, device: StageDevice, num_threads: int) -> Lane:
        """A new lane with its worker, whose threads are set when this returns."""
        lane = Lane(name, device, num_threads, threading.Condition(self.lock))
        started = threading.Event()
        thread = threading.Thread(
            target=self._work, args=(lane, started), name=f"stream {name}", daemon=True
        )
        with self.lock:
            self._check_open()
            self._lanes[name] = lane
            self._threads.append(thread)
        _start_with_threads(thread, started)
        return lane

    def __contains__(self, name: str) -> bool:
        return name in self._lanes

    def enqueue(self, lane: Lane, make: Callable[[], Item | None]) -> None:
        """Put what ``make()`` gives, called locked, at the lane's end.

        Raises RunError when the streams are closed, and inside a task.
        """
        if self.log.current is not None:
            raise RunError(
                f"task {self.log.current.label!r} issues work on stream {lane.name!r}; only the "
                "host does"
            )
        with self.lock:
            self._check_open()
            if self.capture is not None:
                self.capture.append((lane, make))
                return
            item = make()
            if item is None:
                return
            lane.queue.append(item)
            lane.issued += 1
            lane.changed.notify()
        self.controller.issued()

    def host_wait(self, done: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Keep this host thread until ``done()``. Raises RunError after ``timeout_s``."""
        if self.log.current is not None:
            raise RunError(f"task {self.log.current.label!r} waits for {what}; only the host does")
        if not self.controller.wait(lambda: done() or self.closed, time.monotonic() + timeout_s):
            raise RunError(f"waited {timeout_s:g} s for {what}; {self.where()}")
        if not done():
            raise RunError(f"{what} will not come: the streams were closed")

    def where(self) -> str:
        """What every lane does, in one line."""
        with self.lock:
            return self.where_locked()

    def where_locked(self) -> str:
        """The same, for a caller that holds the lock."""
        return "; ".join(f"{lane.name!r} {self._place(lane)}" for lane in self)

    def close(self, timeout_s: float) -> None:
        """Discard what has not begun and join the workers. Raises RunError for those that stay."""
        self.shut()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        late = [thread.name for thread in self._threads if thread.is_alive()]
        if late:
            raise RunError(
                f"{', '.join(late)} still runs {timeout_s:g} s after it should end; {self.where()}"
            )

    def shut(self) -> None:
        """Let every worker end after the item it is at, and every host wait with an error."""
        with self.lock:
            self.closed = True
            for lane in self:
                lane.queue.clear()
                lane.changed.notify_all()
            self.controller.changed()

    def _check_open(self) -> None:
        if self.closed:
            raise RunError("the streams were closed; nothing more can be issued")

    def _place(self, lane: Lane) -> str:
        blocked = lane.blocked_on
        if lane.running is not None:
            place = f"runs {lane.running!r}"
        elif blocked is not None:
            place = f"waits for event {blocked.event!r} of {blocked.lane!r}"
        else:
            place = "is ready" if lane.queue else "is idle"
        queued = f" with {len(lane.queue)} queued" if lane.queue else ""
        note = self.controller.note(lane)
        return f"{place}{queued}{note and f' ({note})'}"

    def _work(self, lane: Lane, started: threading.Event) -> None:
        import torch

        # The first call settles the library's default in this thread, which would otherwise
        # replace the number below at some later call.
        torch.get_num_threads()
        torch.set_num_threads(lane.num_threads)
        started.set()
        while (item := self._take(lane)) is not None:
            error = None
            if isinstance(item, Task):
                begun = time.perf_counter()
                error = self._run(item, lane)
                lane.busy_s += time.perf_counter() - begun
            with self.lock:
                self._finish(lane, item, error)
            # Nothing of the item may outlive it here: its memory counts as free.
            del item, error

    def _take(self, lane: Lane) -> Item | None:
        with self.lock:
            while not self.closed:
                if lane.ready and self.controller.may_advance(lane):
                    item = lane.queue.popleft()
                    lane.running = item.operation.label if isinstance(item, Task) else "an event"
                    return item
                blocked, since = lane.blocked_on, time.perf_counter()
                lane.changed.wait()
                if blocked is not None:
                    lane.blocked_s += time.perf_counter() - since
                    self.log.recorder.held_up(lane.name, blocked.event, since)
        return None

    def _run(self, task: Task, lane: Lane) -> BaseException | None:
        """What the task raised, or what keeps it from running."""
        import torch

        if lane.error is not None:
            task.cell.fail(lane.error)
            return lane.error
        try:
            with torch.inference_mode(), self.log.during(task.operation):
                task.cell.fill(task.context.run(task.function))
        except BaseException as error:
            error.add_note(f"in task {task.operation.label!r} on stream {lane.name!r}")
            task.cell.fail(error)
            return error
        return None

    def _finish(self, lane: Lane, item: Item, error: BaseException | None) -> None:
        self.controller.advanced(lane)
        lane.running = None
        lane.finished += 1
        if isinstance(item, Wait):
            error = item.record.error
        lane.error = lane.error or error
        if isinstance(item, Record):
            item.done, item.error = True, lane.error
            for other in self:
                if other.queue and isinstance(head := other.queue[0], Wait) and head.record is item:
                    other.changed.notify()
        self.controller.changed()


def _start_with_threads(thread: threading.Thread, started: threading.Event) -> None:
    """Start a worker that sets its own number of torch threads, and keep everyone else's.

    Measured with torch 2.13 over libgomp: the number belongs to a thread, so that workers can have
    different ones. But torch also keeps the last number that any thread set, and a thread takes
    that over at its first parallel operation, even after a torch.set_num_threads of its own if
    nothing asked torch for the number before. So every worker asks before it sets, and whoever
    starts it asks before and sets again after, for threads born later.
    """
    import torch

    here = torch.get_num_threads()
    thread.start()
    came = started.wait(START_S)
    torch.set_num_threads(here)
    if not came:
        raise RunError(f"{thread.name} did not start within {START_S:g} s")
