"""Drawing on an accelerator: all rows at once, in torch, without reading anything back.

The same definitions as in ``sampling_rows``, so the same tokens up to the last bit of the
device's exponential. Integer sums keep a row's result independent of how many rows a kernel sees.

Shape suffixes: R rows, V vocabulary, 1 a kept axis of length one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from layline.layers.sampling_rows import FULL_WEIGHT, NO_TOKEN
from layline.layers.sampling_state import RowState
from layline.layers.transfer import upload

_ELEMENTS_AT_ONCE = 1 << 22
"""Rows are taken in groups of about this many logits; a group's scratch is some 80 bytes each."""


def greedy(logits_RV: torch.Tensor) -> torch.Tensor:
    """Most likely ids int64 [rows] of logits [rows, vocab]; ``NO_TOKEN`` for rows with none."""
    ids_R1 = logits_RV.argmax(dim=-1, keepdim=True)
    # As isfinite, in two kernels instead of four: comparing NaN gives False.
    usable_R1 = logits_RV.gather(1, ids_R1).abs_() < math.inf
    return torch.where(usable_R1, ids_R1, NO_TOKEN).squeeze(1)


def draw(logits_RV: torch.Tensor, rows: Sequence[RowState]) -> torch.Tensor:
    """Drawn ids int64 [rows] from float32 logits [rows, vocab]; ``NO_TOKEN`` for rows with none."""
    group = max(1, _ELEMENTS_AT_ONCE // logits_RV.shape[1])
    drawn = [
        _draw_group(logits_RV[start : start + group], rows[start : start + group])
        for start in range(0, len(rows), group)
    ]
    return drawn[0] if len(drawn) == 1 else torch.cat(drawn)


def best(logits_RV: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``count`` first logits and ids by (logit descending, id ascending), in that order.

    torch.topk leaves the choice among equal values open, so what is selected are integers that
    hold the value in their upper half and the reversed id in the lower.
    Returns: float32 [rows, count], int64 [rows, count].
    """
    logits_RV = logits_RV.float() + 0.0  # makes -0.0 equal to 0.0 in its bits as well
    bits_RV = logits_RV.view(torch.int32)
    # Negative floats order backwards by magnitude; flipping those bits makes the order one.
    keys_RV = torch.where(bits_RV < 0, bits_RV ^ 0x7FFFFFFF, bits_RV).long() << 32
    keys_RV += torch.arange(logits_RV.shape[1] - 1, -1, -1, device=logits_RV.device)
    keys_RK = keys_RV.topk(count, dim=-1).values
    ids_RK = logits_RV.shape[1] - 1 - (keys_RK & 0xFFFFFFFF)
    return logits_RV.gather(1, ids_RK), ids_RK


def log_total(logits_RV: torch.Tensor) -> torch.Tensor:
    """Logarithm of each row's sum of exponentials, float64 [rows, 1], of float32 logits.

    Integer sums again: torch.log_softmax rounds differently with a row's alignment in memory.
    """
    peak_R1 = logits_RV.amax(dim=-1, keepdim=True)
    weights_RV = _weigh(logits_RV, peak_R1, torch.ones_like(peak_R1))
    total_R1 = weights_RV.sum(dim=-1, keepdim=True).double() / FULL_WEIGHT
    return peak_R1.double() + total_R1.log()


def _draw_group(logits_RV: torch.Tensor, rows: Sequence[RowState]) -> torch.Tensor:
    vocab = logits_RV.shape[1]
    table = np.array(
        [
            [row.params.temperature for row in rows],
            [float(min(row.params.top_k or vocab, vocab)) for row in rows],
            [row.params.top_p for row in rows],
            [float(math.ceil(row.params.min_p * FULL_WEIGHT)) for row in rows],
            [row.uniform() for row in rows],
        ],
        dtype=np.float64,
    )
    columns = upload(table, logits_RV.device).unsqueeze(-1).unbind(0)
    temperature_R1, top_k_R1, top_p_R1, floor_R1, uniform_R1 = columns
    peak_R1 = logits_RV.amax(dim=-1, keepdim=True)
    if any(row.params.top_k > 0 or row.params.top_p < 1.0 for row in rows):
        # Rows without a filter keep everything (top_k = vocab, top_p = 1) when ranked with others.
        # On an H200 this sort is quicker than torch.topk of 50 integers with unambiguous order.
        ranked_RV, ids_RV = torch.sort(logits_RV + 0.0, dim=-1, descending=True, stable=True)
        ranked_RV = _weigh(ranked_RV, peak_R1, temperature_R1)
        _cut(ranked_RV, top_k_R1, top_p_R1)
        # Back in id order, so that a filter changes which ids the draw passes, not their order.
        weights_RV = torch.empty_like(ranked_RV).scatter_(1, ids_RV, ranked_RV)
    else:
        weights_RV = _weigh(logits_RV, peak_R1, temperature_R1)
    if any(row.params.min_p > 0.0 for row in rows):
        weights_RV *= weights_RV >= floor_R1.long()
    drawn_R1 = _select(weights_RV, uniform_R1)
    return torch.where(torch.isfinite(peak_R1), drawn_R1, NO_TOKEN).squeeze(1)


def _weigh(
    logits_RV: torch.Tensor, peak_R1: torch.Tensor, temperature_R1: torch.Tensor
) -> torch.Tensor:
    scaled_RV = (logits_RV - peak_R1).div_(temperature_R1.float()).exp_()
    return scaled_RV.mul_(float(FULL_WEIGHT)).long()


def _cut(weights_RV: torch.Tensor, top_k_R1: torch.Tensor, top_p_R1: torch.Tensor) -> None:
    """Zero, in place, what top-k and then top-p remove from weights in ranked order."""
    rank_V = torch.arange(weights_RV.shape[1], device=weights_RV.device)
    weights_RV *= rank_V < top_k_R1
    cumulative_RV = weights_RV.cumsum(dim=-1)
    need_R1 = (cumulative_RV[:, -1:].double() * top_p_R1).ceil_().long()
    weights_RV *= (cumulative_RV - weights_RV) < need_R1


def _select(weights_RV: torch.Tensor, uniform_R1: torch.Tensor) -> torch.Tensor:
    cumulative_RV = weights_RV.cumsum(dim=-1)
    total_R1 = cumulative_RV[:, -1:]
    target_R1 = (total_R1.double() * uniform_R1).long()
    target_R1 = torch.minimum(target_R1, total_R1 - 1)
    return torch.searchsorted(cumulative_RV, target_R1, right=True)
