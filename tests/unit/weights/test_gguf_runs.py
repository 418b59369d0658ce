"""GGUF files of every architecture and encoding, run by the engine, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_quantized import HALVES
from tiny_gguf import write_gguf

from layline.config import EngineConfig
from layline.engine.model import load_model
from layline.kernels import packed_matmul
from layline.kernels.native.library import native_kernels
from layline.kernels.native.weight import EIGHT
from layline.kernels.packed_matmul import Int4Weight
from layline.layers import linear as linear_module
from layline.weights.quantized import FOUR_BIT, block_layout
from support.families import prompts_of, reference
from support.run import run_greedy
from support.tiny import tiny_model

HIDDEN, HEADS, KV_HEADS, FFN, VOCAB = 256, 4, 2, 512, 208
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
ENCODINGS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")


def gguf_name(name: str) -> str:
    fixed = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
    }
    module, _, kind = name.rpartition(".")
    if module in fixed:
        return f"{fixed[module]}.{kind}"
    _, _, layer, rest = module.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}.{kind}"


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Half-split rotary rows to pairs, the order of the llama architecture in GGUF."""
    shape = (heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return rows.reshape(shape).swapaxes(1, 2).reshape(rows.shape)


def half_split(rows: np.ndarray, heads: int) -> np.ndarray:
    shape = (heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return rows.reshape(shape).swapaxes(1, 2).reshape(rows.shape)


def encode(matrix: np.ndarray, encoding: str, seed: int) -> np.ndarray:
    """Blocks of a matrix; random valid ones for K-quants, which the gguf package cannot make."""
    import gguf

    if not encoding.endswith("_K"):
        return gguf.quants.quantize(matrix, gguf.GGMLQuantizationType[encoding])
    rng = np.random.default_rng(seed)
    layout = block_layout(encoding)
    shape = (matrix.shape[0], matrix.shape[1] // layout.values, layout.bytes)
    blocks = rng.integers(0, 256, shape, dtype=np.uint8)
    typical = {"Q4_K": 2.2e-4, "Q5_K": 1.1e-4, "Q6_K": 5e-5}[encoding]
    for field, offset in enumerate(HALVES[encoding]):
        # The minimum is about half the range, so that weights are centred.
        size = typical * (8 if encoding == "Q4_K" else 16) if field else typical
        halves = np.full((*shape[:2], 1), size, dtype=np.float16)
        blocks[:, :, offset : offset + 2] = halves.view(np.uint8)
    return blocks.reshape(matrix.shape[0], -1)


def build(
    path: Path,
    family: str,
    encoding: str | None,
    tied: bool = True,
    mixed: dict[str, str] | None = None,
) -> Any:
    """Write a GGUF file; returns the transformers model that holds its dequantised weights."""
    import gguf

    model = tiny_model(
        family,
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HIDDEN // HEADS,
        tie_word_embeddings=tied,
        vocab_size=VOCAB,
    )
    arrays, encodings = {}, {}
    for index, (name, parameter) in enumerate(model.named_parameters()):
        heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2])
        permuted = heads if family == "Llama" else None
        array = parameter.detach().numpy()
        if permuted:
            array = interleaved(array, permuted)
        if encoding is not None and array.ndim == 2:
            chosen = (mixed or {}).get(gguf_name(name).split(".")[-2], encoding)
            kind = gguf.GGMLQuantizationType[chosen]
            blocks = encode(np.ascontiguousarray(array), chosen, index)
            arrays[gguf_name(name)], encodings[gguf_name(name)] = blocks, chosen
            array = gguf.quants.dequantize(blocks, kind)
        else:
            arrays[gguf_name(name)] = np.ascontiguousarray(array)
        if permuted:
            array = half_split(array, permuted)
        parameter.data = torch.from_numpy(np.ascontiguousarray(array)).float()
    extra = {
        ".context_length": 64,
        ".embedding_length": HIDDEN,
        ".block_count": 2,
        ".feed_forward_length": FFN,
        ".attention.head_count": HEADS,
        ".attention.head_count_kv": KV_HEADS,
        ".attention.key_length": HIDDEN // HEADS,
        ".attention.value_length": HIDDEN // HEADS,
        ".rope.freq_base": 10000.0,
        "tokenizer.ggml.tokens": [f"t{n}" for n in range(VOCAB)],
        "tokenizer.ggml.token_type": [1] * VOCAB,
        "tokenizer.ggml.merges": ["t 1"],
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.eos_token_id": 2,
    }
    extra["tokenizer.ggml.tokens"][3:6] = ["t", "1", "t1"]
    extra["tokenizer.ggml.tokens"][1] = "one"
    write_gguf(path, arrays, architecture=family.lower(), encodings=encodings, extra=extra)
    return model


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_architectures(tmp_path: Path, family: str, tied: bool) -> None:
    model = build(tmp_path / "m.gguf", family, None, tied)
    prompt = prompts_of((11,))[0]
    logits, ids, _ = run_greedy(EngineConfig(model=str(tmp_path / "m.gguf")), [prompt], 5)
    wanted, wanted_ids = reference(model, prompt, 5)
    assert relative_error(logits[0], wanted) < 1e-4
    assert ids[0] == wanted_ids


@pytest.fixture(params=["auto", "torch"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What multiplies with packed matrices: the native kernels where they work, and torch's."""
    monkeypatch.setenv("LAYLINE_CPU_KERNELS", request.param)
    if request.param == "auto" and native_kernels().library is None:
        pytest.skip(native_kernels().reason)
    return str(request.param)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("family", ["Llama", "Qwen2"])
def test_encodings(tmp_path: Path, family: str, encoding: str, kernels: str) -> None:
    """Exact in float32; by default weights stay packed, at the cost of reduced precision."""
    path = tmp_path / "m.gguf"
    model = build(path, family, encoding)
    prompt = prompts_of((11,))[0]
    wanted, wanted_ids = reference(model, prompt, 6)
    logits, ids, _ = run_greedy(EngineConfig(model=str(path), dtype="float32"), [prompt], 6)
    assert relative_error(logits[0], wanted) < 1e-4
    assert ids[0] == wanted_ids
    packed, _, _ = run_greedy(EngineConfig(model=str(path)), [prompt], 6, [wanted_ids])
    # The native kernels keep Q8_0 and 4-bit blocks as they are; the cache is bfloat16 in all.
    exact = kernels == "auto" and encoding in (*FOUR_BIT, "Q8_0")
    assert 1e-6 < relative_error(packed[0], wanted) < (0.01 if exact else 0.04)
    model = load_model(EngineConfig(model=str(path))).runner.model
    for linear in (
        model.layers[0].self_attn.qkv_proj,
        model.layers[1].mlp.down_proj,
        model.lm_head,
    ):
        assert linear.packed is not None
        assert linear.packed.serves_prefill == (kernels == "auto")
        if kernels == "auto":
            assert linear.weight is None
            assert (linear.packed._matrix.format & EIGHT == 0) == (encoding in FOUR_BIT)
        else:
            assert isinstance(linear.packed, Int4Weight) == (encoding in FOUR_BIT)


@pytest.mark.parametrize("slow_bfloat16", [True, False])
@pytest.mark.parametrize("encoding", ["Q8_0", "Q4_1"])
def test_every_kind_of_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str, slow_bfloat16: bool
) -> None:
    """Without VNNI, with and without AMX: other kernels, the same model."""
    monkeypatch.setenv("LAYLINE_CPU_KERNELS", "torch")
    monkeypatch.setattr(packed_matmul, "has_vnni", lambda: False)
    monkeypatch.setattr(linear_module, "wide_bfloat16_is_slow", lambda: slow_bfloat16)
    path = tmp_path / "m.gguf"
    model = build(path, "Llama", encoding)
    prompt = prompts_of((11,))[0]
    wanted, wanted_ids = reference(model, prompt, 6)
    packed, _, _ = run_greedy(EngineConfig(model=str(path)), [prompt], 6, [wanted_ids])
    assert relative_error(packed[0], wanted) < 0.04


def test_projections_of_different_encodings_are_merged(tmp_path: Path, kernels: str) -> None:
    """As in files that mix Q4_K and Q6_K: the merged matrix is int8, and still the same model."""
    path = tmp_path / "m.gguf"
    mixed = {"attn_v": "Q6_K", "ffn_down": "Q6_K", "token_embd": "Q6_K"}
    model = build(path, "Llama", "Q4_K", mixed=mixed)
    prompt = prompts_of((11,))[0]
    wanted, wanted_ids = reference(model, prompt, 6)
    exact, ids, _ = run_greedy(EngineConfig(model=str(path), dtype="float32"), [prompt], 6)
    assert relative_error(exact[0], wanted) < 1e-4
    assert ids[0] == wanted_ids
    packed, _, _ = run_greedy(EngineConfig(model=str(path)), [prompt], 6, [wanted_ids])
    assert relative_error(packed[0], wanted) < 0.04
    layer = load_model(EngineConfig(model=str(path))).runner.model.layers[0]
    merged, same = layer.self_attn.qkv_proj.packed, layer.mlp.gate_up_proj.packed
    if kernels == "auto":
        assert merged._matrix.format & EIGHT
        assert not same._matrix.format & EIGHT
    else:
        assert not isinstance(merged, Int4Weight)
        assert isinstance(same, Int4Weight)
