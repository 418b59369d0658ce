"""The clock of one rank's pass over its layers."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch

from layline.engine.step_times import PassTimes


class TimedPass:
    """What one pass took. The next pass may begin before this one's times are asked for."""

    def __init__(self, stage: int, *, on_device: bool) -> None:
        self._stage = stage
        self._laps: dict[str, float] = {}
        self._events: list[torch.cuda.Event] | None = None
        if on_device:
            event: Any = torch.cuda.Event  # Untyped in torch.
            self._events = [event(enable_timing=True) for _ in range(2)]

    def add(self, part: str, seconds: float) -> None:
        """More time of ``part``: prepare, execute or sample."""
        self._laps[part] = self._laps.get(part, 0.0) + seconds

    def mark(self, part: str) -> None:
        """A part has been issued: between "prepare" and "execute" lies the stage."""
        if self._events is not None and part in ("prepare", "execute"):
            self._events[part == "execute"].record()

    def times(self) -> PassTimes:
        """The whole pass; once its tokens have been read."""
        seconds = self._laps.get("execute", 0.0)
        if self._events is not None and {"prepare", "execute"} <= set(self._laps):
            self._events[1].synchronize()
            seconds = self._events[0].elapsed_time(self._events[1]) / 1000
        return PassTimes(**self._laps, stages=[(self._stage, seconds)])


class PassClock:
    """Splits a pass into laps, and times a pipeline stage on its own device.

    A CUDA device runs the stage later than the host issues it, so two events time it there, which
    are read when the pass's tokens have been: nothing waits for them.
    """

    def __init__(self, device: torch.device, stage: int = 0) -> None:
        self._stage = stage
        self._on_device = device.type == "cuda"
        self.start()

    def start(self) -> None:
        """Begin a pass."""
        self._pass = TimedPass(self._stage, on_device=self._on_device)
        self._at = perf_counter()

    def lap(self, part: str) -> None:
        """Everything since the last call was ``part``: prepare, execute or sample."""
        now = perf_counter()
        self._pass.add(part, now - self._at)
        self._at = now
        self._pass.mark(part)

    def take(self) -> TimedPass:
        """The pass that ends here."""
        return self._pass
