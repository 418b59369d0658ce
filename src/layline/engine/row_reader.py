"""Reading a step's hidden states: log-probabilities of known tokens, and pooled vectors.

Shape suffixes: R rows, H hidden.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from layline.comm.groups import Group
from layline.engine.outcome import FailedRow
from layline.engine.rank_part import RankPart
from layline.engine.reading import Reading, RowRead
from layline.engine.step import RankStep
from layline.layers.known_tokens import KnownToken, known_logprobs
from layline.models.decoder import Decoder
from layline.sampling import TokenLogprobs

ROWS_AT_ONCE = 64
"""Most rows whose logits exist at a time."""
NOT_FINITE = "its hidden states or logits hold NaN or infinity"


@dataclass(frozen=True)
class RowReader:
    """Reads rows of one rank's steps. ``cp_group`` joins rows that are divided over CP ranks."""

    model: Decoder
    cp_group: Group | None
    cp_rank: int

    def read(
        self, hidden: torch.Tensor, step: RankStep, part: RankPart
    ) -> list[Reading | FailedRow]:
        """What each of ``step.reads`` gives, of the normalised ``hidden`` [rows, hidden].

        Every rank of the DP rank's attention groups calls it, with the same step.
        """
        rows = [_rows(step, read) for read in step.reads]
        found: list[Reading | FailedRow] = [() for _ in step.reads]
        scored = [i for i, read in enumerate(step.reads) if read.next_ids]
        pooled = [i for i, read in enumerate(step.reads) if not read.next_ids]
        for i, values in zip(
            pooled, self._sums(hidden, part, [rows[i] for i in pooled]), strict=True
        ):
            found[i] = values
        known = [one for i in scored for one in _known(step.reads[i])]
        logprobs = self._scores(hidden, part, [row for i in scored for row in rows[i]], known)
        for i in scored:
            mine, logprobs = logprobs[: len(rows[i])], logprobs[len(rows[i]) :]
            whole = tuple(one for one in mine if one is not None)
            found[i] = whole if len(whole) == len(mine) else FailedRow(NOT_FINITE)
        return found

    def _scores(
        self, hidden: torch.Tensor, part: RankPart, rows: Sequence[int], known: Sequence[KnownToken]
    ) -> list[TokenLogprobs | None]:
        found: list[TokenLogprobs | None] = []
        for start in range(0, len(rows), ROWS_AT_ONCE):
            stop = start + ROWS_AT_ONCE
            states = self._gathered(hidden, part, rows[start:stop])
            found += known_logprobs(self.model.logits(states), known[start:stop])
        return found

    def _gathered(self, hidden: torch.Tensor, part: RankPart, rows: Sequence[int]) -> torch.Tensor:
        own = [(at, row) for at, row in enumerate(self._own(part, rows)) if row is not None]
        index = torch.tensor([row for _, row in own], dtype=torch.int64, device=hidden.device)
        if part.join_order is None or self.cp_group is None:
            return hidden.index_select(0, index)
        states_RH = hidden.new_zeros((len(rows), hidden.shape[1]))
        places = torch.tensor([at for at, _ in own], dtype=torch.int64, device=hidden.device)
        states_RH.index_copy_(0, places, hidden.index_select(0, index))
        joined: torch.Tensor = self.cp_group.all_reduce(states_RH)
        return joined

    def _sums(
        self, hidden: torch.Tensor, part: RankPart, groups: Sequence[Sequence[int]]
    ) -> list[Reading | FailedRow]:
        if not groups:
            return []
        sums_RH = torch.zeros(
            (len(groups), hidden.shape[1]), dtype=torch.float32, device=hidden.device
        )
        for number, rows in enumerate(groups):
            own = [row for row in self._own(part, rows) if row is not None]
            if own:
                index = torch.tensor(own, dtype=torch.int64, device=hidden.device)
                sums_RH[number] = hidden.index_select(0, index).float().sum(0)
        if part.join_order is not None and self.cp_group is not None:
            sums_RH = self.cp_group.all_reduce(sums_RH)
        listed = sums_RH.tolist()
        return [
            tuple(row) if all(map(math.isfinite, row)) else FailedRow(NOT_FINITE) for row in listed
        ]

    def _own(self, part: RankPart, rows: Sequence[int]) -> list[int | None]:
        """Where rows of the DP rank are among this rank's, None for those of another CP rank."""
        if part.join_order is None:
            return list(rows)
        homes = [divmod(part.join_order[row], part.join_width) for row in rows]
        return [row if rank == self.cp_rank else None for rank, row in homes]


def _rows(step: RankStep, read: RowRead) -> range:
    """The DP rank's rows that a read is about."""
    first = sum(span.count for span in step.spans[: read.span]) + read.first
    return range(first, first + read.count)


def _known(read: RowRead) -> list[KnownToken]:
    return [KnownToken(token_id, read.top, read.vocab) for token_id in read.next_ids]
