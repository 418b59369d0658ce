"""One step of a whole mesh, as the scheduler decides it and every rank receives it. No torch here.

Everything a rank chooses by is in here: its own sequences, and the rows and phases of all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from layline.boundary.layout import BatchVariant
from layline.boundary.rows import DpPadding, StepRows
from layline.engine.reading import RowRead
from layline.layers.spans import Phase, SequenceSpan


@dataclass(frozen=True, slots=True)
class RankStep:
    """What one attention DP rank runs: sequences in row order and the token ids of their rows.

    ``samples[i]`` says whether the last row of span ``i`` is scored; ``reads`` are further rows
    that something is wanted of.
    """

    phase: Phase
    spans: tuple[SequenceSpan, ...]
    token_ids: tuple[int, ...]
    samples: tuple[bool, ...]
    reads: tuple[RowRead, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Rows of the step on this DP rank, context parallelism not counted."""
        return len(self.token_ids)


IDLE = RankStep(Phase.DECODE, (), (), ())


@dataclass(frozen=True, slots=True)
class MeshStep:
    """One step: a part for each attention DP rank, and the rows every rank holds.

    ``ffn_phase`` picks the kernels of what runs on rows of several ranks: prefill as soon as one
    of them prefills.
    """

    parts: tuple[RankStep, ...]
    rows: StepRows

    @property
    def prefills(self) -> bool:
        """True when every part that has rows prefills."""
        return all(part.phase is Phase.PREFILL for part in self.parts if part.spans)

    @property
    def ffn_phase(self) -> Phase:
        """The phase of compute that runs on gathered rows."""
        prefills = any(part.phase is Phase.PREFILL for part in self.parts if part.spans)
        return Phase.PREFILL if prefills else Phase.DECODE


def ordinary_step(
    parts: Sequence[RankStep], attn_cp: int, padding: DpPadding = DpPadding.MAX_LEN
) -> MeshStep:
    """A step of the ordinary batch variant, where CP ranks hold the same rows."""
    counts = tuple((part.num_tokens,) * attn_cp for part in parts)
    return MeshStep(tuple(parts), StepRows(BatchVariant.ORDINARY, counts, padding))
