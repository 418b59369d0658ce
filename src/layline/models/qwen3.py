"""Qwen3 (dense): queries and keys are normalised by head before they rotate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from layline.models.config import DecoderConfig, flag, parse_decoder, qwen_windows
from layline.models.stack import dense_stack

ARCHITECTURES = ("Qwen3ForCausalLM",)

stack = dense_stack


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    """A config.json of this family as a DecoderConfig."""
    attention_bias = bool(flag(config, "attention_bias"))
    head_dim = config.get("head_dim", 128)  # The family's default is not hidden / heads.
    return parse_decoder(
        {**config, "head_dim": head_dim},
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        qk_norm=True,
        windows=qwen_windows(config),
    )
