"""Layers on slices of the tokens: sequence parallel and context parallel batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from layline.boundary.layout import BatchVariant
from layline.boundary.rows import StepRows, batch_kind, rank_rows
from layline.layers.forward_batch import ContextRows
from layline.layers.spans import Phase, SequenceSpan
from layline.topology import Topology
from support.layers import (
    HIDDEN,
    NAN,
    Rank,
    assert_close,
    llama,
    on_one,
    on_ranks,
    random_model,
    rows_of,
    span,
)


@pytest.mark.parametrize("attn_tp", [2, 3, 4])
@pytest.mark.parametrize("tokens", [1, 4, 9])
def test_sequence_parallel_layers_gather_and_scatter(
    tmp_path: Path, attn_tp: int, tokens: int
) -> None:
    """Compute arrives and leaves on slices; rows past the real ones are NaN and never read."""
    checkpoint = llama(tmp_path)
    spans = [span(0, tokens)]
    x = rows_of(tokens)

    def whole(rank: Rank) -> list[torch.Tensor]:
        batch = rank.batch(Phase.PREFILL, spans)
        return [rank.attention()(x, batch), rank.mlp()(x, batch)]

    topology = Topology(tp=attn_tp)
    step = StepRows(BatchVariant.SEQUENCE_PARALLEL, ((tokens,),))
    width = -(-tokens // attn_tp)
    padded = torch.full((width * attn_tp, HIDDEN), NAN)
    padded[:tokens] = x

    def work(rank: Rank) -> list[torch.Tensor]:
        here = rank.mesh.topology
        rows = rank_rows(step, here)
        assert (rows.shard, rows.own) == (width, tokens)
        kind = batch_kind(BatchVariant.SEQUENCE_PARALLEL)
        batch = rank.batch(Phase.PREFILL, spans, kind=kind, rows=rows)
        own = padded[here.rank * width : (here.rank + 1) * width]
        return [rank.attention()(own, batch), rank.mlp()(own, batch)]

    wanted = on_one(checkpoint, whole)
    ranks = on_ranks(checkpoint, topology, work, sequence_parallel=True)
    for number, theirs in enumerate(wanted):
        joined = torch.cat([outputs[number] for outputs in ranks])
        assert joined.shape[0] == width * attn_tp
        assert_close(joined[:tokens], theirs)
        # Not even a bias reaches the padding.
        assert not joined[tokens:].any()


def context_case(split: list[list[range]], start: int) -> tuple[list[list[SequenceSpan]], Any]:
    """Each CP rank's spans of the chunk that begins at ``start``, and how rows are joined."""
    spans = [[span(start + part.start, len(part)) for part in parts] for parts in split]
    tokens = [[token for part in parts for token in part] for parts in split]
    width = max(len(own) for own in tokens)
    total = sum(len(own) for own in tokens)
    where = {
        token: rank * width + row
        for rank, own in enumerate(tokens)
        for row, token in enumerate(own)
    }
    return spans, ContextRows(width, torch.tensor([where[token] for token in range(total)]))


CHUNKS = {
    "contiguous": [[[range(4)], [range(4, 7)]], [[range(3)], [range(3, 5)]]],
    "zigzag": [
        [[range(2), range(6, 7)], [range(2, 4), range(4, 6)]],
        [[range(2), range(4, 5)], [range(2, 3), range(3, 4)]],
    ],
    "a rank without rows": [[[range(1)], []], [[], [range(2)]]],
}


@pytest.mark.parametrize("case", CHUNKS)
@pytest.mark.parametrize("attn_tp", [1, 2])
def test_context_parallel_attention(tmp_path: Path, case: str, attn_tp: int) -> None:
    """Two chunks of one prompt: own queries, everyone's keys, and a whole cache on every rank."""
    checkpoint = random_model(tmp_path, num_key_value_heads=4)
    lengths = [sum(len(part) for parts in split for part in parts) for split in CHUNKS[case]]
    starts = [0, lengths[0]]

    def whole(rank: Rank) -> tuple[list[torch.Tensor], torch.Tensor]:
        module = rank.attention()
        outputs = [
            module(
                rows_of(length, seed=start),
                rank.batch(Phase.PREFILL, [span(start, length)]),
            )
            for start, length in zip(starts, lengths, strict=True)
        ]
        assert module.cache is not None
        return outputs, module.cache.read(slice(None))

    def work(rank: Rank) -> tuple[list[torch.Tensor], torch.Tensor]:
        module = rank.attention()
        here = rank.mesh.topology.coordinates.attn_cp
        outputs = []
        for split, start, length in zip(CHUNKS[case], starts, lengths, strict=True):
            spans, context = context_case(split, start)
            written = [span(start, length)]
            kind = batch_kind(BatchVariant.CONTEXT_PARALLEL)
            batch = rank.batch(
                Phase.PREFILL, spans[here], written=written, kind=kind, context_parallel=context
            )
            own = [token for part in split[here] for token in part]
            x = rows_of(length, seed=start)[own]
            if own:
                outputs.append(module(x, batch))
            else:
                outputs.append(module.without_rows(x, batch))
        assert module.cache is not None
        return outputs, module.cache.read(slice(None))

    wanted, cache = on_one(checkpoint, whole)
    topology = Topology(tp=2 * attn_tp, attn_cp=2)
    ranks = on_ranks(checkpoint, topology, work)
    for number, split in enumerate(CHUNKS[case]):
        for cp, parts in enumerate(split):
            own = [token for part in parts for token in part]
            shares = [ranks[cp * attn_tp + t][0][number] for t in range(attn_tp)]
            if own:
                assert_close(torch.stack(shares).sum(0), wanted[number][own])
    for index, (_, held) in enumerate(ranks):
        first = 4 // attn_tp * (index % attn_tp)
        theirs = cache[:, :, first : first + 4 // attn_tp]
        torch.testing.assert_close(held, theirs, equal_nan=True, rtol=1e-4, atol=1e-5)
