"""One layer's modules on simulated ranks, and on one, with hand-made steps."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from layline.boundary.mesh import Mesh, MeshSpec, make_mesh
from layline.comm.simulated import run_ranks
from layline.layers import parallel
from layline.layers.attention import TorchAttention
from layline.layers.cache_slots import slot_numbers
from layline.layers.decode_attention import PaddedDecode
from layline.layers.forward_batch import ForwardBatch
from layline.layers.kv_cache import PlainCache
from layline.layers.parallel import ParallelHead, VocabParallelEmbedding
from layline.layers.spans import Phase, SequenceSpan
from layline.models.decoder import GatedMLP, SelfAttention
from layline.models.loader import LoadTarget, ModelLoader, TiedTable
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
        self.backend = TorchAttention(BLOCK, CPU, PaddedDecode(BLOCK, CPU, self.dtype))
        config = self.shards.config
        self.rotary = self.loader.rotary(config.rope, config.head_dim)

    def attention(self) -> SelfAttention:
        module = SelfAttention(self.shards, 0, self.loader, self.backend, self.mesh)
        heads, size = self.shards.num_kv_heads, self.shards.config.head_dim
        rows = torch.full((SLOTS, 2, heads, size), NAN, dtype=self.dtype)
        rows[:BLOCK] = 0
        module.cache = PlainCache(rows)
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


def llama(directory: Path, **changes: Any) -> Checkpoint:
    """Every linear layer has a bias."""
    architectures = ["LlamaForCausalLM"]
    return random_model(directory, architectures=architectures, mlp_bias=True, **changes)


def table_and_head(rank: Rank) -> tuple[Any, Any]:
    """The embedding and head as the decoder builds them."""
    shards, loader = rank.shards, rank.loader
    config = shards.config
    region = Region((config.vocab_size, config.hidden_size), rows=shards.vocabulary)
    embedding = loader.embedding("model.embed_tokens", region, shards.vocab_rows)
    tied = TiedTable("model.embed_tokens", embedding, config.tied_head)
    head = loader.head("lm_head", tied, region, shards.vocab_rows)
    group = parallel.compute_group(rank.mesh, GroupName.ATTN_TP)
    if group is None:
        return embedding, head
    return (
        VocabParallelEmbedding(embedding, shards.vocabulary, group),
        ParallelHead(head, config.vocab_size, group),
    )
