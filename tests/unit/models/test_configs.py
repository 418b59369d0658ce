"""Configurations: what is read, and one line for whatever is wrong with them. No torch needed."""

from __future__ import annotations

from typing import Any

import pytest

from layline.errors import UnsupportedModelError, UsageError
from layline.layers.rope_config import parse_rope
from layline.models.registry import family_of
from layline.topology import Topology

BASE: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


def parse(architecture: str, **changes: Any) -> Any:
    config = {**BASE, "architectures": [f"{architecture}ForCausalLM"], **changes}
    return family_of(config).parse(config)


def refused(architecture: str = "Llama", **changes: Any) -> str:
    with pytest.raises(UnsupportedModelError) as caught:
        parse(architecture, **changes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"hidden_size": None}, "hidden_size must be an integer"),
        ({"hidden_size": 1 << 40}, "hidden_size must be an integer from 1 to"),
        ({"num_attention_heads": True}, "num_attention_heads must be an integer"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3 does not divide"),
        ({"num_attention_heads": 5}, "num_attention_heads 5 does not divide hidden_size 64"),
        ({"head_dim": 15}, "head_dim 15 must be even"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not one of silu, swish"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps must be a small positive number"),
        ({"attention_bias": "false"}, "attention_bias must be true or false, found 'false'"),
        ({"mlp_bias": 1}, "mlp_bias must be true or false, found 1"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"architectures": []}, "architectures []"),
        ({"architectures": "Llama"}, "architectures 'Llama'"),
    ],
)
def test_bad_configurations(changes: dict[str, Any], text: str) -> None:
    assert text in refused(**changes)


@pytest.mark.parametrize(
    ("rope", "text"),
    [
        ({"rope_type": "longrope"}, "rope type 'longrope' is not one of default, linear"),
        ({"rope_type": "linear"}, "needs 'factor'"),
        ({"rope_type": "linear", "factor": "two"}, "factor must be a number, found 'two'"),
        ({"rope_type": "linear", "factor": 0}, "factor must be a positive number, found 0"),
        ({"rope_theta": 0}, "rope_theta must be a positive number, found 0"),
        ({"rope_theta": 1.0}, "rope_theta 1.0 must be more than 1"),
        ({"partial_rotary_factor": "half"}, "partial_rotary_factor must be a number"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"rope_type": "yarn", "factor": 2.0, "attention_factor": "x"}, "attention_factor must"),
        ({"rope_type": "yarn", "factor": 2.0, "beta_fast": 0}, "beta_fast must be a positive"),
        (
            {"rope_type": "yarn", "factor": 2.0, "mscale": [1], "mscale_all_dim": 1.0},
            "mscale must be a number, found [1]",
        ),
        (
            {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": -5},
            "original_max_position_embeddings must be a positive number, found -5",
        ),
        (
            {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 4, "high_freq_factor": 1},
            "low_freq_factor 4.0 must be less than high_freq_factor 1.0",
        ),
        ({"full_attention": {"rope_theta": 1e4}}, "differ by layer type"),
    ],
)
@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_bad_rope(rope: dict[str, Any], text: str, key: str) -> None:
    if key == "rope_scaling" and "full_attention" in rope:
        return
    assert text in refused(**{key: rope})


def test_rope_spellings_agree() -> None:
    scaling = {"factor": 4.0, "original_max_position_embeddings": 16}
    nested = {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e3, **scaling}}
    older = {"rope_theta": 5e3, "rope_scaling": {"rope_type": "yarn", **scaling}}
    oldest = {"rope_theta": 5e3, "rope_scaling": {"type": "yarn", **scaling}}
    assert parse_rope(nested, 64) == parse_rope(older, 64) == parse_rope(oldest, 64)
    assert parse_rope({}, 64).theta == 10000.0


def test_windows() -> None:
    assert parse("Mistral").windows == (4096,) * 4
    assert parse("Mistral", sliding_window=None).windows == (None,) * 4
    assert parse("Qwen2").windows == (None,) * 4
    assert parse("Qwen2", use_sliding_window=True, max_window_layers=1).windows == (
        None,
        *(4096,) * 3,
    )
    sliding = {"use_sliding_window": True, "sliding_window": 8}
    kinds = ["full_attention", "sliding_attention"] * 2
    assert parse("Qwen3", **sliding, layer_types=kinds).windows == (None, 8, None, 8)
    assert parse("Qwen3", layer_types=kinds).windows == (None,) * 4
    assert "layer_types must list 4 layers" in refused("Qwen3", layer_types=kinds[:3])
    assert "layer type 'linear'" in refused("Qwen3", layer_types=["linear"] * 4)


def test_defaults_of_windows_are_those_of_transformers() -> None:
    import transformers

    for family in ("Qwen2", "Qwen3"):
        config = getattr(transformers, f"{family}Config")(
            **BASE, use_sliding_window=True, max_window_layers=2
        )
        theirs = [
            config.sliding_window if kind == "sliding_attention" else None
            for kind in config.layer_types
        ]
        ours = parse(family, use_sliding_window=True, max_window_layers=2)
        assert list(ours.windows) == theirs
    assert transformers.MistralConfig(**BASE).sliding_window == parse("Mistral").windows[0]


@pytest.mark.parametrize(
    ("degrees", "text"),
    [
        ({"tp": 0}, "tp 0 must be at least 1"),
        ({"tp": 4, "attn_dp": 3}, "attn_dp 3 x attn_cp 1 = 3 does not divide tp 4"),
        ({"tp": 4, "ep": 3}, "ep 3 does not divide tp 4"),
        ({"tp": 2, "rank": 2}, "rank 2 is outside 0..1"),
    ],
)
def test_impossible_meshes(degrees: dict[str, int], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        Topology(**degrees)


def test_mesh_arithmetic() -> None:
    mesh = Topology(tp=8, attn_dp=2, attn_cp=2, pp=3)
    assert (mesh.attn_tp, mesh.world_size, mesh.is_single) == (2, 24, False)
    assert Topology().is_single
