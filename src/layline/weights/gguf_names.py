"""GGUF's tensor names and metadata in Hugging Face's terms."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from layline.errors import CorruptFileError, UnsupportedModelError, one_of
from layline.weights.gguf_file import GGUFMetadata, shorten

# GGUF architecture -> (Hugging Face class, model_type). Mistral files call themselves llama.
_ARCHITECTURES = MappingProxyType(
    {
        "llama": ("LlamaForCausalLM", "llama"),
        "qwen2": ("Qwen2ForCausalLM", "qwen2"),
        "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    }
)
_TOP_NAMES = MappingProxyType(
    {"token_embd": "model.embed_tokens", "output": "lm_head", "output_norm": "model.norm"}
)
_BLOCK_NAMES = MappingProxyType(
    {
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
)
_BLOCK = re.compile(r"blk\.(\d{1,6})\.(\w+)\.(weight|bias)", re.ASCII)
# Options that would change the numbers, with the value at which they do nothing.
_NEUTRAL = MappingProxyType(
    {
        "expert_count": 0,
        "logit_scale": 1,
        "residual_scale": 1,
        "embedding_scale": 1,
        "attn_logit_softcapping": 0,
        "final_logit_softcapping": 0,
        "attention.clamp_kqv": 0,
        "attention.max_alibi_bias": 0,
        "attention.temperature_scale": 0,
        "use_parallel_residual": False,
    }
)


def hugging_face_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; a name it does not know comes back unchanged."""
    if match := _BLOCK.fullmatch(name):
        layer, part, suffix = match.groups()
        if part in _BLOCK_NAMES:
            return f"model.layers.{int(layer)}.{_BLOCK_NAMES[part]}.{suffix}"
        return name
    part, _, suffix = name.rpartition(".")
    if part in _TOP_NAMES and suffix in ("weight", "bias"):
        return f"{_TOP_NAMES[part]}.{suffix}"
    return name


def hugging_face_config(
    path: Path, metadata: GGUFMetadata, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Any]:
    """A config.json for the file's metadata and tensor ``shapes`` (by Hugging Face name).

    Raises:
        UnsupportedModelError: another architecture, or an option that is not supported.
        CorruptFileError: a value is missing or absurd.
    """
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in _ARCHITECTURES:
        raise UnsupportedModelError(
            f"{path}: "
            + one_of("GGUF architecture", shorten(str(architecture)), sorted(_ARCHITECTURES))
        )
    values = _Values(path, metadata, architecture)
    values.refuse_unsupported()
    class_name, model_type = _ARCHITECTURES[architecture]
    hidden, heads = values.count("embedding_length"), values.count("attention.head_count")
    head_dim = values.count("attention.key_length", default=max(1, hidden // heads))
    value_dim = values.count("attention.value_length", default=head_dim)
    if value_dim != head_dim:
        raise UnsupportedModelError(
            f"{path}: values of {value_dim} beside keys of {head_dim} per head are not supported"
        )
    num_layers = values.count("block_count")
    config: dict[str, Any] = {
        "architectures": [class_name],
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": values.count("feed_forward_length"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": values.count("attention.head_count_kv", default=heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": values.count("context_length"),
        "rms_norm_eps": values.number("attention.layer_norm_rms_epsilon", 1e-6),
        "vocab_size": _vocab_size(values, shapes),
        "tie_word_embeddings": "lm_head.weight" not in shapes,
        "attention_bias": architecture == "qwen2"
        or "model.layers.0.self_attn.q_proj.bias" in shapes,
        "mlp_bias": "model.layers.0.mlp.up_proj.bias" in shapes,
        "rope_parameters": _rope_parameters(values, head_dim),
    }
    config.update(_sliding_window(values, architecture, num_layers))
    config.update(_special_tokens(metadata))
    return config


def hugging_face_generation(metadata: GGUFMetadata) -> dict[str, Any]:
    """A generation_config.json: special ids, with every end-of-turn id among the EOS ids."""
    generation = _special_tokens(metadata)
    ends = [generation["eos_token_id"]] if "eos_token_id" in generation else []
    for key in ("tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"):
        token = metadata.get(key)
        if isinstance(token, int) and token not in ends:
            ends.append(token)
    if ends:
        generation["eos_token_id"] = ends
    return generation


class _Values:
    """Typed access to the metadata of one architecture."""

    def __init__(self, path: Path, metadata: GGUFMetadata, architecture: str) -> None:
        self.path = path
        self.metadata = metadata
        self.architecture = architecture

    def get(self, key: str) -> Any:
        return self.metadata.get(f"{self.architecture}.{key}")

    def wrong(self, key: str, value: object, expected: str) -> CorruptFileError:
        return CorruptFileError(
            f"{self.path}: {self.architecture}.{key} is {shorten(repr(value))}; expected {expected}"
        )

    def count(self, key: str, default: int | None = None) -> int:
        """A positive whole number; a per-layer list is accepted where its entries agree."""
        value = self.get(key)
        if value is None:
            if default is None:
                raise CorruptFileError(
                    f"{self.path}: metadata {self.architecture}.{key} is missing"
                )
            return default
        if isinstance(value, list) and value:
            if any(entry != value[0] for entry in value):
                raise UnsupportedModelError(
                    f"{self.path}: {self.architecture}.{key} differs between layers, "
                    "which is not supported"
                )
            value = value[0]
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 31:
            raise self.wrong(key, value, "a positive whole number")
        return value

    def number(self, key: str, default: float) -> float:
        """A finite positive number."""
        value = self.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(key, value, "a number")
        if not math.isfinite(value) or value <= 0:
            raise self.wrong(key, value, "a finite positive number")
        return float(value)

    def refuse_unsupported(self) -> None:
        for key, neutral in _NEUTRAL.items():
            value = self.get(key)
            if value is not None and value != neutral:
                raise UnsupportedModelError(
                    f"{self.path}: {self.architecture}.{key} = {shorten(repr(value))} is not "
                    f"supported (only {neutral})"
                )


def _vocab_size(values: _Values, shapes: Mapping[str, tuple[int, ...]]) -> int:
    # The embedding is what the weights need; a token list may be shorter.
    if embedding := shapes.get("model.embed_tokens.weight"):
        return embedding[0]
    tokens = values.metadata.array_length("tokenizer.ggml.tokens")
    return values.count("vocab_size", default=tokens or None)


def _rope_parameters(values: _Values, head_dim: int) -> dict[str, Any]:
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": values.number("rope.freq_base", 10000.0),
    }
    rotary_dim = values.count("rope.dimension_count", default=head_dim)
    if rotary_dim > head_dim or rotary_dim % 2:
        raise values.wrong("rope.dimension_count", rotary_dim, f"an even number up to {head_dim}")
    if rotary_dim != head_dim:
        rope["partial_rotary_factor"] = rotary_dim / head_dim
    # Files from before the scaling keys hold one number for linear scaling.
    factor = values.number("rope.scaling.factor", values.number("rope.scale_linear", 1.0))
    kind = values.get("rope.scaling.type") or "linear"
    if kind not in ("none", "linear", "yarn"):
        raise UnsupportedModelError(
            f"{values.path}: "
            + one_of("rope.scaling.type", shorten(str(kind)), ("none", "linear", "yarn"))
        )
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return rope
    rope.update(rope_type=kind, factor=factor)
    if kind == "yarn":
        rope.update(_yarn_parameters(values, factor))
    return rope


def _yarn_parameters(values: _Values, factor: float) -> dict[str, Any]:
    """YaRN's keys.

    GGUF's ``attn_factor`` multiplies the attention scale that YaRN derives from its factor, while
    Hugging Face's ``attention_factor`` replaces it, as ``yarn_attn_factor`` does. The log
    multiplier is ``mscale_all_dim`` with ``mscale`` one.
    """
    yarn: dict[str, Any] = {
        "original_max_position_embeddings": values.count(
            "rope.scaling.original_context_length", default=values.count("context_length")
        ),
        "beta_fast": values.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": values.number("rope.scaling.yarn_beta_slow", 1.0),
    }
    extrapolation = values.get("rope.scaling.yarn_ext_factor")
    if extrapolation not in (None, 1, -1):
        raise UnsupportedModelError(
            f"{values.path}: rope.scaling.yarn_ext_factor = {shorten(repr(extrapolation))} is "
            "not supported (only 1)"
        )
    log_multiplier = values.get("rope.scaling.yarn_log_multiplier") or 0.0
    if log_multiplier:
        log_multiplier = values.number("rope.scaling.yarn_log_multiplier", 1.0)
    multiplier = values.number("rope.scaling.attn_factor", 1.0)
    replacement = values.get("rope.scaling.yarn_attn_factor")
    if replacement is not None:
        base = values.number("rope.scaling.yarn_attn_factor", 1.0)
        yarn["attention_factor"] = base * multiplier
    elif multiplier != 1.0:
        derived = _mscale(factor, 1.0) / _mscale(factor, log_multiplier)
        yarn["attention_factor"] = derived * multiplier
    elif log_multiplier:
        yarn.update(mscale=1.0, mscale_all_dim=log_multiplier)
    return yarn


def _mscale(factor: float, multiplier: float) -> float:
    return 0.1 * multiplier * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def _sliding_window(values: _Values, architecture: str, num_layers: int) -> dict[str, Any]:
    window = values.get("attention.sliding_window")
    if not window:
        return {}
    window = values.count("attention.sliding_window")
    pattern = values.get("attention.sliding_window_pattern")
    slides = [True] * num_layers
    if isinstance(pattern, list):
        if len(pattern) < num_layers or not all(isinstance(entry, bool) for entry in pattern):
            raise values.wrong(
                "attention.sliding_window_pattern", pattern, f"{num_layers} booleans"
            )
        slides = pattern[:num_layers]
    if architecture == "llama":
        if not all(slides):
            raise UnsupportedModelError(
                f"{values.path}: a sliding window on some layers only is not supported for llama"
            )
        return {
            "architectures": ["MistralForCausalLM"],
            "model_type": "mistral",
            "sliding_window": window,
        }
    kinds = ["sliding_attention" if slide else "full_attention" for slide in slides]
    return {"use_sliding_window": True, "sliding_window": window, "layer_types": kinds}


def _special_tokens(metadata: Mapping[str, Any]) -> dict[str, Any]:
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    found = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in names.items()}
    return {name: token for name, token in found.items() if isinstance(token, int)}
