"""Stages that wait for each other, so that an overlap which is possible is also seen.

Whether two short tasks of free streams overlap is chance. Here a stage that begins a step waits a
moment for the one before it to begin the next, and that one for it. Where steps may overlap they
meet at once; where something keeps them apart, nobody comes.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Any

from layline.engine.stage_program import StagedStep
from layline.gates.mutations import Around
from layline.pipeline.payload import Payload
from layline.pipeline.stages import StageHome

PATIENCE_S = 0.1


class Meeting:
    """How many steps each stage has begun."""

    def __init__(self, num_stages: int) -> None:
        self._begun = [0] * num_stages
        self._changed = threading.Condition()

    def begin(self, stage: int) -> None:
        """Say that ``stage`` begins its next step, and wait for its neighbours."""
        with self._changed:
            number = self._begun[stage] = self._begun[stage] + 1
            self._changed.notify_all()
            before, after = stage - 1, stage + 1
            self._changed.wait_for(
                lambda: (
                    (before < 0 or self._begun[before] > number)
                    and (after == len(self._begun) or self._begun[after] >= number - 1)
                ),
                PATIENCE_S,
            )


@dataclass(frozen=True)
class MeetingStage(Around):
    """A stage that meets its neighbours before it runs."""

    stage: int
    meeting: Meeting

    def run(self, step: StagedStep, entering: Payload | None) -> Any:
        """See StageProgram."""
        self.meeting.begin(self.stage)
        return self.program.run(step, entering)


def meeting_stages(homes: list[StageHome]) -> list[StageHome]:
    """For ArmOptions.homes: the stages meet."""
    meeting = Meeting(len(homes))
    return [
        replace(home, program=MeetingStage(home.program, home.index, meeting)) for home in homes
    ]
