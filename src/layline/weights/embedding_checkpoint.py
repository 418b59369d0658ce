"""A folder whose model makes embeddings, as if it were one that generates text.

Its weights are often saved without the head and without the ``model.`` before their names, and its
architecture is named after the bare model.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from layline.errors import UnsupportedModelError
from layline.weights.checkpoint import Checkpoint, Region, TensorInfo, VocabularySource
from layline.weights.pooling import Pooling

if TYPE_CHECKING:
    import torch

    from layline.weights.quantized import QuantizedTensor

_PREFIX = "model."
_BARE, _CAUSAL = "Model", "ForCausalLM"


class EmbeddingCheckpoint:
    """``inner`` with the names and the configuration of a model that generates.

    Raises UnsupportedModelError when its attention is not causal.
    """

    def __init__(self, inner: Checkpoint, pooling: Pooling) -> None:
        config = inner.config
        if config.get("is_causal") is False or config.get("use_bidirectional_attention"):
            raise UnsupportedModelError(
                f"{inner.path}: config.json asks for attention to later tokens; expected a model "
                "whose attention is causal"
            )
        self.path, self.kind = inner.path, inner.kind
        self.pooling = pooling
        # No token is scored: whatever head there is, the table stands for it and takes no room.
        self.config: dict[str, Any] = {
            **config,
            "architectures": [_causal(name) for name in _names(config)],
            "tie_word_embeddings": True,
        }
        self.generation = inner.generation
        self._inner = inner
        stored = inner.infos()
        bare = not any(name.startswith(_PREFIX) for name in stored)
        self._stored = {f"{_PREFIX}{name}" if bare else name: name for name in stored}
        self._infos = MappingProxyType({new: stored[old] for new, old in self._stored.items()})

    def infos(self) -> Mapping[str, TensorInfo]:
        """Every tensor by the name it has in a model that generates."""
        return self._infos

    def read(self, name: str, region: Region | None = None) -> torch.Tensor | QuantizedTensor:
        """See ``Checkpoint.read``."""
        return self._inner.read(self._stored.get(name, name), region)

    def read_into(self, name: str, out: torch.Tensor, region: Region | None = None) -> None:
        """See ``Checkpoint.read_into``."""
        self._inner.read_into(self._stored.get(name, name), out, region)

    def release(self, name: str) -> None:
        """See ``Checkpoint.release``."""
        self._inner.release(self._stored.get(name, name))

    def vocabulary(self) -> VocabularySource:
        """See ``Checkpoint.vocabulary``."""
        return self._inner.vocabulary()

    def close(self) -> None:
        """See ``Checkpoint.close``."""
        self._inner.close()


def pooling_of(checkpoint: Checkpoint) -> Pooling | None:
    """How the checkpoint's model makes embeddings; None where it generates text."""
    return checkpoint.pooling if isinstance(checkpoint, EmbeddingCheckpoint) else None


def _names(config: Mapping[str, Any]) -> list[Any]:
    names = config.get("architectures")
    return names if isinstance(names, list) else []


def _causal(name: object) -> object:
    if isinstance(name, str) and name.endswith(_BARE):
        return f"{name.removesuffix(_BARE)}{_CAUSAL}"
    return name
