"""Tiny checkpoints in the layout of models that make embeddings, and transformers' vectors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from support.tiny import save_tiny

END = 2
"""What the tokenizer puts after a text."""


def save_embedder(
    directory: Path,
    family: str = "Qwen3",
    *,
    mode: str = "lasttoken",
    normalised: bool = True,
    bare: bool = True,
    **changes: Any,
) -> Any:
    """Write one; returns the transformers model. ``bare`` leaves out the head and ``model.``."""
    model = save_tiny(directory, family, **{"tie_word_embeddings": True, **changes})
    if bare:
        path = directory / "model.safetensors"
        tensors = load_file(path)
        tensors = {
            name.removeprefix("model."): tensor.clone()
            for name, tensor in tensors.items()
            if not name.startswith("lm_head")
        }
        save_file(tensors, path, metadata={"format": "pt"})
    _write(directory / "modules.json", modules(normalised))
    pooling = directory / "1_Pooling"
    pooling.mkdir(exist_ok=True)
    modes = ("cls_token", "mean_tokens", "max_tokens", "lasttoken")
    config = {f"pooling_mode_{name}": name.startswith(mode) for name in modes}
    _write(pooling / "config.json", {"word_embedding_dimension": 48, **config})
    _ends_texts(directory / "tokenizer.json")
    return model


def modules(normalised: bool = True) -> list[dict[str, Any]]:
    """What modules.json lists."""
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    return [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(kinds[: 3 if normalised else 2])
    ]


@torch.inference_mode()
def reference(model: Any, ids: list[int], *, mode: str = "lasttoken") -> torch.Tensor:
    """The pooled last hidden state of transformers' model, float32 [hidden]."""
    states: torch.Tensor = model.model(torch.tensor([ids])).last_hidden_state[0].float()
    return states.mean(0) if mode == "mean" else states[-1]


def unit(vector: torch.Tensor) -> torch.Tensor:
    """The vector at length one."""
    return vector / vector.norm()


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def _ends_texts(path: Path) -> None:
    """Have the tokenizer end every text with a token, as Qwen3-Embedding's does."""
    settings = json.loads(path.read_text(encoding="utf-8"))
    end = {"SpecialToken": {"id": "</s>", "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    settings["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [text, end],
        "pair": [text, end, {"Sequence": {"id": "B", "type_id": 1}}, end],
        "special_tokens": {"</s>": {"id": "</s>", "ids": [END], "tokens": ["</s>"]}},
    }
    _write(path, settings)
