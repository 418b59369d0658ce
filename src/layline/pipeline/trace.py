"""What streams did and when, as a timeline that chrome://tracing and Perfetto open. No torch here.

Times are the host's: on the CPU those of the work itself.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from layline.pipeline.access import NoRecorder, Operation


class Timeline:
    """Spans of several runs, each of which is a process of the drawing and its streams threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: list[dict[str, Any]] = []
        self._begin = time.perf_counter()
        self._runs: list[str] = []

    def new_run(self, name: str) -> int:
        """The number of another run."""
        with self._lock:
            self._runs.append(name)
            return len(self._runs)

    def run(self, name: str) -> TraceRecorder:
        """A recorder for the streams of another run."""
        return TraceRecorder(self, self.new_run(name))

    def add(
        self, run: int, stream: str, label: str, begin: float, end: float | None = None
    ) -> None:
        """A span between two values of ``perf_counter``, of any process here; until now if open."""
        end = time.perf_counter() if end is None else end
        span = {
            "name": label,
            "ph": "X",
            "pid": run,
            "tid": stream,
            "ts": (begin - self._begin) * 1e6,
            "dur": (end - begin) * 1e6,
        }
        with self._lock:
            self._events.append(span)

    def as_data(self) -> dict[str, Any]:
        """The Trace Event Format: microseconds, streams numbered and named."""
        with self._lock:
            spans, runs = list(self._events), list(self._runs)
        numbers: dict[tuple[int, str], int] = {}
        for span in spans:
            key = (span["pid"], span["tid"])
            span["tid"] = numbers.setdefault(key, len(numbers) + 1)
        names = [
            {"name": "process_name", "ph": "M", "pid": run, "args": {"name": name}}
            for run, name in enumerate(runs, start=1)
        ]
        names += [
            {"name": "thread_name", "ph": "M", "pid": run, "tid": tid, "args": {"name": stream}}
            for (run, stream), tid in numbers.items()
        ]
        return {"traceEvents": [*names, *spans], "displayTimeUnit": "ms"}

    def write(self, path: str) -> None:
        """Write the drawing. Raises OSError where it cannot be."""
        Path(path).write_text(json.dumps(self.as_data()), encoding="utf-8")


class TraceRecorder(NoRecorder):
    """Hears one run's streams for a timeline: their tasks, and what they waited for."""

    def __init__(self, timeline: Timeline, run: int) -> None:
        self._timeline = timeline
        self._run = run

    @contextlib.contextmanager
    def running(self, operation: Operation) -> Iterator[None]:
        """See AccessRecorder."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._timeline.add(self._run, operation.stream, operation.label, begin)

    def held_up(self, stream: str, event: str, since: float) -> None:
        """See AccessRecorder."""
        self._timeline.add(self._run, stream, f"wait for {event}", since)
