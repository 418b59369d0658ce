"""Who decides which CPU stream advances: the operating system, or a script.

A scripted run is the same every time. One worker runs at a time, a policy picks which, and a test
can stall or hold any stream at any point. Streams advance only while a host thread waits or where
the policy lets them run ahead, so that a host that issues everything first is the common case.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from layline.errors import RunError
from layline.pipeline.lanes import Lane, Lanes

# How many of the last items a scripted run remembers.
HISTORY = 1000


class ThreadController:
    """Every stream runs freely in its thread."""

    def __init__(self) -> None:
        self._lanes: Lanes | None = None
        # Each host thread has a condition of its own: one that is woken in vain takes the
        # interpreter from the streams.
        self._waiting: dict[threading.Condition, Callable[[], bool]] = {}

    def bind(self, lanes: Lanes) -> None:
        """See Controller.bind."""
        self._lanes = lanes

    def may_advance(self, lane: Lane) -> bool:
        """See Controller.may_advance."""
        return True

    def advanced(self, lane: Lane) -> None:
        """See Controller.advanced."""

    def issued(self) -> None:
        """See Controller.issued."""

    def wait(self, done: Callable[[], bool], deadline: float) -> bool:
        """See Controller.wait."""
        assert self._lanes is not None
        with self._lanes.lock:
            over = threading.Condition(self._lanes.lock)
            self._waiting[over] = done
            try:
                return over.wait_for(done, max(0.0, deadline - time.monotonic()))
            finally:
                del self._waiting[over]

    def changed(self) -> None:
        """See Controller.changed."""
        for over, done in self._waiting.items():
            if done():
                over.notify()

    def note(self, lane: Lane) -> str:
        """See Controller.note."""
        return ""


class Policy(Protocol):
    """Chooses in a scripted run."""

    def ahead(self) -> int:
        """How many items may run right after the host has issued one."""

    def pick(self, names: Sequence[str]) -> str:
        """Which of these streams, in their order of making, advances by one item."""


class Listed:
    """Streams advance when the host waits; those listed first, then in their order of making."""

    def __init__(self, *first: str) -> None:
        self._first = first

    def ahead(self) -> int:
        """See Policy.ahead."""
        return 0

    def pick(self, names: Sequence[str]) -> str:
        """See Policy.pick."""
        return next((name for name in self._first if name in names), names[0])


class Seeded:
    """Random choices, the same for the same seed; how eager streams are is random too."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._eagerness = self._random.choice((0.0, 0.3, 0.6, 0.9))
        self._weights: dict[str, float] = {}

    def ahead(self) -> int:
        """See Policy.ahead."""
        count = 0
        while count < 20 and self._random.random() < self._eagerness:
            count += 1
        return count

    def pick(self, names: Sequence[str]) -> str:
        """See Policy.pick. Each stream has a speed, so that some runs starve one of them."""
        for name in names:
            self._weights.setdefault(name, self._random.choice((0.05, 1.0, 1.0, 4.0)))
        return self._random.choices(names, [self._weights[name] for name in names])[0]


class ScriptedController:
    """Advances one stream by one item at a time, as the policy or the test picks.

    A stalled stream advances only when a host thread waits and no other can. A held one never does:
    a host that waits for it gets the deadlock, with who waits for what. ``history`` has the last
    items that ran, as (stream, label).
    """

    def __init__(self, policy: Policy | None = None, *, item_timeout_s: float = 60.0) -> None:
        self.history: deque[tuple[str, str]] = deque(maxlen=HISTORY)
        self._policy: Policy = policy or Listed()
        self._item_timeout_s = item_timeout_s
        self._stalled: set[str] = set()
        self._held: set[str] = set()
        self._turn: Lane | None = None
        self._bound: Lanes | None = None

    def stall(self, name: str) -> None:
        """Let a stream advance only when nothing else can."""
        with self._lanes.lock:
            self._stalled.add(self._known(name).name)

    def hold(self, name: str) -> None:
        """Let a stream not advance at all."""
        with self._lanes.lock:
            self._held.add(self._known(name).name)

    def release(self, name: str) -> None:
        """End a stream's stall or hold."""
        with self._lanes.lock:
            self._stalled.discard(name)
            self._held.discard(name)

    def advance(self, name: str, num_items: int = 1) -> None:
        """Run a stream's next items, held or not. Raises RunError when it cannot go on."""
        with self._lanes.lock:
            lane = self._known(name)
            for _ in range(num_items):
                if not lane.ready:
                    raise RunError(f"{name!r} cannot advance; {self._lanes.where_locked()}")
                self._give_turn(lane, time.monotonic() + self._item_timeout_s)

    def run_all(self) -> None:
        """Advance until no stream can that is not held; stalled ones come last."""
        with self._lanes.lock:
            while self._pick_one() is not None:
                pass

    def bind(self, lanes: Lanes) -> None:
        """See Controller.bind. Raises RunError for a second set of streams."""
        if self._bound is not None:
            raise RunError("a scripted controller decides over one set of streams; make another")
        self._bound = lanes
        self._host = threading.Condition(lanes.lock)

    def changed(self) -> None:
        """See Controller.changed. Host threads drive the streams, so they look at every item."""
        self._host.notify_all()

    def may_advance(self, lane: Lane) -> bool:
        """See Controller.may_advance."""
        return self._turn is lane

    def advanced(self, lane: Lane) -> None:
        """See Controller.advanced."""
        self.history.append((lane.name, lane.running or ""))
        self._turn = None

    def issued(self) -> None:
        """See Controller.issued. A stalled stream does not run ahead."""
        with self._lanes.lock:
            for _ in range(self._policy.ahead()):
                if self._pick_one(self._stalled) is None:
                    return

    def wait(self, done: Callable[[], bool], deadline: float) -> bool:
        """See Controller.wait. The waiting host thread drives the streams."""
        with self._lanes.lock:
            while not done():
                if time.monotonic() > deadline:
                    return False
                if self._turn is not None:
                    self._host.wait(max(0.0, deadline - time.monotonic()))
                elif self._pick_one(deadline=deadline) is None:
                    raise RunError(
                        f"deadlock: the host waits and no stream can go on; "
                        f"{self._lanes.where_locked()}"
                    )
        return True

    def note(self, lane: Lane) -> str:
        """See Controller.note."""
        if lane.name in self._held:
            return "held"
        return "stalled" if lane.name in self._stalled else ""

    @property
    def _lanes(self) -> Lanes:
        assert self._bound is not None, "the controller was not given to any streams"
        return self._bound

    def _known(self, name: str) -> Lane:
        lanes = {lane.name: lane for lane in self._lanes}
        if name not in lanes:
            raise RunError(f"no stream {name!r}; there are {', '.join(lanes)}")
        return lanes[name]

    def _pick_one(
        self, excluded: set[str] | None = None, deadline: float | None = None
    ) -> Lane | None:
        """Advance one stream by one item; None when none can go on."""
        ready = [lane for lane in self._lanes if lane.ready and lane.name not in self._held]
        willing = [lane for lane in ready if lane.name not in self._stalled]
        if excluded is None:
            willing = willing or ready
        if not willing or self._turn is not None:
            return None
        name = self._policy.pick([lane.name for lane in willing])
        lane = next(lane for lane in willing if lane.name == name)
        limit = time.monotonic() + self._item_timeout_s
        self._give_turn(lane, limit if deadline is None else deadline)
        return lane

    def _give_turn(self, lane: Lane, deadline: float) -> None:
        """Let ``lane`` take one item, and wait until that has ended or the deadline passes."""
        self._turn = lane
        lane.changed.notify()
        while self._turn is not None and not self._lanes.closed:
            if not self._host.wait(max(0.0, deadline - time.monotonic())):
                return
