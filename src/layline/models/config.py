"""The decoder's configuration, read from a config.json dict. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from layline.errors import UnsupportedModelError, one_of
from layline.layers.rope_config import RopeConfig, parse_rope

ACTIVATIONS = ("silu", "swish")
MAX_EXTENT = 1 << 24  # No decoder has a dimension near 16 million; larger is a corrupt file.
DEFAULT_WINDOW = 4096  # What Mistral and Qwen configurations mean by an absent key.


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Shapes and options of one dense decoder.

    ``windows`` holds, for each layer, the number of latest keys a query sees (itself included),
    or None where attention is full. ``tied_head`` is None when the configuration does not say
    whether the head shares the embedding's table.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    norm_eps: float
    rope: RopeConfig
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tied_head: bool | None = None
    windows: tuple[int | None, ...] = ()

    @property
    def q_size(self) -> int:
        """Columns of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Columns of all key heads together (value heads are as many)."""
        return self.num_kv_heads * self.head_dim


def architecture_of(config: Mapping[str, Any]) -> str:
    """The class name a config.json names first. Raises UnsupportedModelError when it names none."""
    names = config.get("architectures")
    if isinstance(names, list) and names and isinstance(names[0], str):
        return names[0]
    raise UnsupportedModelError(
        f"config.json has architectures {names!r}; expected a list with a model class name"
    )


def parse_decoder(config: Mapping[str, Any], **family: Any) -> DecoderConfig:
    """Build a DecoderConfig; ``family`` holds what the model family fixes (biases, norms, windows).

    Raises UnsupportedModelError naming the key, the value and what was expected.
    """
    hidden = _extent(config, "hidden_size")
    heads = _extent(config, "num_attention_heads")
    kv_heads = _extent(config, "num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise UnsupportedModelError(
            f"num_key_value_heads {kv_heads} does not divide num_attention_heads {heads}"
        )
    if config.get("head_dim") is None and hidden % heads:
        raise UnsupportedModelError(
            f"num_attention_heads {heads} does not divide hidden_size {hidden}, and no head_dim"
        )
    head_dim = _extent(config, "head_dim", default=hidden // heads)
    if head_dim % 2:
        raise UnsupportedModelError(f"head_dim {head_dim} must be even for rotary embeddings")
    activation = config.get("hidden_act", "silu")
    if activation not in ACTIVATIONS:
        raise UnsupportedModelError(one_of("hidden_act", activation, ACTIVATIONS))
    max_position = _extent(config, "max_position_embeddings", default=2048)
    num_layers = _extent(config, "num_hidden_layers")
    eps = config.get("rms_norm_eps", 1e-6)
    if not isinstance(eps, float) or not 0 < eps < 1:
        raise UnsupportedModelError(f"rms_norm_eps must be a small positive number, found {eps!r}")
    return DecoderConfig(
        architecture=architecture_of(config),
        vocab_size=_extent(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_extent(config, "intermediate_size"),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position=max_position,
        norm_eps=eps,
        rope=parse_rope(config, max_position),
        tied_head=flag(config, "tie_word_embeddings"),
        **{"windows": (None,) * num_layers, **family},
    )


def mistral_windows(config: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Every layer slides when ``sliding_window`` is set; an absent key means the family default."""
    value = config.get("sliding_window", DEFAULT_WINDOW)
    window = None if value is None else _extent({"sliding_window": value}, "sliding_window")
    return (window,) * _extent(config, "num_hidden_layers")


def qwen_windows(config: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Windows from ``layer_types``, or from ``max_window_layers`` in older configurations."""
    layers = _extent(config, "num_hidden_layers")
    window = None
    if flag(config, "use_sliding_window") and config.get("sliding_window", DEFAULT_WINDOW):
        window = _extent(config, "sliding_window", default=DEFAULT_WINDOW)
    kinds = config.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != layers:
            raise UnsupportedModelError(f"layer_types must list {layers} layers, found {kinds!r}")
        for kind in kinds:
            if kind not in ("full_attention", "sliding_attention"):
                raise UnsupportedModelError(
                    one_of("layer type", kind, ("full_attention", "sliding_attention"))
                )
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    first = _extent(config, "max_window_layers", default=28, minimum=0)
    return tuple(window if layer >= first else None for layer in range(layers))


def flag(config: Mapping[str, Any], key: str) -> bool | None:
    """A true, false or absent key. Raises UnsupportedModelError for anything else."""
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise UnsupportedModelError(f"{key} must be true or false, found {value!r}")
    return value


def _extent(
    config: Mapping[str, Any], key: str, default: int | None = None, minimum: int = 1
) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= MAX_EXTENT:
        raise UnsupportedModelError(
            f"{key} must be an integer from {minimum} to {MAX_EXTENT}, found {value!r}"
        )
    return value
