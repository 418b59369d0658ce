"""Drawing on the host: one row at a time, in NumPy.

On two CPU cores NumPy's vectorised argmax, partition and sort of a 49,152-column row take 3, 53
and 134 us where torch's take 85, 554 and 4,107; a row also costs the same array operations
whoever its batch-mates are, so its token cannot depend on them.

Probabilities are integers: the most likely id weighs 2**40 and an id 2**40 times less likely
weighs nothing. Integer sums are exact in any order, which makes "the fewest ids that reach top_p"
and the inverse of the cumulative distribution exact statements, equal on every path.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from layline.sampling import SamplingParams, TokenLogprobs

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]

FULL_WEIGHT = 1 << 40
"""Weight of a row's most likely id. With 2**20 ids the sum stays below 2**60."""

NO_TOKEN = -1
"""Stands for the token of a row whose logits allow none."""

_BLOCK = 256

_TRIED_FIRST = (1024, 12288)
"""How many of the most likely ids are looked at for a nucleus before the whole row is sorted."""


def greedy(logits: FloatArray) -> int:
    """The most likely id of a row [vocab], lowest id among equals, or ``NO_TOKEN``."""
    best = int(logits.argmax())  # the position of a NaN if there is one
    return best if math.isfinite(logits[best]) else NO_TOKEN


def draw(logits: FloatArray, params: SamplingParams, uniform: float) -> int:
    """The id that ``uniform`` selects from a row [vocab], or ``NO_TOKEN``."""
    if not math.isfinite(logits.max()):  # NaN anywhere makes the maximum NaN
        return NO_TOKEN
    ids, weights = kept(logits, params)
    position = select(weights, uniform)
    return position if ids is None else int(ids[position])


def kept(logits: FloatArray, params: SamplingParams) -> tuple[IntArray | None, IntArray]:
    """What temperature, top-k, top-p and min-p, in this order, leave of a row's distribution.

    Ids are ranked by (logit descending, id ascending), so equal logits are cut deterministically.

    Args:
        logits: float32 [vocab] with a finite maximum; -inf marks ids that cannot be chosen.
    Returns: ids ascending [kept] (None: all of them), weights int64 [kept]; removed ids may
        remain with weight 0.
    """
    peak = logits.max()
    ids: IntArray | None = None
    if 0 < params.top_k < len(logits):
        ids = best_ids(logits, params.top_k)
        logits = logits[ids]
    weights = _weigh(logits, peak, params.temperature)
    if params.top_p < 1.0:
        nucleus = _nucleus(logits, weights, peak, params)
        ids = nucleus if ids is None else ids[nucleus]
        weights = weights[nucleus]
    if params.min_p > 0.0:
        weights = np.where(weights < math.ceil(params.min_p * FULL_WEIGHT), 0, weights)
    return ids, weights


def best_ids(logits: FloatArray, count: int) -> IntArray:
    """The ``count`` first ids by (logit descending, id ascending), returned in id order."""
    boundary = len(logits) - count
    threshold = np.partition(logits, boundary)[boundary]
    return _down_to(logits, threshold, count)


def log_probabilities(logits: FloatArray, token_id: int, count: int) -> TokenLogprobs:
    """Log-softmax of a row [vocab] at ``token_id`` and at its ``count`` most likely ids."""
    peak = logits.max()
    log_total = float(peak) + math.log(int(_weigh(logits, peak, 1.0).sum()) / FULL_WEIGHT)
    ids = best_ids(logits, min(count, len(logits))) if count else np.empty(0, dtype=np.int64)
    # Ids ascend, so a stable sort leaves equals in id order.
    ids = ids[np.argsort(-logits[ids], kind="stable")]
    pairs = zip(ids.tolist(), logits[ids].tolist(), strict=True)
    top = tuple((i, value - log_total) for i, value in pairs if value != -math.inf)
    return TokenLogprobs(token_id, float(logits[token_id]) - log_total, top)


def select(weights: IntArray, uniform: float) -> int:
    """The position at which the cumulative weight first exceeds ``uniform`` of the total."""
    start = 0
    if len(weights) > 16 * _BLOCK:
        # Two levels find the same position: the sums are exact, and a scan of blocks is short.
        blocks = np.cumsum(np.add.reduceat(weights, np.arange(0, len(weights), _BLOCK)))
        target = _target(int(blocks[-1]), uniform)
        block = int(np.searchsorted(blocks, target, side="right"))
        start = block * _BLOCK
        target -= int(blocks[block - 1]) if block else 0
        cumulative = np.cumsum(weights[start : start + _BLOCK])
    else:
        cumulative = np.cumsum(weights)
        target = _target(int(cumulative[-1]), uniform)
    return start + int(np.searchsorted(cumulative, target, side="right"))


def _target(total: int, uniform: float) -> int:
    return min(int(uniform * total), total - 1)


def _weigh(logits: FloatArray, peak: np.float32, temperature: float) -> IntArray:
    # Far below the peak the quotient may overflow to -inf, which rightly weighs nothing.
    with np.errstate(over="ignore", under="ignore"):
        scaled = logits - peak
        scaled /= np.float32(temperature)
        np.exp(scaled, out=scaled)
    scaled *= np.float32(FULL_WEIGHT)
    return scaled.astype(np.int64)


def _nucleus(
    logits: FloatArray, weights: IntArray, peak: np.float32, params: SamplingParams
) -> IntArray:
    """Positions, ascending, of the shortest ranked prefix that weighs top_p of the total."""
    total = int(weights.sum())
    need = math.ceil(params.top_p * total)
    for count in _TRIED_FIRST:
        if count >= len(logits):
            continue
        # A trained model's nucleus is a small part of its vocabulary; the rest need not be sorted.
        candidates = np.partition(logits, len(logits) - count)[-count:]
        if int(_weigh(candidates, peak, params.temperature).sum()) >= need:
            break
    else:
        candidates = logits
    ranked = np.ascontiguousarray(np.sort(candidates)[::-1])
    cumulative = np.cumsum(_weigh(ranked, peak, params.temperature))
    last = int(np.searchsorted(cumulative, need, side="left"))
    return _down_to(logits, ranked[last], last + 1)


def _down_to(logits: FloatArray, threshold: np.float32, count: int) -> IntArray:
    """Positions above ``threshold``, and the lowest ones equal to it, ``count`` in all."""
    positions = np.flatnonzero(logits >= threshold)
    if len(positions) > count:
        above = logits[positions] > threshold
        equal = np.flatnonzero(~above)
        above[equal[: count - int(np.count_nonzero(above))]] = True
        positions = positions[above]
    return positions
