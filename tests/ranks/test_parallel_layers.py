"""Layers divided over simulated ranks compute what one rank computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from layline.boundary.exit import ForwardFlags
from layline.layers import parallel
from layline.layers.linear import Linear
from layline.layers.parallel import RowParallelLinear
from layline.layers.spans import MixedPhase, Phase
from layline.topology import Topology
from support.layers import (
    HIDDEN,
    Rank,
    assert_close,
    llama,
    on_one,
    on_ranks,
    random_model,
    rows_of,
    span,
    table_and_head,
)


def attention_run(rank: Rank) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Two prompts in two chunks, decodes, and both in one step; every output and the cache."""
    module = rank.attention()
    steps = [
        (Phase.PREFILL, [span(0, 7), span(0, 4, 6)]),
        (Phase.PREFILL, [span(7, 5), span(4, 3, 6)]),
        (Phase.DECODE, [span(12, 1), span(7, 1, 6)]),
        (MixedPhase(2), [span(13, 1), span(8, 1, 6), span(0, 3, 11, 2), span(0, 2, 13, 2)]),
        (MixedPhase(1), [span(14, 1), span(3, 4, 11, 2)]),
    ]
    outputs = []
    for number, (phase, spans) in enumerate(steps):
        x = rows_of(sum(part.count for part in spans), rank.shards.config.hidden_size, number)
        outputs.append(module(x.to(rank.dtype), rank.batch(phase, spans)))
    assert module.cache is not None
    return outputs, module.cache.read(slice(None))


FITTING = [
    (attn_tp, kv_heads)
    for attn_tp in (1, 2, 3, 4)
    for kv_heads in (12, 4, 3, 2, 1)
    if kv_heads % attn_tp == 0 or attn_tp % kv_heads == 0
]


@pytest.mark.parametrize(("attn_tp", "kv_heads"), FITTING)
@pytest.mark.parametrize("window", [None, 5])
def test_attention_partial_sums_add_up(
    tmp_path: Path, attn_tp: int, kv_heads: int, window: int | None
) -> None:
    slides = {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 0}
    changes = {"num_key_value_heads": kv_heads, **(slides if window else {})}
    checkpoint = random_model(tmp_path, **changes)
    wanted, cache = on_one(checkpoint, attention_run)
    ranks = on_ranks(checkpoint, Topology(tp=attn_tp), attention_run)
    for step, whole in enumerate(wanted):
        parts = [outputs[step] for outputs, _ in ranks]
        assert_close(torch.stack(parts).sum(0), whole)
        if attn_tp > 1:
            assert not torch.allclose(parts[0], whole, rtol=1e-2)
    held = torch.stack([part for _, part in ranks], dim=0)
    for index, part in enumerate(held):
        heads = range(12 // attn_tp * index, 12 // attn_tp * (index + 1))
        used = sorted({head * kv_heads // 12 for head in heads})
        torch.testing.assert_close(part, cache[:, :, used], equal_nan=True, rtol=1e-4, atol=1e-5)


def test_an_output_projection_that_still_reduces_shows_it(tmp_path: Path) -> None:
    checkpoint = random_model(tmp_path)

    def work(rank: Rank) -> list[Any]:
        return [rank.attention().o_proj, rank.mlp().down_proj]

    for o_proj, down_proj in on_ranks(checkpoint, Topology(tp=2), work):
        assert isinstance(o_proj, RowParallelLinear)
        assert (o_proj.reduces, down_proj.reduces) == (False, True)
    # One rank, or one rank's attention, has nothing to sum and no wrapper to call through.
    assert [type(layer) for layer in on_one(checkpoint, work)] == [Linear, Linear]
    for layers in on_ranks(checkpoint, Topology(tp=2, attn_dp=2), work):
        assert [type(layer) for layer in layers] == [Linear, RowParallelLinear]
    for layers in on_ranks(checkpoint, Topology(tp=2, dense_tp=1), work):
        assert [type(layer) for layer in layers] == [RowParallelLinear, Linear]


MESHES = [
    Topology(tp=1),
    Topology(tp=2),
    Topology(tp=3),
    Topology(tp=4),
    Topology(tp=4, attn_dp=2),
    Topology(tp=4, attn_dp=2, attn_cp=2),
]


def mlp_run(rank: Rank) -> torch.Tensor:
    module = rank.mlp()
    batch = rank.batch(Phase.PREFILL, [span(0, 5)])
    output: torch.Tensor = module(rows_of(5), batch)
    return output


@pytest.mark.parametrize("topology", MESHES, ids=lambda t: f"{t.attn_dp}x{t.attn_cp}x{t.attn_tp}")
def test_mlp_sums_over_every_rank(tmp_path: Path, topology: Topology) -> None:
    checkpoint = llama(tmp_path)
    whole = on_one(checkpoint, mlp_run)
    for output in on_ranks(checkpoint, topology, mlp_run):
        assert_close(output, whole)


def test_attention_biases_are_added_once(tmp_path: Path) -> None:
    checkpoint = llama(tmp_path)
    (wanted, _) = on_one(checkpoint, attention_run)
    ranks = on_ranks(checkpoint, Topology(tp=4), attention_run)
    assert_close(torch.stack([outputs[0] for outputs, _ in ranks]).sum(0), wanted[0])

    def biases(rank: Rank) -> tuple[Any, Any]:
        o_proj, down_proj = rank.attention().o_proj, rank.mlp().down_proj
        return (o_proj.linear.bias is not None, down_proj.linear.bias is not None)

    # Attention TP group 0 has ranks 0 and 1; the FFN sums over all four.
    held = on_ranks(checkpoint, Topology(tp=4, attn_dp=2), biases)
    assert held == [(True, True), (False, False), (True, False), (False, False)]


@pytest.mark.parametrize("flag", ["fuse_mlp_allreduce", "mlp_reduce_scatter"])
def test_flags_leave_the_sum_to_the_boundary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: str
) -> None:
    checkpoint = llama(tmp_path)
    whole = on_one(checkpoint, mlp_run)
    monkeypatch.setattr(parallel, "get_forward", lambda: ForwardFlags(**{flag: True}))

    def work(rank: Rank) -> tuple[torch.Tensor, int]:
        return mlp_run(rank), rank.mesh.tally.reductions

    ranks = on_ranks(checkpoint, Topology(tp=3), work)
    assert [sums for _, sums in ranks] == [0, 0, 0]
    assert_close(torch.stack([part for part, _ in ranks]).sum(0), whole)


def test_an_undivided_ffn_computes_alone(tmp_path: Path) -> None:
    """With dense_tp 1 ranks may have different rows, or none, and no collective runs."""
    checkpoint = llama(tmp_path, intermediate_size=97)  # 97 is prime: it could not be divided.

    def work(rank: Rank) -> tuple[torch.Tensor, int]:
        count = rank.mesh.topology.rank
        batch = rank.batch(Phase.PREFILL, [span(0, count)] if count else [], written=[span(0, 1)])
        return rank.mlp()(rows_of(count), batch), rank.mesh.tally.reductions

    def whole(rank: Rank) -> torch.Tensor:
        return rank.mlp()(rows_of(3), rank.batch(Phase.PREFILL, [span(0, 3)]))

    assert rows_of(3)[:2].equal(rows_of(2))
    wanted = on_one(checkpoint, whole)
    for count, (output, sums) in enumerate(on_ranks(checkpoint, Topology(tp=4, dense_tp=1), work)):
        assert sums == 0
        if count:
            assert_close(output, wanted[:count])
        assert output.shape == (count, HIDDEN)


@pytest.mark.parametrize("vocab_size", [199, 200, 5, 7, 1])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("attn_tp", [1, 2, 3, 4])
def test_vocabulary(tmp_path: Path, vocab_size: int, tied: bool, attn_tp: int) -> None:
    """Odd sizes; with 5 ids and four ranks the last one has padding alone."""
    checkpoint = random_model(tmp_path, vocab_size=vocab_size, tie_word_embeddings=tied)
    ids = torch.arange(11) * 7 % vocab_size

    def work(rank: Rank) -> tuple[torch.Tensor, ...]:
        embedding, head = table_and_head(rank)
        none = head(rows_of(0), Phase.DECODE)
        rows = tuple(head(rows_of(count), Phase.DECODE) for count in (1, 3))
        return embedding(ids), embedding(ids[:0]), none, *rows

    def padding(rank: Rank) -> torch.Tensor:
        first, stop = rank.shards.vocabulary
        table = table_and_head(rank)[0].table
        assert table.shape[0] == rank.shards.vocab_rows
        return table[stop - first :]

    wanted = on_one(checkpoint, work)
    assert [part.shape[0] for part in wanted] == [11, 0, 0, 1, 3]
    assert not torch.cat(on_ranks(checkpoint, Topology(tp=attn_tp), padding)).any()
    for held in on_ranks(checkpoint, Topology(tp=attn_tp), work):
        for ours, theirs in zip(held, wanted, strict=True):
            assert ours.shape == theirs.shape
            if theirs.numel():
                assert_close(ours, theirs)
        # A row of the table is on one rank, and the others add zeros.
        assert torch.equal(held[0], wanted[0])


def test_vocabulary_groups_and_sums(tmp_path: Path) -> None:
    """DP ranks embed their own tokens; an embedding may leave its sum."""
    checkpoint = random_model(tmp_path)

    def work(rank: Rank) -> tuple[torch.Tensor, torch.Tensor, int]:
        embedding, _ = table_and_head(rank)
        ids = torch.arange(9) * 22 + rank.mesh.topology.coordinates.attn_dp
        part = embedding.partial(ids)
        before = rank.mesh.tally.reductions
        whole = embedding(ids)
        assert embedding(ids[:0]).shape == (0, HIDDEN)
        assert (before, rank.mesh.tally.reductions) == (0, 1)
        return part, whole, rank.mesh.topology.coordinates.attn_dp

    ranks = on_ranks(checkpoint, Topology(tp=4, attn_dp=2), work)
    for dp in (0, 1):
        mine = [(part, whole) for part, whole, where in ranks if where == dp]
        wanted = on_one(
            checkpoint, lambda r, dp=dp: table_and_head(r)[0](torch.arange(9) * 22 + dp)
        )
        assert torch.equal(mine[0][0] + mine[1][0], wanted)
        assert all(torch.equal(whole, wanted) for _, whole in mine)
        # Each row comes from the one rank that has its id; 199 ids make 100 for the first.
        owners = [part.abs().sum(1) > 0 for part, _ in mine]
        assert torch.equal(owners[0], torch.arange(9) * 22 + dp < 100)
        assert torch.equal(owners[1], ~owners[0])
