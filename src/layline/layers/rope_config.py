"""What a checkpoint says about rotary position embeddings, under one set of names.

Configurations in the field use three spellings: ``rope_theta`` beside a ``rope_scaling`` dict with
``type`` or ``rope_type``, the nested ``rope_parameters`` dict, and values left to the model
family's default. :func:`parse_rope` reads all of them. Nothing here imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from layline.errors import UnsupportedModelError, one_of

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")
DEFAULT_THETA = 10000.0

_REQUIRED = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding parameters. ``original_context`` is the length the model was trained on."""

    kind: str = "default"
    theta: float = DEFAULT_THETA
    factor: float = 1.0
    original_context: int = 2048
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True


def parse_rope(config: Mapping[str, Any], max_position: int) -> RopeConfig:
    """The rope configuration of a config.json dict.

    Raises UnsupportedModelError for a rope type outside :data:`ROPE_TYPES`, a partial rotary
    embedding, per-layer-type parameters, or a missing or non-positive number.
    """
    nested = _as_dict(config, "rope_parameters")
    scaling = {**_as_dict(config, "rope_scaling"), **nested}
    if any(isinstance(value, Mapping) for value in nested.values()):
        raise UnsupportedModelError(
            "rope_parameters differ by layer type; this decoder has one rope for all layers"
        )
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ROPE_TYPES:
        raise UnsupportedModelError(one_of("rope type", kind, ROPE_TYPES))
    partial = scaling.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial is not None and float(partial) != 1.0:
        raise UnsupportedModelError(
            f"partial_rotary_factor {partial} is not supported; expected 1.0 (whole heads rotate)"
        )
    for name in _REQUIRED[kind]:
        if scaling.get(name) is None:
            raise UnsupportedModelError(f"rope type {kind!r} needs {name!r} in its parameters")
    theta = scaling.get("rope_theta") or config.get("rope_theta") or DEFAULT_THETA
    original = (
        config.get("original_max_position_embeddings")
        or scaling.get("original_max_position_embeddings")
        or max_position
    )
    factor = _positive("factor", scaling.get("factor", 1.0))
    return RopeConfig(
        kind=kind,
        theta=_positive("rope_theta", theta),
        factor=factor,
        # Dynamic scaling grows from the context the configuration states, as transformers does.
        original_context=int(max_position if kind == "dynamic" else original),
        low_freq_factor=_positive("low_freq_factor", scaling.get("low_freq_factor", 1.0)),
        high_freq_factor=_positive("high_freq_factor", scaling.get("high_freq_factor", 4.0)),
        beta_fast=_positive("beta_fast", scaling.get("beta_fast") or 32.0),
        beta_slow=_positive("beta_slow", scaling.get("beta_slow") or 1.0),
        attention_factor=_attention_factor(kind, factor, scaling),
        truncate=bool(scaling.get("truncate", True)),
    )


def _attention_factor(kind: str, factor: float, scaling: Mapping[str, Any]) -> float:
    """YaRN's temperature on cos and sin (https://arxiv.org/abs/2309.00071, equation 22)."""
    if kind != "yarn":
        return 1.0
    explicit = scaling.get("attention_factor")
    if explicit is not None:
        return float(explicit)
    mscale, mscale_all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return _magnitude(factor, float(mscale)) / _magnitude(factor, float(mscale_all_dim))
    return _magnitude(factor, 1.0)


def _magnitude(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def _as_dict(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = config.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise UnsupportedModelError(f"{key} must be an object in config.json, found {value!r}")
    return dict(value)


def _positive(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise UnsupportedModelError(f"{name} must be a number, found {value!r}")
    number = float(value)
    if not (math.isfinite(number) and number > 0):
        raise UnsupportedModelError(f"{name} must be a positive number, found {value!r}")
    return number
