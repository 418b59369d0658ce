"""Checkpoints for speculation: a model, drafts that are like it to some degree, and texts."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

from layline import LLM
from layline.engine.speculation.speculation import Speculation
from support.tiny import save_tiny, tiny_tokenizer

CONTEXT = 160
BASE = [5 + 7 * n % 150 for n in range(37)]
LOOP = [21, 22, 23, 24, 25] * 4
PROMPTS = [BASE, BASE[:32], [*BASE[:20], 9, 9, 9], [3], LOOP, [44, 2, 8, 100, 17, 61]]


class Checkpoints:
    """A target, a draft that nearly agrees with it, and one that has nothing to do with it."""

    def __init__(self, folder: Path, family: str = "Llama", **changes: Any) -> None:
        changes = {"max_position_embeddings": CONTEXT, **changes}
        self.target, self.near, self.other = (
            str(folder / name) for name in ("target", "near", "other")
        )
        self.model = save_tiny(Path(self.target), family, **changes)
        save_tiny(Path(self.other), "Llama", seed=5, **{**changes, "num_hidden_layers": 1})
        self.save_like(Path(self.near), 0.15)

    def save_like(self, directory: Path, noise: float) -> None:
        """The target with weights that are off by ``noise`` of their spread."""
        near = copy.deepcopy(self.model)
        generator = torch.Generator().manual_seed(11)
        with torch.no_grad():
            for parameter in near.parameters():
                spread = float(parameter.std()) * noise
                parameter.add_(torch.randn(parameter.shape, generator=generator) * spread)
        near.save_pretrained(directory)
        tiny_tokenizer(directory)

    def flags(self, kind: str) -> dict[str, Any]:
        """The keywords of ``off``, ``ngram``, or a draft model: ``same``, ``near``, ``other``."""
        if kind in ("off", "ngram"):
            return {"speculative": kind}
        model = self.target if kind == "same" else getattr(self, kind)
        return {"speculative": "draft", "speculative_model": model}

    def llm(self, kind: str, **flags: Any) -> LLM:
        return LLM(self.target, threads=1, **self.flags(kind), **flags)


def replace_proposer(llm: LLM, proposer: Any, most: int = 4) -> None:
    """Let ``proposer`` guess for ``llm``, whatever it was loaded with."""
    engine = llm.engine
    engine._speculation = Speculation(proposer, engine._scheduler, most)
