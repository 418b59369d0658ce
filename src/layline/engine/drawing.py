"""Sampling a step's rows so that an error in one of them is its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from layline.engine.outcome import FailedRow, Outcome
from layline.errors import RunError
from layline.layers.sampler import NO_FINITE_LOGIT, SampledBatch, Sampler
from layline.layers.sampling_state import RowState

OF_THE_STEP = (RunError, MemoryError, torch.OutOfMemoryError, torch.AcceleratorError)
"""Errors that no single row is to blame for."""


class DrawnRows:
    """The rows of one step, drawn together or, after an error, one by one."""

    def __init__(self, parts: Sequence[SampledBatch | FailedRow], device: torch.device) -> None:
        self._parts = parts
        self._device = device

    @property
    def token_ids(self) -> torch.Tensor:
        """The rows' tokens on the logits' device, int64 [rows]; -1 for a row without any."""
        if len(self._parts) == 1 and isinstance(self._parts[0], SampledBatch):
            return self._parts[0].token_ids
        none = torch.full((1,), -1, dtype=torch.int64, device=self._device)
        parts = [each.token_ids if isinstance(each, SampledBatch) else none for each in self._parts]
        return torch.cat([none[:0], *parts])

    def read_ids(self) -> list[int]:
        """The rows' tokens on the host, -1 for a row without any; waits for the device."""
        found: list[int] = []
        for part in self._parts:
            found += part.outcomes if isinstance(part, SampledBatch) else [-1]
        return found

    def read(self) -> list[Outcome]:
        """A token, or a failure, for each row; waits for the device."""
        found: list[Outcome] = []
        for part in self._parts:
            if isinstance(part, FailedRow):
                found.append(part)
                continue
            for token_id, logprobs in zip(part.outcomes, part.logprobs, strict=True):
                drawn = (token_id, logprobs)
                found.append(FailedRow(NO_FINITE_LOGIT) if token_id < 0 else drawn)
        return found


def draw_rows(
    sampler: Sampler, logits: torch.Tensor, rows: Sequence[RowState | FailedRow]
) -> DrawnRows:
    """Draw every row of ``logits`` [rows, vocab] that has not failed before.

    A row's token depends on nothing but its logits and its state, so those that are drawn again
    alone get the same. Raises what concerns the whole step.
    """
    states = [row for row in rows if isinstance(row, RowState)]
    if len(states) == len(rows):
        try:
            return DrawnRows([sampler.sample(logits, states)], logits.device)
        except OF_THE_STEP:
            raise
        except Exception:
            # Whose it is shows when each is drawn alone.
            pass
    alone = [_alone(sampler, logits[i : i + 1], row) for i, row in enumerate(rows)]
    return DrawnRows(alone, logits.device)


def _alone(
    sampler: Sampler, logits: torch.Tensor, row: RowState | FailedRow
) -> SampledBatch | FailedRow:
    if isinstance(row, FailedRow):
        return row
    try:
        return sampler.sample(logits, [row])
    except OF_THE_STEP:
        raise
    except Exception as error:
        return FailedRow.of(error)
