"""Which model family an architecture name belongs to. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from layline.errors import UnsupportedModelError, one_of
from layline.models import llama, mistral, qwen2, qwen3
from layline.models.config import DecoderConfig, architecture_of
from layline.models.stack import LayerStages


@dataclass(frozen=True)
class Family:
    """A model family: how to read its configuration, and the stages of its stack."""

    architectures: tuple[str, ...]
    parse: Callable[[Mapping[str, Any]], DecoderConfig]
    stack: Callable[[DecoderConfig], Iterator[LayerStages]]


FAMILIES = tuple(
    Family(module.ARCHITECTURES, module.parse, module.stack)
    for module in (llama, mistral, qwen2, qwen3)
)
ARCHITECTURES = tuple(name for family in FAMILIES for name in family.architectures)


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a config.json dict. Raises UnsupportedModelError listing the known names."""
    name = architecture_of(config)
    for family in FAMILIES:
        if name in family.architectures:
            return family
    raise UnsupportedModelError(one_of("architecture", name, ARCHITECTURES))
