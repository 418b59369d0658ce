"""From logits to token ids: edits, filters and draws for a batch of unrelated requests.

Order, for each row, in float32:

1. banned ids (among them end and stop ids before ``min_tokens``) become -inf; then logit bias
2. repetition penalty over prompt and output, then frequency and presence penalty over the output;
   ids that the request's grammar does not allow become -inf
3. temperature; below 1e-5 the row ends here with its most likely id
4. top-k, 5. top-p among what top-k left, 6. min-p relative to the most likely id
7. the draw: ids ascending, inverse of the cumulative distribution at ``uniform(seed, step)``

Steps 2 to 6 are in the order of transformers' generate() and give its distributions, except that
equal logits at the edge of top-k or top-p are cut by ascending id, where transformers keeps every
equal of top-k. vLLM differs in applying min-p before top-k and top-p. Penalties and bias mean what
the OpenAI API and vLLM document. Filters count probabilities in steps of 2**-40 of the largest.

Reported log-probabilities are those of the model: log-softmax of the logits before step 1, over
the ids the tokenizer has (the default of vLLM), so they do not change with sampling parameters.

A row's token is a function of its logits and its ``RowState`` alone. On the CPU rows are drawn one
by one in NumPy; elsewhere in one batch that never waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from layline.errors import RunError
from layline.layers import sampling_device, sampling_rows
from layline.layers.sampling_state import RowState
from layline.layers.transfer import Download, upload
from layline.sampling import TokenLogprobs
from layline.text.constraint import PackedIds

NO_FINITE_LOGIT = (
    "no token to sample: its logits hold NaN or +inf, or every id is banned; expected at least one "
    "finite logit"
)
"""What is wrong with a row whose token is -1."""


class SampledBatch:
    """One token per row, perhaps still being computed.

    ``token_ids`` is int64 [rows] on the logits' device; -1 stands for a row without any token,
    which fails alone: the others have theirs.
    """

    def __init__(
        self, token_ids: torch.Tensor, read_logprobs: Callable[[], list[TokenLogprobs | None]]
    ) -> None:
        self.token_ids = token_ids
        # From here on: the host may read the ids while the device is busy with a later step.
        self._arriving = Download(token_ids)
        self._read_logprobs = read_logprobs
        self._ids: list[int] | None = None
        self._logprobs: list[TokenLogprobs | None] | None = None

    @property
    def outcomes(self) -> list[int]:
        """The token ids on the host, -1 for none; waits for the device the first time."""
        if self._ids is None:
            self._ids = self._arriving.wait()[0].tolist()
        return self._ids

    def read(self) -> list[int]:
        """The token ids on the host, every row having one.

        Raises:
            RunError: a row has no token, because its logits hold NaN or +inf or all are -inf.
        """
        ids = self.outcomes
        for row, token_id in enumerate(ids):
            if token_id < 0:
                raise RunError(f"row {row} of {len(ids)} has {NO_FINITE_LOGIT}")
        return ids

    @property
    def logprobs(self) -> list[TokenLogprobs | None]:
        """Per row what ``SamplingParams.logprobs`` asked for; waits for the device the first time.

        None for a row without a token.
        """
        if self._logprobs is None:
            self._logprobs = self._read_logprobs()
        return self._logprobs


class Sampler:
    """Chooses each row's next token. Stateless: what a request remembers is in its RowState.

    ``batched`` picks torch for the whole batch (True) or NumPy row by row (False, CPU only); by
    default accelerators use the first and the CPU the second. Both give the same tokens.
    """

    def __init__(self, *, batched: bool | None = None) -> None:
        self._batched = batched

    def sample(self, logits: torch.Tensor, rows: Sequence[RowState]) -> SampledBatch:
        """Choose one token for every row.

        Args:
            logits: [rows, vocab] in any floating dtype; not modified.
            rows: the requests, in the order of the logits' rows.
        Raises:
            RunError: the shapes do not fit together.
        """
        _check_shapes(logits, rows)
        if not rows:
            empty = torch.empty(0, dtype=torch.int64, device=logits.device)
            return SampledBatch(empty, list)
        on_cpu = logits.device.type == "cpu"
        batched = not on_cpu if self._batched is None else self._batched
        with torch.no_grad():
            # Columns past the tokenizer's vocabulary are never looked at.
            width = max(row.valid_vocab for row in rows)
            raw = logits if width == logits.shape[1] else logits[:, :width]
            if batched:
                token_ids = _choose_batched(raw, rows)
                return SampledBatch(token_ids, _logprob_reader(raw, token_ids, rows))
            token_ids = _choose_by_row(raw, rows)
            logprobs = _logprobs_by_row(raw, token_ids.tolist(), rows)
            return SampledBatch(token_ids, lambda: logprobs)


def _check_shapes(logits: torch.Tensor, rows: Sequence[RowState]) -> None:
    if logits.dim() != 2 or not logits.is_floating_point() or logits.shape[0] != len(rows):
        raise RunError(
            f"logits of shape {list(logits.shape)} and {logits.dtype} for {len(rows)} rows; "
            "expected [rows, vocab] in a floating dtype"
        )
    for index, row in enumerate(rows):
        if not 0 < row.valid_vocab <= logits.shape[1]:
            raise RunError(
                f"row {index} may use {row.valid_vocab} ids but the logits have "
                f"{logits.shape[1]} columns; expected 1 to {logits.shape[1]}"
            )


def _choose_by_row(raw: torch.Tensor, rows: Sequence[RowState]) -> torch.Tensor:
    edited = [i for i, row in enumerate(rows) if _is_edited(row, raw.shape[1])]
    # The caller's float32 logits are copied only if something is written into them.
    logits = raw.detach().to(torch.float32, copy=bool(edited)).contiguous()
    if edited:
        _edit(logits, rows, edited)
    table = logits.numpy()
    ids = [
        sampling_rows.greedy(table[i])
        if row.params.is_greedy
        else sampling_rows.draw(table[i], row.params, row.uniform())
        for i, row in enumerate(rows)
    ]
    return torch.tensor(ids, dtype=torch.int64)


def _choose_batched(raw: torch.Tensor, rows: Sequence[RowState]) -> torch.Tensor:
    edited = [i for i, row in enumerate(rows) if _is_edited(row, raw.shape[1])]
    drawn = [i for i, row in enumerate(rows) if not row.params.is_greedy]
    logits = raw.detach()
    if edited:
        logits = logits.to(torch.float32, copy=True).contiguous()
        _edit(logits, rows, edited)
    if not drawn:
        return sampling_device.greedy(logits)
    if len(drawn) == len(rows):
        return sampling_device.draw(logits.float(), rows)
    index = upload(np.array(drawn), logits.device)
    token_ids = sampling_device.greedy(logits)
    picked = sampling_device.draw(
        logits.index_select(0, index).float(), [rows[position] for position in drawn]
    )
    return token_ids.index_copy_(0, index, picked)


def _is_edited(row: RowState, width: int) -> bool:
    return row.edits_logits or row.valid_vocab < width


def _edit(logits: torch.Tensor, rows: Sequence[RowState], edited: Sequence[int]) -> None:
    """Write bans, bias and penalties into float32 logits [rows, vocab], touching only their ids.

    What a row's grammar does not allow becomes -inf as well.
    """
    width = logits.shape[1]
    flat = logits.view(-1)
    banned, biased, seen = [], [], []
    biases, offsets, repetitions = [], [], []
    for i in edited:
        row = rows[i]
        if row.valid_vocab < width:
            logits[i, row.valid_vocab :] = -torch.inf
        if len(row.banned):
            banned.append(row.banned + i * width)
        if len(row.bias_ids):
            biased.append(row.bias_ids + i * width)
            biases.append(row.bias_values)
        if row.seen is not None:
            ids, offset = row.penalties()
            seen.append(ids + i * width)
            offsets.append(offset)
            repetitions.append(np.full(len(ids), row.params.repetition_penalty, np.float32))
    device = logits.device
    # Positions are distinct, so these writes have one outcome in whatever order they land.
    if banned:
        flat.index_fill_(0, upload(np.concatenate(banned), device), -torch.inf)
    if biased:
        index = upload(np.concatenate(biased), device)
        flat.index_copy_(0, index, flat[index] + upload(np.concatenate(biases), device))
    if seen:
        index = upload(np.concatenate(seen), device)
        repetition = upload(np.concatenate(repetitions), device)
        values = flat[index]
        values = torch.where(values > 0, values / repetition, values * repetition)
        flat.index_copy_(0, index, values - upload(np.concatenate(offsets), device))
    _forbid(logits, [(i, packed) for i in edited if (packed := rows[i].allowed) is not None])


def _forbid(logits: torch.Tensor, allowed: Sequence[tuple[int, PackedIds]]) -> None:
    """Make -inf of every id whose bit is not set, in the rows that are named with their bits."""
    if not allowed:
        return
    width = logits.shape[1]
    packed = np.zeros((len(allowed), (width + 7) // 8), dtype=np.uint8)
    for row, (_, bits) in zip(packed, allowed, strict=True):
        row[: len(bits)] = bits[: len(row)]
    device = logits.device
    index = upload(np.array([i for i, _ in allowed]), device)
    shifts = torch.arange(8, dtype=torch.uint8, device=device)
    # An eighth of the bytes travels, and is spread out where the logits are.
    bits_G8 = (upload(packed, device).unsqueeze(-1) >> shifts) & 1
    forbidden = bits_G8.flatten(1)[:, :width] == 0
    logits.index_copy_(0, index, logits.index_select(0, index).masked_fill_(forbidden, -torch.inf))


def _logprobs_by_row(
    raw: torch.Tensor, ids: Sequence[int], rows: Sequence[RowState]
) -> list[TokenLogprobs | None]:
    result: list[TokenLogprobs | None] = [None] * len(rows)
    for i, row in enumerate(rows):
        if row.params.logprobs is not None and ids[i] >= 0:
            logits = raw[i, : row.valid_vocab].detach().float().contiguous().numpy()
            result[i] = sampling_rows.log_probabilities(logits, ids[i], row.params.logprobs)
    return result


def _logprob_reader(
    raw: torch.Tensor, token_ids: torch.Tensor, rows: Sequence[RowState]
) -> Callable[[], list[TokenLogprobs | None]]:
    """Queue the log-probabilities that rows ask for; the result turns them into Python floats."""
    asked = [(i, row.params.logprobs) for i, row in enumerate(rows)]
    wanted = [(i, top) for i, top in asked if top is not None]
    if not wanted:
        return lambda: [None] * len(rows)
    index = upload(np.array([i for i, _ in wanted]), raw.device)
    logits = raw.detach().index_select(0, index).float()
    for position, (i, _) in enumerate(wanted):
        if rows[i].valid_vocab < raw.shape[1]:
            logits[position, rows[i].valid_vocab :] = -torch.inf
    log_total = sampling_device.log_total(logits)
    # Of a row without a token nothing is reported; any valid position will do.
    chosen = logits.gather(1, token_ids[index].clamp_min(0).unsqueeze(1)) - log_total
    most = min(max(top for _, top in wanted), raw.shape[1])
    top_logits, top_ids = sampling_device.best(logits, most)
    arriving = Download(token_ids, chosen, top_ids, top_logits - log_total)

    def read() -> list[TokenLogprobs | None]:
        result: list[TokenLogprobs | None] = [None] * len(rows)
        ids, *columns = [each.tolist() for each in arriving.wait()]
        for (i, top), (value,), best_ids, best in zip(wanted, *columns, strict=True):
            if ids[i] < 0:
                continue
            pairs = zip(best_ids[:top], best[:top], strict=True)
            possible = tuple(pair for pair in pairs if pair[1] != -math.inf)
            result[i] = TokenLogprobs(ids[i], value, possible)
        return result

    return read
