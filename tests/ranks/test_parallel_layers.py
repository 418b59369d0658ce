"""Layers divided over simulated ranks compute what one rank computes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from layline.boundary.exit import ForwardFlags
from layline.boundary.layout import BatchVariant
from layline.boundary.mesh import Mesh, MeshSpec, make_mesh
from layline.boundary.rows import StepRows, batch_kind, rank_rows
from layline.comm.simulated import run_ranks
from layline.layers import parallel
from layline.layers.attention import TorchAttention, slot_numbers
from layline.layers.forward_batch import ContextRows, ForwardBatch
from layline.layers.linear import Linear
from layline.layers.parallel import ParallelHead, RowParallelLinear, VocabParallelEmbedding
from layline.layers.spans import Phase, SequenceSpan
from layline.models.decoder import GatedMLP, SelfAttention
from layline.models.loader import LoadTarget, ModelLoader
from layline.models.parallel import Shards
from layline.models.registry import family_of
from layline.topology import GroupName, Topology
from layline.weights.checkpoint import Checkpoint, Region
from layline.weights.opening import open_checkpoint

BLOCK, SLOTS, CONTEXT = 4, 64, 64
CPU = torch.device("cpu")
NAN = float("nan")
HIDDEN = 48


@dataclass
class Rank:
    """One rank's end of a mesh, and what it loads from."""

    checkpoint: Checkpoint
    mesh: Mesh
    packed: bool = False

    def __post_init__(self) -> None:
        config = self.checkpoint.config
        self.shards = Shards(family_of(config).parse(config), self.mesh.topology)
        self.dtype = torch.bfloat16 if self.packed else torch.float32
        target = LoadTarget(device=CPU, dtype=self.dtype, packed=self.packed, max_position=CONTEXT)
        self.loader = ModelLoader(self.checkpoint, target)
        self.backend = TorchAttention(BLOCK, CPU, self.dtype)
        config = self.shards.config
        self.rotary = self.loader.rotary(config.rope, config.head_dim)

    def attention(self) -> SelfAttention:
        module = SelfAttention(self.shards, 0, self.loader, self.backend, self.mesh)
        heads, size = self.shards.num_kv_heads, self.shards.config.head_dim
        module.cache = torch.full((SLOTS, 2, heads, size), NAN, dtype=self.dtype)
        module.cache[:BLOCK] = 0
        return module

    def mlp(self) -> GatedMLP:
        return GatedMLP(self.shards, 0, self.loader, self.mesh)

    def batch(self, phase: Phase, spans: list[SequenceSpan], **facts: Any) -> ForwardBatch:
        """A batch whose rows are the spans' tokens, all of which are written."""
        tokens = [np.arange(span.start, span.length) for span in spans]
        positions = torch.from_numpy(np.concatenate([*tokens, np.zeros(0, dtype=np.int64)]))
        written = facts.pop("written", spans)
        numbers = [slot_numbers(span, span.start, span.length, BLOCK) for span in written]
        cos, sin = self.rotary(positions, None)
        windows = frozenset(self.shards.config.windows)
        if self.packed and phase is Phase.DECODE:
            cos, sin = cos.to(torch.bfloat16), sin.to(torch.bfloat16)
        return ForwardBatch(
            phase=phase,
            rope_cos=cos,
            rope_sin=sin,
            slots=torch.from_numpy(np.concatenate(numbers)),
            attention=self.backend.plan(phase, spans, windows),
            **facts,
        )


def random_model(directory: Path, **changes: Any) -> Checkpoint:
    """Random weights of one layer; biases and head norms unless ``changes`` say otherwise."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 199,
        "hidden_size": HIDDEN,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "head_dim": 8,
        "max_position_embeddings": CONTEXT,
        "attention_bias": True,
        **changes,
    }
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return open_checkpoint(f"config:{directory}")


def on_ranks(
    checkpoint: Checkpoint,
    topology: Topology,
    work: Callable[[Rank], Any],
    packed: bool = False,
    **spec: Any,
) -> list[Any]:
    """What ``work`` returns on every rank; layers are built inside it."""

    def rank(here: Topology, groups: Any) -> Any:
        mesh = make_mesh(MeshSpec(topology=here, **spec), groups)
        with torch.inference_mode():
            return work(Rank(checkpoint, mesh, packed))

    return run_ranks(topology, rank)


def on_one(checkpoint: Checkpoint, work: Callable[[Rank], Any], packed: bool = False) -> Any:
    with torch.inference_mode():
        return work(Rank(checkpoint, Mesh(), packed))


def rows_of(count: int, columns: int = HIDDEN, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, columns, generator=torch.Generator().manual_seed(seed))


def assert_close(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float = 1e-5) -> None:
    assert ours.shape == theirs.shape
    assert (ours.float() - theirs.float()).abs().max() <= tolerance * theirs.float().abs().max()


def span(start: int, count: int, first_block: int = 1, blocks: int = 5) -> SequenceSpan:
    return SequenceSpan(start, count, list(range(first_block, first_block + blocks)), start + count)


def attention_run(rank: Rank) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Two prompts in two chunks, then a decode step; every output and the cache."""
    module = rank.attention()
    steps = [
        (Phase.PREFILL, [span(0, 7), span(0, 4, 6)]),
        (Phase.PREFILL, [span(7, 5), span(4, 3, 6)]),
        (Phase.DECODE, [span(12, 1), span(7, 1, 6)]),
    ]
    outputs = []
    for number, (phase, spans) in enumerate(steps):
        x = rows_of(sum(part.count for part in spans), rank.shards.config.hidden_size, number)
        outputs.append(module(x.to(rank.dtype), rank.batch(phase, spans)))
    assert module.cache is not None
    return outputs, module.cache


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


def llama(directory: Path, **changes: Any) -> Checkpoint:
    """Every linear layer has a bias."""
    architectures = ["LlamaForCausalLM"]
    return random_model(directory, architectures=architectures, mlp_bias=True, **changes)


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


def table_and_head(rank: Rank) -> tuple[Any, Any]:
    """The embedding and head as the decoder builds them."""
    shards, loader = rank.shards, rank.loader
    config = shards.config
    region = Region((config.vocab_size, config.hidden_size), rows=shards.vocabulary)
    embedding = loader.embedding("model.embed_tokens", region, shards.vocab_rows)
    head = loader.head("lm_head", embedding, region, shards.vocab_rows, config.tied_head)
    group = parallel.compute_group(rank.mesh, GroupName.ATTN_TP)
    if group is None:
        return embedding, head
    return (
        VocabParallelEmbedding(embedding, shards.vocabulary, group),
        ParallelHead(head, config.vocab_size, group),
    )


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
        return outputs, module.cache

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
                module.join_context(None, batch)
                outputs.append(x)
        assert module.cache is not None
        return outputs, module.cache

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


@dataclass(frozen=True)
class Quantised:
    """A model of one layer and the degree it is divided by."""

    encoding: str
    hidden: int
    heads: tuple[int, int]
    head_dim: int
    tp: int
    aligned: bool


def blocks_of(matrix: np.ndarray, encoding: str) -> np.ndarray:
    """Encoded rows; random valid blocks for Q4_K, which the gguf package cannot make."""
    import gguf

    if encoding != "Q4_K":
        return gguf.quants.quantize(matrix, gguf.GGMLQuantizationType[encoding])
    blocks = np.random.default_rng(matrix.size).integers(
        0, 256, (matrix.size // 256, 144), np.uint8
    )
    # Scale and minimum of a block: values are about centred, with a small spread.
    blocks[:, :4] = np.array([2.2e-4, 1.8e-3], dtype=np.float16).view(np.uint8)
    return blocks.reshape(matrix.shape[0], -1)


def quantised_model(path: Path, case: Quantised) -> Checkpoint:
    import gguf

    vocab, hidden, ffn = 97, case.hidden, case.hidden * (1 if case.encoding == "Q4_K" else 2)
    heads, head_dim, encoding = case.heads, case.head_dim, case.encoding
    rng = np.random.default_rng(4)
    shapes = {
        "token_embd": (vocab, hidden),
        "blk.0.attn_q": (heads[0] * head_dim, hidden),
        "blk.0.attn_k": (heads[1] * head_dim, hidden),
        "blk.0.attn_v": (heads[1] * head_dim, hidden),
        "blk.0.attn_output": (hidden, heads[0] * head_dim),
        "blk.0.ffn_gate": (ffn, hidden),
        "blk.0.ffn_up": (ffn, hidden),
        "blk.0.ffn_down": (hidden, ffn),
    }
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(ffn)
    writer.add_head_count(heads[0])
    writer.add_head_count_kv(heads[1])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    kind = gguf.GGMLQuantizationType[encoding]
    for name, shape in shapes.items():
        matrix = rng.normal(0, shape[1] ** -0.5, shape).astype(np.float32)
        writer.add_tensor(f"{name}.weight", blocks_of(matrix, encoding), raw_dtype=kind)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(hidden, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return open_checkpoint(path)


QUANTISED = {
    # Columns of the output and down projections on a rank: whole blocks, or not.
    "SmolLM2's heads, Q8_0": Quantised("Q8_0", 96, (9, 3), 32, 3, True),
    "SmolLM2's heads, Q4_1": Quantised("Q4_1", 96, (9, 3), 32, 3, True),
    "off blocks of 32": Quantised("Q8_0", 96, (6, 2), 16, 2, False),
    "off blocks of 256": Quantised("Q4_K", 256, (8, 2), 32, 2, False),
}


@pytest.mark.parametrize("case", QUANTISED.values(), ids=QUANTISED)
def test_quantised_layers_stay_close_to_one_rank(tmp_path: Path, case: Quantised) -> None:
    checkpoint = quantised_model(tmp_path / "model.gguf", case)
    ids = torch.tensor([0, 96, 33, 32, 64, 65])

    def work(rank: Rank) -> dict[str, torch.Tensor]:
        attention, mlp = rank.attention(), rank.mlp()
        projection = getattr(attention.o_proj, "linear", attention.o_proj)
        assert (projection.packed is not None) == (case.aligned or rank.mesh.is_single)
        assert attention.qkv_proj.packed is not None
        embedding, head = table_and_head(rank)
        x = rows_of(2, case.hidden).to(torch.bfloat16)
        results = {"embedding": embedding(ids), "head": head(x, Phase.DECODE)}
        prompt, decode = [span(0, 5), span(0, 3, 6)], [span(5, 1), span(3, 1, 6)]
        prefill = attention(
            rows_of(8, case.hidden).to(torch.bfloat16), rank.batch(Phase.PREFILL, prompt)
        )
        batch = rank.batch(Phase.DECODE, decode)
        return {
            **results,
            "prefill": prefill,
            "decode": attention(x, batch),
            "mlp": mlp(x, batch),
        }

    wanted = on_one(checkpoint, work, packed=True)
    ranks = on_ranks(checkpoint, Topology(tp=case.tp), work, packed=True)
    for held in ranks:
        assert torch.equal(held["embedding"], wanted["embedding"])
        assert_close(held["head"], wanted["head"], 1e-2)
        assert_close(held["mlp"], wanted["mlp"], 3e-2)
        # Partial sums travel in the residual's dtype, whatever each rank's kernel returned.
        assert {held[name].dtype for name in ("prefill", "decode", "mlp")} == {torch.float32}
    for name in ("prefill", "decode"):
        assert_close(torch.stack([held[name] for held in ranks]).sum(0), wanted[name], 3e-2)
