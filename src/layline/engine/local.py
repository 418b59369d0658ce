"""Running steps in this process, which is the only rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from layline.comm.groups import CollectiveRecord
from layline.engine.balance import SampleRow
from layline.engine.executor import MemoryUse, RowSpec, SamplingRows, Token
from layline.engine.model import LoadedModel
from layline.engine.step import MeshStep
from layline.errors import LaylineError
from layline.layers.sampler import Sampler


class LocalExecutor:
    """The whole model in this process: one rank."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded
        self.num_blocks = loaded.num_blocks
        self._runner = loaded.runner
        self._sampler = Sampler()
        self._rows = SamplingRows()

    def admit(self, request_id: int, _: int, spec: RowSpec, /) -> None:
        """See Executor."""
        self._rows.admit(request_id, spec)

    def release(self, request_id: int, _: int, /) -> None:
        """See Executor."""
        self._rows.release(request_id)

    @torch.inference_mode()
    def execute(self, step: MeshStep, rows: Sequence[Sequence[SampleRow]], /) -> list[list[Token]]:
        """See Executor."""
        return self._sampled(self._runner.run(step), step, rows)

    @torch.inference_mode()
    def draft(self, step: MeshStep, rows: Sequence[Sequence[SampleRow]], /) -> list[list[Token]]:
        """See Executor."""
        return self._sampled(self.loaded.draft_model().runner.run(step), step, rows)

    def _sampled(
        self, logits: torch.Tensor, step: MeshStep, rows: Sequence[Sequence[SampleRow]]
    ) -> list[list[Token]]:
        sampled = self._sampler.sample(logits, self._rows.at(step.parts[0], rows[0]))
        return [list(zip(sampled.read(), sampled.logprobs, strict=True))]

    def memory(self) -> MemoryUse:
        """See Executor."""
        return MemoryUse(self.loaded.weight_bytes, self.loaded.cache_bytes)

    def collectives(self) -> list[list[CollectiveRecord]]:
        """See Executor. One rank communicates with nobody."""
        return [[]]

    def failure(self) -> LaylineError | None:
        """See Executor. There is no other process that could be gone."""
        return None

    def close(self, _: int = 0, /) -> None:
        """Nothing runs elsewhere."""
