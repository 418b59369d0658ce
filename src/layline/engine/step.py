"""One step of a whole mesh, as the scheduler decides it and every rank receives it. No torch here.

Everything a rank chooses by is in here: its own sequences, and the rows and phases of all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from layline.boundary.layout import BatchVariant
from layline.boundary.rows import DpPadding, StepRows
from layline.engine.reading import RowRead
from layline.layers.spans import Phase, SequenceSpan, StepPhase, step_phase


@dataclass(frozen=True, slots=True)
class RankStep:
    """What one attention DP rank runs: sequences in row order and the token ids of their rows.

    The first ``num_decode`` spans decode, one token each, and the others prefill. ``samples[i]``
    says whether the last row of span ``i`` is scored; ``reads`` are further rows that something is
    wanted of. Ids below zero are those that the step before samples; see step_plan.
    """

    num_decode: int
    spans: tuple[SequenceSpan, ...]
    token_ids: tuple[int, ...]
    samples: tuple[bool, ...]
    reads: tuple[RowRead, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Rows of the step on this DP rank, context parallelism not counted."""
        return len(self.token_ids)

    @property
    def num_fed(self) -> int:
        """Rows whose token the step before samples."""
        return sum(token_id < 0 for token_id in self.token_ids)

    @property
    def phase(self) -> StepPhase:
        """Which of the rows decode; without any it is DECODE."""
        return step_phase(self.num_decode, len(self.token_ids))

    @property
    def prefills(self) -> bool:
        """True when a row of it prefills."""
        return self.num_decode < len(self.token_ids)


IDLE = RankStep(0, (), (), ())


@dataclass(frozen=True, slots=True)
class MeshStep:
    """One step: a part for each attention DP rank, and the rows every rank holds."""

    parts: tuple[RankStep, ...]
    rows: StepRows

    @property
    def prefills(self) -> bool:
        """True when every row of every part prefills."""
        return all(part.num_decode == 0 for part in self.parts)

    @property
    def ffn_phase(self) -> StepPhase:
        """The phase of compute that runs on the rows of every attention DP rank.

        Those of several ranks lie between each other's padding, so all of them prefill as soon as
        one does.
        """
        if len(self.parts) == 1:
            return self.parts[0].phase
        return Phase.PREFILL if any(part.prefills for part in self.parts) else Phase.DECODE


def ordinary_step(
    parts: Sequence[RankStep], attn_cp: int, padding: DpPadding = DpPadding.MAX_LEN
) -> MeshStep:
    """A step of the ordinary batch variant, where CP ranks hold the same rows."""
    counts = tuple((part.num_tokens,) * attn_cp for part in parts)
    return MeshStep(tuple(parts), StepRows(BatchVariant.ORDINARY, counts, padding))
