"""Quantised layers divided over simulated ranks stay close to one rank."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from layline.layers.spans import Phase
from layline.topology import Topology
from layline.weights.checkpoint import Checkpoint
from layline.weights.opening import open_checkpoint
from support.layers import (
    CONTEXT,
    Rank,
    assert_close,
    on_one,
    on_ranks,
    rows_of,
    span,
    table_and_head,
)


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


@pytest.mark.parametrize(
    "topology", [Topology(tp=2, attn_dp=2), Topology(tp=3), Topology(tp=9, dense_tp=1)]
)
def test_what_ranks_exchange_has_one_dtype_in_every_phase(
    tmp_path: Path, topology: Topology
) -> None:
    """One DP rank may prefill while another decodes and a third has no rows."""
    checkpoint = quantised_model(tmp_path / "model.gguf", QUANTISED["SmolLM2's heads, Q8_0"])

    def work(rank: Rank) -> set[torch.dtype]:
        attention, mlp = rank.attention(), rank.mlp()
        prefill = rank.batch(Phase.PREFILL, [span(0, 5)], ffn_phase=Phase.PREFILL)
        decode = rank.batch(Phase.DECODE, [span(5, 1)], ffn_phase=Phase.DECODE)
        x = rows_of(5, 96).to(torch.bfloat16)
        outputs = [attention(x, prefill), attention(x[:1], decode)]
        outputs += [mlp(x, prefill), mlp(x[:1], decode), attention.without_rows(x[:0], decode)]
        return {output.dtype for output in outputs}

    assert all(
        held == {torch.float32} for held in on_ranks(checkpoint, topology, work, packed=True)
    )
