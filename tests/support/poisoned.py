"""A tiny checkpoint in which one token is poison: a prompt that holds it has NaN for logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from support.serving import save_talker
from support.tiny import save_tiny

POISON = 77
WORD = f"w{POISON - 3}"
"""The token as text."""


def save_poisoned(directory: Path, *, talks: bool = False, **changes: Any) -> Any:
    """Write it; returns the transformers model, which has no poison."""
    model = save_talker(directory) if talks else save_tiny(directory, "Llama", **changes)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    tensors["model.embed_tokens.weight"][POISON] = torch.nan
    save_file(tensors, path, metadata={"format": "pt"})
    return model
