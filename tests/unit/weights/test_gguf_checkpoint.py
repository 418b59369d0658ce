"""GGUF files as checkpoints: names, configuration, row order, values."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_quantized import random_blocks
from tiny_gguf import FFN, HEAD_DIM, HEADS, HIDDEN, KV_HEADS, VOCAB, tiny_arrays, write_gguf

from layline.errors import (
    CheckpointError,
    CorruptFileError,
    TensorError,
    UnsupportedFormatError,
    UnsupportedModelError,
)
from layline.weights.gguf_checkpoint import GGUFCheckpoint
from layline.weights.opening import open_checkpoint
from layline.weights.quantized import QuantizedTensor, supported_encodings


def opened(tmp_path: Path, *args: Any, **options: Any) -> GGUFCheckpoint:
    return GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", *args, **options))


def half_split_rows(array: np.ndarray, heads: int) -> np.ndarray:
    """The stored rows in Hugging Face's order, written out one row at a time."""
    rows = []
    size = array.shape[0] // heads
    for head in range(heads):
        for part in (0, 1):
            rows += [array[head * size + 2 * pair + part] for pair in range(size // 2)]
    return np.stack(rows)


def test_names_and_shapes(tmp_path: Path) -> None:
    arrays = tiny_arrays(tied=False, bias=True, qk_norm=True)
    arrays["rope_freqs.weight"] = np.ones(HEAD_DIM // 2, dtype=np.float32)
    arrays["blk.0.something_else.weight"] = np.ones(4, dtype=np.float32)
    checkpoint = opened(tmp_path, arrays, architecture="qwen3")
    layer = "model.layers.0."
    q_rows, kv_rows = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    assert {name: info.shape for name, info in checkpoint.infos().items()} == {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "lm_head.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        layer + "input_layernorm.weight": (HIDDEN,),
        layer + "post_attention_layernorm.weight": (HIDDEN,),
        layer + "self_attn.q_proj.weight": (q_rows, HIDDEN),
        layer + "self_attn.k_proj.weight": (kv_rows, HIDDEN),
        layer + "self_attn.v_proj.weight": (kv_rows, HIDDEN),
        layer + "self_attn.o_proj.weight": (HIDDEN, q_rows),
        layer + "self_attn.q_proj.bias": (q_rows,),
        layer + "self_attn.k_proj.bias": (kv_rows,),
        layer + "self_attn.v_proj.bias": (kv_rows,),
        layer + "self_attn.q_norm.weight": (HEAD_DIM,),
        layer + "self_attn.k_norm.weight": (HEAD_DIM,),
        layer + "mlp.gate_proj.weight": (FFN, HIDDEN),
        layer + "mlp.up_proj.weight": (FFN, HIDDEN),
        layer + "mlp.down_proj.weight": (HIDDEN, FFN),
        "rope_freqs.weight": (HEAD_DIM // 2,),
        "blk.0.something_else.weight": (4,),
    }
    info = checkpoint.infos()["lm_head.weight"]
    assert (info.encoding, info.file, info.name) == ("F32", checkpoint.path, "lm_head.weight")


def test_config_and_generation(tmp_path: Path) -> None:
    checkpoint = opened(tmp_path, extra={"tokenizer.ggml.eot_token_id": 5})
    assert checkpoint.kind == "gguf"
    assert checkpoint.config == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HIDDEN // HEADS,
        "hidden_act": "silu",
        "max_position_embeddings": 128,
        "rms_norm_eps": pytest.approx(1e-5),
        "vocab_size": VOCAB,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
        "eos_token_id": 2,
    }
    assert checkpoint.generation == {"eos_token_id": [2, 5]}
    source = checkpoint.vocabulary()
    assert source.directory is None
    assert source.gguf_metadata is not None
    assert source.gguf_metadata["tokenizer.ggml.tokens"][3] == "tok\u00e93"


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_rows_are_reordered_for_llama_only(tmp_path: Path, architecture: str) -> None:
    arrays = tiny_arrays(bias=True)
    checkpoint = opened(tmp_path, arrays, architecture=architecture)
    for letter, heads in (("q", HEADS), ("k", KV_HEADS), ("v", None)):
        for suffix in ("weight", "bias"):
            expected = arrays[f"blk.0.attn_{letter}.{suffix}"]
            if architecture == "llama" and heads is not None:
                expected = half_split_rows(expected, heads)
            name = f"model.layers.0.self_attn.{letter}_proj.{suffix}"
            assert torch.equal(checkpoint.read(name), torch.from_numpy(expected))
            out = torch.empty(expected.shape)
            checkpoint.read_into(name, out)
            assert torch.equal(out, torch.from_numpy(expected))


def test_reordering_matches_the_rule_converters_use(tmp_path: Path) -> None:
    # Converters reshape each head to [2, half], swap the two and flatten.
    original = tiny_arrays()["blk.0.attn_q.weight"]
    shaped = original.reshape(HEADS, 2, HEAD_DIM // 2, HIDDEN).swapaxes(1, 2)
    stored = np.ascontiguousarray(shaped.reshape(original.shape))
    checkpoint = opened(tmp_path, {**tiny_arrays(), "blk.0.attn_q.weight": stored})
    found = checkpoint.read("model.layers.0.self_attn.q_proj.weight")
    assert torch.equal(found, torch.from_numpy(original))


@pytest.mark.parametrize("encoding", supported_encodings())
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_quantised_tensors_stay_quantised_until_asked(
    tmp_path: Path, encoding: str, architecture: str
) -> None:
    from gguf import GGMLQuantizationType, quants

    hidden = 256
    blocks = {
        "blk.0.attn_q.weight": random_blocks(encoding, HEADS * HEAD_DIM, hidden),
        "token_embd.weight": random_blocks(encoding, VOCAB, hidden, seed=1),
    }
    arrays = {**tiny_arrays(), **blocks}
    options = {"architecture": architecture, "encodings": dict.fromkeys(blocks, encoding)}
    extra = {".embedding_length": hidden, ".attention.key_length": HEAD_DIM}
    extra[".attention.value_length"] = HEAD_DIM
    checkpoint = opened(tmp_path, arrays, extra=extra, **options)
    for stored_name, heads in (("token_embd", None), ("blk.0.attn_q", HEADS)):
        name = {"token_embd": "model.embed_tokens.weight"}.get(
            stored_name, "model.layers.0.self_attn.q_proj.weight"
        )
        packed = blocks[f"{stored_name}.weight"]
        expected = quants.dequantize(packed, GGMLQuantizationType[encoding])
        if heads and architecture == "llama":
            expected = half_split_rows(expected, heads)
        value = checkpoint.read(name)
        assert isinstance(value, QuantizedTensor)
        assert value.encoding == encoding == checkpoint.infos()[name].encoding
        assert torch.equal(value.dequantize(torch.float32), torch.from_numpy(expected))
        out = torch.empty(expected.shape, dtype=torch.bfloat16)
        checkpoint.read_into(name, out)
        assert torch.equal(out, torch.from_numpy(expected).bfloat16())


@pytest.mark.parametrize("encoding", ["F16", "BF16", "F32"])
def test_plain_tensors_are_views_and_convert(tmp_path: Path, encoding: str) -> None:
    arrays = tiny_arrays()
    name, stored = "model.layers.0.mlp.up_proj.weight", arrays["blk.0.ffn_up.weight"]
    dtype = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}[encoding]
    checkpoint = opened(tmp_path, arrays, encodings={"blk.0.ffn_up.weight": encoding})
    value = checkpoint.read(name)
    expected = torch.from_numpy(stored).to(dtype)
    assert value.dtype == dtype
    assert torch.equal(value, expected)
    assert value.data_ptr() == checkpoint.read(name).data_ptr()
    for target in (torch.float32, torch.bfloat16, torch.float16):
        out = torch.empty(FFN + 8, HIDDEN, dtype=target)[4:-4]
        checkpoint.read_into(name, out)
        assert torch.equal(out, expected.to(target))
    assert torch.equal(checkpoint.read(name), expected)


def test_quantised_vector_reads_as_one_row(tmp_path: Path) -> None:
    arrays = tiny_arrays()
    checkpoint = opened(tmp_path, arrays, encodings={"output_norm.weight": "Q8_0"})
    value = checkpoint.read("model.norm.weight")
    assert value.shape == (1, HIDDEN)
    out = torch.empty(HIDDEN)
    checkpoint.read_into("model.norm.weight", out)
    torch.testing.assert_close(
        out, torch.from_numpy(arrays["output_norm.weight"]), rtol=0.01, atol=0.01
    )


def test_tensors_outlive_the_checkpoint(tmp_path: Path) -> None:
    checkpoint = opened(tmp_path)
    value = checkpoint.read("model.embed_tokens.weight")
    checkpoint.close()
    assert torch.equal(value, torch.from_numpy(tiny_arrays()["token_embd.weight"]))


def test_a_closed_checkpoint_says_so(tmp_path: Path) -> None:
    checkpoint = opened(tmp_path)
    checkpoint.close()
    with pytest.raises(CorruptFileError, match=r"closed before output_norm.weight"):
        checkpoint.read("model.norm.weight")


def test_missing_and_mis_shaped_tensors(tmp_path: Path) -> None:
    checkpoint = opened(tmp_path)
    with pytest.raises(TensorError, match=r"m\.gguf: no tensor model.nor.weight; did you mean"):
        checkpoint.read("model.nor.weight")
    with pytest.raises(TensorError, match=r"model.norm.weight has shape \(64,\), expected \(65,\)"):
        checkpoint.read_into("model.norm.weight", torch.empty(65))


def test_output_head_and_tying(tmp_path: Path) -> None:
    assert opened(tmp_path, tiny_arrays(tied=True)).config["tie_word_embeddings"] is True
    assert opened(tmp_path, tiny_arrays(tied=False)).config["tie_word_embeddings"] is False


def test_vocabulary_size_follows_the_embedding(tmp_path: Path) -> None:
    tokens = {"tokenizer.ggml.tokens": ["a", "b"], "tokenizer.ggml.token_type": [1, 1]}
    assert opened(tmp_path, extra=tokens).config["vocab_size"] == VOCAB


ROPE_CASES = {
    "linear": (
        {".rope.scaling.type": "linear", ".rope.scaling.factor": 4.0},
        {"rope_type": "linear", "factor": 4.0},
    ),
    "old_linear": ({".rope.scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
    "factor_one": (
        {".rope.scaling.type": "linear", ".rope.scaling.factor": 1.0},
        {"rope_type": "default"},
    ),
    "none": (
        {".rope.scaling.type": "none", ".rope.scaling.factor": 4.0},
        {"rope_type": "default"},
    ),
    "yarn": (
        {
            ".rope.scaling.type": "yarn",
            ".rope.scaling.factor": 4.0,
            ".rope.scaling.original_context_length": 32,
        },
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
        },
    ),
    "yarn_all_keys": (
        {
            ".rope.scaling.type": "yarn",
            ".rope.scaling.factor": 8.0,
            ".rope.scaling.yarn_beta_fast": 16.0,
            ".rope.scaling.yarn_beta_slow": 2.0,
            ".rope.scaling.yarn_attn_factor": 1.25,
            ".rope.scaling.attn_factor": 2.0,
        },
        {
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 128,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "attention_factor": 2.5,
        },
    ),
    "yarn_log_multiplier": (
        {
            ".rope.scaling.type": "yarn",
            ".rope.scaling.factor": 8.0,
            ".rope.scaling.yarn_log_multiplier": 0.5,
        },
        {
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 128,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.5,
        },
    ),
    "yarn_multiplied": (
        {
            ".rope.scaling.type": "yarn",
            ".rope.scaling.factor": 8.0,
            ".rope.scaling.attn_factor": 0.5,
        },
        {
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 128,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "attention_factor": pytest.approx(0.5 * (0.1 * math.log(8.0) + 1.0)),
        },
    ),
    "partial": (
        {".rope.dimension_count": 8},
        {"rope_type": "default", "partial_rotary_factor": 0.5},
    ),
}


@pytest.mark.parametrize("case", ROPE_CASES)
def test_rope_metadata(tmp_path: Path, case: str) -> None:
    extra, expected = ROPE_CASES[case]
    found = opened(tmp_path, extra=extra).config["rope_parameters"]
    assert found == {"rope_theta": 5000.0, **expected}


def test_sliding_windows(tmp_path: Path) -> None:
    window = {".attention.sliding_window": 16}
    config = opened(tmp_path, extra=window).config
    assert config["architectures"] == ["MistralForCausalLM"]
    assert (config["model_type"], config["sliding_window"]) == ("mistral", 16)
    config = opened(tmp_path, extra=window, architecture="qwen2").config
    assert config["layer_types"] == ["sliding_attention"]
    assert config["use_sliding_window"] is True
    pattern = {**window, ".attention.sliding_window_pattern": [False]}
    config = opened(tmp_path, extra=pattern, architecture="qwen3").config
    assert config["layer_types"] == ["full_attention"]


def test_head_dim_comes_from_the_key_length(tmp_path: Path) -> None:
    extra = {".attention.key_length": 32, ".attention.value_length": 32}
    assert opened(tmp_path, extra=extra).config["head_dim"] == 32


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"architecture": "llamo"}, r"'llamo' is not one of llama, qwen2, qwen3; did you mean"),
        ({"extra": {".expert_count": 8}}, r"llama.expert_count = 8 is not supported"),
        ({"extra": {".logit_scale": 0.5}}, r"llama.logit_scale = 0.5"),
        ({"extra": {".rope.scaling.type": "longrope"}}, r"'longrope' is not one of none, linear"),
        (
            {"extra": {".attention.key_length": 32, ".attention.value_length": 16}},
            "values of 16 beside keys of 32",
        ),
        (
            {"extra": {".attention.head_count": [4, 2]}},
            "head_count differs between layers",
        ),
        (
            {"extra": {".rope.scaling.type": "yarn", ".rope.scaling.yarn_ext_factor": 0.0}},
            "yarn_ext_factor = 0.0 is not supported",
        ),
    ],
)
def test_unsupported_models(tmp_path: Path, options: dict[str, Any], expected: str) -> None:
    with pytest.raises(UnsupportedModelError, match=expected):
        opened(tmp_path, **options)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"without": (".block_count",)}, "metadata llama.block_count is missing"),
        ({"extra": {".block_count": 0}}, "llama.block_count is 0; expected a positive"),
        ({"extra": {".embedding_length": "x"}}, "embedding_length is 'x'"),
        ({"extra": {".rope.freq_base": float("inf")}}, "freq_base is inf"),
        ({"extra": {".rope.dimension_count": 7}}, "dimension_count is 7; expected an even"),
        ({"extra": {".rope.dimension_count": 18}}, "dimension_count is 18; expected an even"),
    ],
)
def test_absurd_metadata(tmp_path: Path, options: dict[str, Any], expected: str) -> None:
    with pytest.raises(CorruptFileError, match=expected):
        opened(tmp_path, **options)


def test_unread_encoding_names_tensor_type_and_choices(tmp_path: Path) -> None:
    arrays = {**tiny_arrays(), "blk.0.ffn_up.weight": np.zeros((96, 84), dtype=np.uint8)}
    with pytest.raises(
        UnsupportedFormatError,
        match=r"tensor blk.0.ffn_up.weight has type Q2_K, which is not one of F32, F16, BF16, Q8_0",
    ):
        opened(tmp_path, arrays, encodings={"blk.0.ffn_up.weight": "Q2_K"})


def test_two_names_for_one_weight_are_refused(tmp_path: Path) -> None:
    arrays = tiny_arrays()
    arrays["blk.00.ffn_up.weight"] = arrays["blk.0.ffn_up.weight"]
    with pytest.raises(CorruptFileError, match=r"are both model.layers.0.mlp.up_proj.weight"):
        opened(tmp_path, arrays)


def test_rows_that_do_not_divide_by_the_heads(tmp_path: Path) -> None:
    arrays = {**tiny_arrays(), "blk.0.attn_q.weight": np.zeros((62, HIDDEN), dtype=np.float32)}
    checkpoint = opened(tmp_path, arrays)
    with pytest.raises(TensorError, match=r"q_proj.weight has 62 rows, expected an even number"):
        checkpoint.read("model.layers.0.self_attn.q_proj.weight")


def test_the_file_cannot_be_changed_through_a_view(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    before = path.read_bytes()
    checkpoint = open_checkpoint(path)
    for name, info in checkpoint.infos().items():
        checkpoint.read_into(name, torch.empty(info.shape))
    checkpoint.close()
    assert path.read_bytes() == before


@pytest.mark.smollm2
def test_real_checkpoint_values(smollm2_file: Path) -> None:
    import gguf

    checkpoint = open_checkpoint(smollm2_file)
    stored = {t.name: t for t in gguf.GGUFReader(smollm2_file).tensors}
    for name, source, heads in (
        ("model.embed_tokens.weight", "token_embd.weight", None),
        ("model.layers.29.mlp.down_proj.weight", "blk.29.ffn_down.weight", None),
        ("model.layers.7.self_attn.q_proj.weight", "blk.7.attn_q.weight", 9),
        ("model.layers.7.self_attn.k_proj.weight", "blk.7.attn_k.weight", 3),
        ("model.norm.weight", "output_norm.weight", None),
    ):
        expected = gguf.quants.dequantize(stored[source].data, stored[source].tensor_type)
        if heads is not None:
            expected = half_split_rows(expected, heads)
        out = torch.empty(checkpoint.infos()[name].shape)
        checkpoint.read_into(name, out)
        assert torch.equal(out, torch.from_numpy(expected.copy()).view(out.shape))


def test_errors_are_layline_errors(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(CheckpointError):
        open_checkpoint(path)
