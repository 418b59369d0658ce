"""``config:DIR``: random weights for a configuration, made in place."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from layline.errors import ModelNotFoundError, TensorError
from layline.weights.checkpoint import TensorInfo, VocabularySource
from layline.weights.folders import file_inside, read_json_object

if TYPE_CHECKING:
    import torch

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
_BIAS_STD = 0.02
# Drawing in float32 pieces keeps scratch small and makes every dtype a rounding of the same draw.
_PIECE = 1 << 20


class RandomCheckpoint:
    """Weights drawn from the tensor's name and a seed; equal calls give equal weights.

    Matrices have a standard deviation of 1 / sqrt(columns), so that activations keep their size
    and a mistake in the computation shows; norm weights are one, biases small.

    Raises:
        ModelNotFoundError: no config.json there.
        CorruptFileError: it is not a JSON object.
    """

    def __init__(self, path: Path, *, seed: int = 0) -> None:
        directory = path.parent if path.is_file() and path.suffix == ".json" else path
        config_name = path.name if directory != path else "config.json"
        if not directory.is_dir() or (config := file_inside(directory, config_name)) is None:
            raise ModelNotFoundError(
                f"config:{path}: expected a folder with a config.json, or a .json file"
            )
        self.path = path
        self.kind = "random"
        self.seed = seed
        self.config = read_json_object(config)
        generation = file_inside(directory, "generation_config.json")
        self.generation = read_json_object(generation) if generation else {}
        self._directory = directory

    def infos(self) -> Mapping[str, TensorInfo]:
        """Nothing is stored."""
        return MappingProxyType({})

    def read(self, name: str) -> torch.Tensor:
        """Random weights have no stored shape.

        Raises:
            TensorError: always; use ``read_into``.
        """
        raise TensorError(f"config:{self.path}: {name} is not stored; random weights fill a tensor")

    def read_into(self, name: str, out: torch.Tensor) -> None:
        """Fill ``out``; the values depend on the name, the seed and the shape only."""
        import torch

        if name.endswith(("norm.weight", "layernorm.weight")) or "rope_freqs" in name:
            out.fill_(1.0)
            return
        digest = hashlib.sha256(f"{self.seed}:{name}".encode()).digest()
        # Drawn on the CPU even for another device: its generator is the one every machine shares.
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        std = out.shape[-1] ** -0.5 if out.dim() > 1 else _BIAS_STD
        if out.numel() == 0:
            return
        if out.dim() < 2:
            out.copy_(torch.empty(out.shape).normal_(0.0, std, generator=generator))
            return
        step = max(1, _PIECE // max(1, out[:1].numel()))
        scratch = torch.empty((min(step, out.shape[0]), *out.shape[1:]))
        for start in range(0, out.shape[0], step):
            target = out[start : start + step]
            piece = scratch[: target.shape[0]].normal_(0.0, std, generator=generator)
            target.copy_(piece)

    def release(self, name: str) -> None:
        """See ``Checkpoint.release``; nothing is kept that could be let go."""

    def vocabulary(self) -> VocabularySource:
        """The folder, when it has tokenizer files."""
        for name in _TOKENIZER_FILES:
            if file_inside(self._directory, name) is not None:
                return VocabularySource(directory=self._directory)
        return VocabularySource()

    def close(self) -> None:
        """Nothing is open."""
