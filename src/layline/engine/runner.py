"""Run one step's model pass: build the batch, walk the layers, score the rows that sample."""

from __future__ import annotations

import numpy as np
import torch

from layline.engine.scheduler import StepPlan
from layline.layers.attention import AttentionBackend, slot_numbers
from layline.layers.forward_batch import ForwardBatch
from layline.models.decoder import Decoder


class Runner:
    """Executes step plans on one device."""

    def __init__(
        self, model: Decoder, backend: AttentionBackend, block_size: int, device: torch.device
    ) -> None:
        self.model = model
        self._backend = backend
        self._block_size = block_size
        self._device = device
        self._windows = frozenset(model.config.windows)

    def run(self, plan: StepPlan) -> torch.Tensor:
        """Logits [sampling rows, vocabulary] in the order of the plan's sampling entries.

        A step in which no prompt is complete gives no rows.
        """
        return self.score(self.hidden_states(plan), plan)

    def hidden_states(self, plan: StepPlan) -> torch.Tensor:
        """Normalised hidden states of every row, [tokens, hidden]; the cache is written."""
        ids = torch.tensor(plan.token_ids, dtype=torch.int64, device=self._device)
        return self.model.forward(ids, self._batch(plan))

    def score(self, hidden: torch.Tensor, plan: StepPlan) -> torch.Tensor:
        """Logits of those rows of ``hidden`` that the plan samples from."""
        rows = sampling_rows(plan)
        if len(rows) != hidden.shape[0]:
            index = torch.tensor(rows, dtype=torch.int64, device=self._device)
            hidden = hidden.index_select(0, index)
        return self.model.logits(hidden)

    def _batch(self, plan: StepPlan) -> ForwardBatch:
        spans = [entry.span for entry in plan.entries]
        positions = np.concatenate([np.arange(span.start, span.length) for span in spans])
        slots = np.concatenate(
            [slot_numbers(span, span.start, span.length, self._block_size) for span in spans]
        )
        lengths = None
        if self.model.rope_is_dynamic:
            counts = [span.count for span in spans]
            lengths = torch.from_numpy(np.repeat([span.rope_length for span in spans], counts))
            lengths = lengths.to(self._device)
        cos, sin = self.model.rotations(
            plan.phase, torch.from_numpy(positions).to(self._device), lengths
        )
        return ForwardBatch(
            phase=plan.phase,
            rope_cos=cos,
            rope_sin=sin,
            slots=self._slots(slots),
            attention=self._backend.plan(plan.phase, spans, self._windows),
        )

    def _slots(self, slots: np.ndarray) -> torch.Tensor | slice:
        # A plain copy is a fraction of an indexed one; one sequence's rows are mostly consecutive.
        if (np.diff(slots) == 1).all():
            return slice(int(slots[0]), int(slots[0]) + len(slots))
        return torch.from_numpy(slots).to(self._device)


def sampling_rows(plan: StepPlan) -> list[int]:
    """The last row of every entry that samples in this step."""
    rows, row = [], -1
    for entry in plan.entries:
        row += entry.span.count
        if entry.samples:
            rows.append(row)
    return rows
