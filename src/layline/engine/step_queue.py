"""Steps under way. The host plans a step while devices run the one before it. No torch here.

A step is planned from what is certain: which tokens requests will have, if not which. Whose token
turns out to end it has a row too much in the step after, whose token nobody takes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from time import perf_counter

from layline.engine.balance import MeshPlan, MeshScheduler
from layline.engine.executor import Executor, Launched
from layline.engine.outcome import StepResult
from layline.engine.step_times import StepTimes


@dataclass(frozen=True, slots=True)
class DoneStep:
    """A step that is done: what was planned, and what came of it.

    ``failure`` is what kept the step after it from being launched: to be raised once the tokens
    have been handed out.
    """

    plan: MeshPlan
    result: StepResult
    failure: Exception | None


@dataclass(frozen=True, slots=True)
class _Flight:
    plan: MeshPlan
    launched: Launched


class StepQueue:
    """Plans steps, has them run, and gives their results in order.

    ``num_ahead`` counts the steps that were launched before the result of another was read.
    """

    def __init__(
        self,
        scheduler: MeshScheduler,
        executor: Executor,
        times: StepTimes,
        *,
        most: int,
    ) -> None:
        """``most`` steps are under way at a time."""
        self._scheduler = scheduler
        self._times = times
        self._executor = executor
        self._most = most
        self._flights: deque[_Flight] = deque()
        self.num_ahead = 0

    def advance(self) -> DoneStep | None:
        """Launch what can be, then wait for the oldest step; None when there is nothing to run.

        Raises what a step failed with. It is then as if that step, and any after it, had not begun;
        a wait that is interrupted goes on with the next call.
        """
        failure: Exception | None = None
        try:
            self._launch()
        except Exception as error:
            if not self._flights:
                raise
            failure = error
        if not self._flights:
            return None
        flight = self._flights[0]
        try:
            result = self._executor.collect(flight.launched)
        except Exception:
            while self._flights:
                self._scheduler.cancel(self._flights.pop().plan)
            raise
        begin = perf_counter()
        self._flights.popleft()
        self._scheduler.complete(flight.plan)
        self._times.since("deliver", begin)
        return DoneStep(flight.plan, result, failure)

    def forget(self) -> None:
        """Nobody waits for the steps under way any more: their requests have ended."""
        self._flights.clear()
        self._scheduler.forget()

    def _launch(self) -> None:
        while len(self._flights) < self._most:
            begin = perf_counter()
            plan = self._scheduler.next_step()
            # Looking in vain is part of a step too: the last ones have none after them.
            self._times.since("schedule", begin)
            if plan is None:
                return
            before = self._flights[0].launched if self._flights else None
            launched = self._executor.launch(plan.step, plan.rows(), before)
            self.num_ahead += before is not None
            self._scheduler.begin(plan)
            self._flights.append(_Flight(plan, launched))
