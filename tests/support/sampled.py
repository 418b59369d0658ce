"""Watch an LLM's executor: the logits of every sampled row, and the plans that led to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from layline import LLM
from layline.engine.balance import SampleRow
from layline.engine.executor import Launched
from layline.engine.local import LocalExecutor
from layline.engine.outcome import FailedRow
from layline.engine.reading import Reading
from layline.engine.step import MeshStep


class SampledLogits:
    """Stands between an LLM and its runner. ``rows`` are by request id and token index."""

    def __init__(self, llm: LLM) -> None:
        executor = llm._engine._executor
        assert isinstance(executor, LocalExecutor)
        self._launch = executor.launch
        self._run = executor._runner.run_reading
        self.clock = executor._runner.clock
        self._asked: list[SampleRow] = []
        self.rows: dict[tuple[int, int], torch.Tensor] = {}
        self.steps: list[MeshStep] = []
        patched: Any = executor
        patched.launch = self.launch
        patched._runner = self

    def launch(
        self, step: MeshStep, rows: Sequence[Sequence[SampleRow]], before: Launched | None
    ) -> Launched:
        self._asked = list(rows[0])
        self.steps.append(step)
        return self._launch(step, rows, before)

    def run_reading(
        self, step: MeshStep, sampled: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, list[Reading | FailedRow]]:
        logits, readings = self._run(step, sampled)
        for asked, row in zip(self._asked, logits, strict=True):
            self.rows[asked.request_id, asked.index] = row.float().clone()
        return logits, readings

    def of(self, request_id: int) -> torch.Tensor:
        """Logits [tokens, vocabulary] of one request."""
        mine = {index: row for (owner, index), row in self.rows.items() if owner == request_id}
        return torch.stack([mine[index] for index in range(len(mine))])


def generate_watched(
    llm: LLM, prompts: Sequence[Sequence[int]], params: Any
) -> tuple[list[list[int]], list[torch.Tensor], list[Any]]:
    """Token ids, sampled logits and the requests of prompts that run together."""
    watch = SampledLogits(llm)
    requests = [llm._engine.submit(prompt, params) for prompt in prompts]
    llm._engine.run(requests)
    logits = [watch.of(request.request_id) for request in requests]
    return [list(request.output_ids) for request in requests], logits, requests
