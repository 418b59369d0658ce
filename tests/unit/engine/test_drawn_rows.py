"""Rows that failed before they were drawn, as the next step's input."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from layline.engine.drawing import draw_rows
from layline.engine.outcome import FailedRow
from layline.layers.sampler import Sampler
from layline.layers.sampling_state import RowState
from layline.sampling import SamplingParams


def state() -> RowState:
    return RowState(SamplingParams(temperature=0.0), seed=0, valid_vocab=5)


@pytest.mark.parametrize("failed", [1, 2])
def test_tokens_of_failed_rows_are_on_the_device_of_the_logits(failed: int) -> None:
    """Where every row has failed no batch tells it, and the next step may be fed them."""
    rows: list[Any] = [FailedRow("broken")] * failed
    drawn = draw_rows(Sampler(), torch.zeros(failed, 5, device="meta"), rows)
    assert drawn.token_ids.device.type == "meta"
    assert drawn.token_ids.shape == (failed,)
    assert drawn.read_ids() == [-1] * failed


def test_failed_rows_keep_their_place_among_the_others() -> None:
    logits = torch.eye(3, 5)
    drawn = draw_rows(Sampler(), logits, [state(), FailedRow("broken"), state()])
    assert drawn.token_ids.tolist() == drawn.read_ids() == [0, -1, 2]
    assert [isinstance(one, FailedRow) for one in drawn.read()] == [False, True, False]


def test_a_step_without_sampled_rows_has_no_tokens() -> None:
    drawn = draw_rows(Sampler(), torch.zeros(0, 5), [])
    assert drawn.token_ids.shape == (0,)
    assert drawn.read() == []
