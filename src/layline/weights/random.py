"""``config:DIR``: random weights for a configuration, made in place."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from layline.errors import ModelNotFoundError, TensorError
from layline.weights.checkpoint import Region, TensorInfo, VocabularySource
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

    def read(self, name: str, region: Region | None = None) -> torch.Tensor:
        """Random weights have no stored shape.

        Raises:
            TensorError: always; use ``read_into``.
        """
        raise TensorError(f"config:{self.path}: {name} is not stored; random weights fill a tensor")

    def read_into(self, name: str, out: torch.Tensor, region: Region | None = None) -> None:
        """Fill ``out``; the values depend on the name, the seed and the whole shape only.

        A part of a tensor has the values that it has in the whole.
        """
        import torch

        if name.endswith(("norm.weight", "layernorm.weight")) or "rope_freqs" in name:
            out.fill_(1.0)
            return
        region = region or Region(tuple(out.shape))
        assert tuple(out.shape) == region.size
        if out.numel() == 0:
            return
        num_rows, *others = region.shape
        std = others[-1] ** -0.5 if others else _BIAS_STD
        step = max(1, _PIECE // math.prod(others)) if others else num_rows
        first, stop = region.rows or (0, num_rows)
        scratch = torch.empty((min(step, num_rows), *others))
        for piece in range(first // step, -(-stop // step)):
            start = piece * step
            # Every piece has its own stream, so that a part of a tensor is drawn alone.
            values = scratch[: min(step, num_rows - start)]
            values.normal_(0.0, std, generator=self._generator(name, piece))
            begin, end = max(first, start), min(stop, start + step)
            rows = values[begin - start : end - start]
            columns = slice(*(region.columns or (None, None)))
            target = out[begin - first : end - first]
            target.copy_(rows[:, columns] if others else rows)

    def _generator(self, name: str, piece: int) -> torch.Generator:
        import torch

        label = f"{self.seed}:{name}:{piece}" if piece else f"{self.seed}:{name}"
        digest = hashlib.sha256(label.encode()).digest()
        # Drawn on the CPU even for another device: its generator is the one every machine shares.
        return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)

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
