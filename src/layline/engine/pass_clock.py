"""The clock of one rank's pass over its layers."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch

from layline.engine.step_times import PassTimes


class PassClock:
    """Splits a pass into laps, and times a pipeline stage on its own device.

    Between the laps "prepare" and "execute" lies the stage. A CUDA device runs it later than the
    host issues it, so two events time it there, which are read when the pass's tokens have been:
    nothing waits for them.
    """

    def __init__(self, device: torch.device, stage: int = 0) -> None:
        self._stage = stage
        self._events: list[torch.cuda.Event] | None = None
        if device.type == "cuda":
            event: Any = torch.cuda.Event  # Untyped in torch.
            self._events = [event(enable_timing=True) for _ in range(2)]
        self.start()

    def start(self) -> None:
        """Begin a pass."""
        self._laps: dict[str, float] = {}
        self._at = perf_counter()

    def lap(self, part: str) -> None:
        """Everything since the last call was ``part``: prepare, execute or sample."""
        now = perf_counter()
        self._laps[part] = self._laps.get(part, 0.0) + now - self._at
        self._at = now
        if self._events is not None and part in ("prepare", "execute"):
            self._events[part == "execute"].record()

    def times(self) -> PassTimes:
        """The pass so far; once its tokens have been read."""
        seconds = self._laps.get("execute", 0.0)
        if self._events is not None and {"prepare", "execute"} <= set(self._laps):
            self._events[1].synchronize()
            seconds = self._events[0].elapsed_time(self._events[1]) / 1000
        return PassTimes(**self._laps, stages=[(self._stage, seconds)])
