"""Llama 2 and 3 and models of their shape (SmolLM2 among them)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from layline.models.config import DecoderConfig, flag, parse_decoder
from layline.models.stack import dense_stack

ARCHITECTURES = ("LlamaForCausalLM",)

stack = dense_stack


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    """A config.json of this family as a DecoderConfig."""
    attention_bias = bool(flag(config, "attention_bias"))
    return parse_decoder(
        config,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=bool(flag(config, "mlp_bias")),
    )
