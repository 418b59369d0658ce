"""Qwen2 and Qwen2.5: biases on query, key and value; a window in the upper layers if asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from layline.models.config import DecoderConfig, parse_decoder, qwen_windows
from layline.models.stack import dense_stack

ARCHITECTURES = ("Qwen2ForCausalLM",)

stack = dense_stack


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    """A config.json of this family as a DecoderConfig."""
    return parse_decoder(config, qkv_bias=True, windows=qwen_windows(config))
