"""A sampler's view of a request, as it is after some tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from layline.layers.sampling_state import RowState
from layline.sampling import SamplingParams


def row_state(params: SamplingParams, *, output_ids: Sequence[int] = (), **facts: Any) -> RowState:
    """A state that has taken ``output_ids``; ``facts`` are RowState's other arguments."""
    state = RowState(params, **facts)
    for token_id in output_ids:
        state.append(token_id)
    return state
