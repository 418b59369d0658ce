"""Log-probabilities of tokens that are known: what a model says of a prompt's own text.

The same numbers as those reported of generated tokens: log-softmax of the logits, before any
sampling parameter, over the ids that the tokenizer has.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from layline.layers import sampling_device, sampling_rows
from layline.layers.transfer import upload
from layline.sampling import TokenLogprobs


@dataclass(frozen=True, slots=True)
class KnownToken:
    """The token of one row, how many alternatives to report, and how many ids there are."""

    token_id: int
    top: int
    vocab: int


def known_logprobs(logits: torch.Tensor, known: Sequence[KnownToken]) -> list[TokenLogprobs | None]:
    """Log-probabilities of ``known`` tokens, one for each row of ``logits`` [rows, vocabulary].

    None for a row whose logits hold NaN or +inf, or are all -inf. A token without an id in the
    tokenizer has the probability zero. Waits for the device.
    """
    if logits.device.type == "cpu":
        rows = logits.detach().float()
        return [_on_host(rows[i], one) for i, one in enumerate(known)]
    return _on_device(logits, known) if known else []


def _on_host(row: torch.Tensor, one: KnownToken) -> TokenLogprobs | None:
    logits = row[: one.vocab].contiguous().numpy()
    if not math.isfinite(logits.max()):
        return None
    if one.token_id < one.vocab:
        return sampling_rows.log_probabilities(logits, one.token_id, one.top)
    found = sampling_rows.log_probabilities(logits, 0, one.top)
    return TokenLogprobs(one.token_id, -math.inf, found.top)


def _on_device(logits: torch.Tensor, known: Sequence[KnownToken]) -> list[TokenLogprobs | None]:
    device, width = logits.device, max(one.vocab for one in known)
    scores = logits[:, :width].detach().float()
    widths = upload(np.array([one.vocab for one in known]), device)
    ids = upload(np.array([one.token_id for one in known]), device)
    outside = torch.arange(width, device=device)[None, :] >= widths[:, None]
    scores = scores.masked_fill(outside, -math.inf)
    log_total = sampling_device.log_total(scores)
    peaks = scores.amax(dim=-1)
    chosen = scores.gather(1, ids.clamp_max(width - 1)[:, None]) - log_total
    most = min(max(one.top for one in known), width)
    top_logits, top_ids = sampling_device.best(scores, most)
    columns = (peaks, chosen.squeeze(1), top_ids, top_logits - log_total)
    found: list[TokenLogprobs | None] = []
    for one, peak, value, best_ids, best in zip(known, *(c.tolist() for c in columns), strict=True):
        if not math.isfinite(peak):
            found.append(None)
            continue
        pairs = zip(best_ids[: one.top], best[: one.top], strict=True)
        top = tuple(pair for pair in pairs if pair[1] != -math.inf)
        found.append(
            TokenLogprobs(one.token_id, value if one.token_id < one.vocab else -math.inf, top)
        )
    return found
