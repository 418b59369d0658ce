"""Mistral: a Llama whose attention may slide over the latest keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from layline.models.config import DecoderConfig, mistral_windows, parse_decoder
from layline.models.stack import dense_stack

ARCHITECTURES = ("MistralForCausalLM",)

stack = dense_stack


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    """A config.json of this family as a DecoderConfig."""
    return parse_decoder(config, windows=mistral_windows(config))
