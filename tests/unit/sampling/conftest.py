"""Both ways of drawing must hold every property, so most tests run once for each."""

from __future__ import annotations

import pytest
import torch

from layline.layers.sampler import Sampler
from layline.layers.sampling_state import RowState
from layline.sampling import SamplingParams


class RowAt(RowState):
    """A row whose random number is given, to probe the cumulative distribution where we like."""

    value = 0.5

    def uniform(self, stream: int = 0) -> float:
        return self.value


class Probe:
    """Asks a sampler for one token at each of many given random numbers."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler

    def tokens(
        self, logits: torch.Tensor, params: SamplingParams, uniforms: list[float], **state: object
    ) -> list[int]:
        rows, taken = [], state.pop("output_ids", ())
        for value in uniforms:
            row = RowAt(params, seed=0, **{"valid_vocab": len(logits), **state})
            for token_id in taken:
                row.append(token_id)
            row.value = value
            rows.append(row)
        return self.sampler.sample(logits.expand(len(rows), -1), rows).read()

    def support(self, logits: torch.Tensor, params: SamplingParams, **state: object) -> set[int]:
        """Every id found on a grid of 300: all ids of probability above 1/300, at least."""
        grid = [(i + 0.5) / 300 for i in range(300)]
        return set(self.tokens(logits, params, grid, **state))


@pytest.fixture(params=[False, True], ids=["by_row", "batched"])
def sampler(request: pytest.FixtureRequest) -> Sampler:
    return Sampler(batched=request.param)


@pytest.fixture
def probe(sampler: Sampler) -> Probe:
    return Probe(sampler)
