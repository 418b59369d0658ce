"""What one attention DP rank runs in a step, with the requests that it is for. No torch here.

A token id below zero stands for one that is not known yet: ``-1 - row`` is the one that the sampled
row ``row`` gives, in the same DP rank's part of the step that is the oldest one under way when this
one begins. Devices put it in its place.
"""

from __future__ import annotations

from dataclasses import dataclass

from layline.engine.request import Request
from layline.layers.spans import SequenceSpan, StepPhase, step_phase


@dataclass(frozen=True, slots=True)
class StepEntry:
    """Tokens of one request in a step. ``samples`` is False while it has further known tokens.

    ``num_read`` is the request's before the step, to go back to when the step gave nothing;
    ``ahead`` says how many of the tokens up to this row's are drafts, this one's included.
    """

    request: Request
    span: SequenceSpan
    samples: bool
    num_read: int = 0
    ahead: int = 0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: its sequences in row order, and the token ids of their rows.

    The first ``num_decode`` entries decode, one token each; a readmitted request, and one with
    drafts, may have several of them, in the order of their positions. The others prefill.
    """

    num_decode: int
    entries: tuple[StepEntry, ...]
    token_ids: tuple[int, ...]

    @property
    def phase(self) -> StepPhase:
        """Which of the rows decode."""
        return step_phase(self.num_decode, len(self.token_ids))


EntryRows = tuple[list[StepEntry], list[int]]
"""Entries and the token ids of their rows."""


def joined_plan(decodes: EntryRows, prompts: EntryRows) -> StepPlan | None:
    """The step of both, None without any."""
    entries = (*decodes[0], *prompts[0])
    if not entries:
        return None
    return StepPlan(len(decodes[0]), entries, (*decodes[1], *prompts[1]))


def sampled_row(row: int) -> int:
    """The token id that stands for what sampled row ``row`` of an earlier step gives; its own
    inverse."""
    return -1 - row
