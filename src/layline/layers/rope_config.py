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

_ORIGINAL = "original_max_position_embeddings"
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
    for name in _REQUIRED[kind]:
        if scaling.get(name) is None:
            raise UnsupportedModelError(f"rope type {kind!r} needs {name!r} in its parameters")
    # Older files keep these beside the scaling, not in it.
    for name in ("rope_theta", "partial_rotary_factor"):
        if scaling.get(name) is None:
            scaling[name] = config.get(name)
    if config.get(_ORIGINAL) is not None:
        scaling[_ORIGINAL] = config[_ORIGINAL]
    partial = _number(scaling, "partial_rotary_factor", 1.0)
    if partial != 1.0:
        raise UnsupportedModelError(
            f"partial_rotary_factor {partial} is not supported; expected 1.0 (whole heads rotate)"
        )
    theta = _number(scaling, "rope_theta", DEFAULT_THETA)
    if theta <= 1.0:
        raise UnsupportedModelError(f"rope_theta {theta} must be more than 1")
    factor = _number(scaling, "factor", 1.0)
    low, high = (
        _number(scaling, "low_freq_factor", 1.0),
        _number(scaling, "high_freq_factor", 4.0),
    )
    if kind == "llama3" and low >= high:
        raise UnsupportedModelError(
            f"low_freq_factor {low} must be less than high_freq_factor {high}"
        )
    return RopeConfig(
        kind=kind,
        theta=theta,
        factor=factor,
        # Dynamic scaling grows from the context the configuration states, as transformers does.
        original_context=int(
            max_position if kind == "dynamic" else _number(scaling, _ORIGINAL, max_position)
        ),
        low_freq_factor=low,
        high_freq_factor=high,
        beta_fast=_number(scaling, "beta_fast", 32.0),
        beta_slow=_number(scaling, "beta_slow", 1.0),
        attention_factor=_attention_factor(kind, factor, scaling),
        truncate=bool(scaling.get("truncate", True)),
    )


def _attention_factor(kind: str, factor: float, scaling: Mapping[str, Any]) -> float:
    """YaRN's temperature on cos and sin (https://arxiv.org/abs/2309.00071, equation 22)."""
    if kind != "yarn":
        return 1.0
    if scaling.get("attention_factor") is not None:
        return _number(scaling, "attention_factor", 1.0)
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        above = _magnitude(factor, _number(scaling, "mscale", 1.0))
        return above / _magnitude(factor, _number(scaling, "mscale_all_dim", 1.0))
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


def _number(scaling: Mapping[str, Any], name: str, default: float) -> float:
    """A positive finite number, or ``default`` where the key is absent or null."""
    value = scaling.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise UnsupportedModelError(f"{name} must be a number, found {value!r}")
    number = float(value)
    if not (math.isfinite(number) and number > 0):
        raise UnsupportedModelError(f"{name} must be a positive number, found {value!r}")
    return number
