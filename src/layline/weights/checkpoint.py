"""One interface to every kind of checkpoint, and the function that opens one.

This module imports no torch until a tensor is read, so that planning and the command line can use
the configuration alone.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from layline.errors import ModelNotFoundError, UnsupportedFormatError, nearest
from layline.weights import cache

if TYPE_CHECKING:
    import torch

    from layline.weights.quantized import QuantizedTensor

CONFIG_PREFIX = "config:"


@dataclass(frozen=True)
class TensorInfo:
    """A stored tensor as the file describes it; nothing of its data has been read.

    ``shape`` is outermost first, ``encoding`` is ``"F32"``, ``"BF16"``, ``"Q4_1"`` and so on,
    ``file`` is the file that holds it.
    """

    name: str
    shape: tuple[int, ...]
    encoding: str
    file: Path


@dataclass(frozen=True)
class VocabularySource:
    """Where the tokenizer is: a folder, or a GGUF file's metadata; neither for a bare config."""

    directory: Path | None = None
    gguf_metadata: Mapping[str, Any] | None = None


class Checkpoint(Protocol):
    """Weights and configuration of a model.

    Attributes:
        path: What errors should name: the folder or the file.
        kind: ``"safetensors"``, ``"gguf"`` or ``"random"``.
        config: The configuration in the form of a Hugging Face config.json.
        generation: generation_config.json or what stands for it; may be empty.
    """

    path: Path
    kind: str
    config: dict[str, Any]
    generation: dict[str, Any]

    def infos(self) -> Mapping[str, TensorInfo]:
        """Every stored tensor by its Hugging Face name; empty for random weights."""
        ...

    def read(self, name: str) -> torch.Tensor | QuantizedTensor:
        """The stored tensor, a view of the mapped file where possible; never write to it.

        Raises:
            TensorError: there is no such tensor.
            UnsupportedFormatError: its encoding is not read.
            CorruptFileError: the file does not hold what its header says.
        """
        ...

    def read_into(self, name: str, out: torch.Tensor) -> None:
        """Fill ``out``, converting or dequantising in pieces; scratch memory stays small.

        ``out`` has the stored shape, a floating dtype, any strides and any device.

        Raises:
            TensorError: there is no such tensor, or it has another shape.
            UnsupportedFormatError: its encoding is not read.
            CorruptFileError: the file does not hold what its header says.
        """
        ...

    def release(self, name: str) -> None:
        """Say that what ``read`` gave for ``name`` is used up, so its file pages can leave memory.

        The values stay valid; touching them reads the file again.
        """
        ...

    def vocabulary(self) -> VocabularySource:
        """Where to load the tokenizer from."""
        ...

    def close(self) -> None:
        """Let go of the files; tensors that were read stay valid."""
        ...


def open_checkpoint(model: str | Path, *, seed: int = 0) -> Checkpoint:
    """Open a model: a folder, a .gguf file, a pulled name, or ``config:DIR`` for random weights.

    Args:
        model: A path, a name that ``layline pull`` knows, or ``config:`` and a folder.
        seed: What random weights are drawn from; ignored for the others.

    Raises:
        ModelNotFoundError: nothing of that name, or a folder without a model.
        UnsupportedModelError: a GGUF architecture that is not supported.
        CheckpointError: the files do not hold what they should.
    """
    text = os.fspath(model)
    if text.startswith(CONFIG_PREFIX):
        from layline.weights.random import RandomCheckpoint

        return RandomCheckpoint(Path(text.removeprefix(CONFIG_PREFIX)).expanduser(), seed=seed)
    path = Path(text).expanduser()
    try:
        exists = bool(text) and path.exists()
    except (OSError, ValueError):  # a name too long for the file system, or with a NUL in it
        exists = False
    if exists:
        return _open_path(path)
    if not text or _looks_like_a_path(text):
        raise ModelNotFoundError(_no_such_path(text, path))
    return _open_path(cache.find_model(text))


def _open_path(path: Path) -> Checkpoint:
    if path.is_dir():
        from layline.weights.safetensors import SafetensorsCheckpoint

        return SafetensorsCheckpoint(path)
    if not path.is_file():
        raise ModelNotFoundError(f"{path}: neither a folder nor a regular file")
    if path.suffix == ".safetensors":
        raise UnsupportedFormatError(
            f"{path}: a single safetensors file has no configuration; "
            f"give its folder, {path.parent}, instead"
        )
    if path.suffix in (".bin", ".pt", ".pth", ".ckpt"):
        raise UnsupportedFormatError(
            f"{path}: a pickle file, which is never loaded because it can run code; "
            "convert the model to safetensors"
        )
    from layline.weights.gguf_checkpoint import GGUFCheckpoint

    return GGUFCheckpoint(path)


def _looks_like_a_path(text: str) -> bool:
    absolute_or_dotted = text.startswith(("/", "./", "../", "~", ".")) or text.count("/") > 1
    return absolute_or_dotted or text.endswith((".gguf", ".safetensors", ".json", "/"))


def _no_such_path(text: str, path: Path) -> str:
    if not text:
        return "the model name is empty; expected a folder, a .gguf file or a name such as " + (
            repr(cache.DEFAULT_MODEL)
        )
    siblings: list[str] = []
    if path.parent.is_dir():
        siblings = [entry.name for entry in path.parent.iterdir()]
    where = f" (in {path.parent})" if siblings and nearest(path.name, siblings) else ""
    return f"no such file or folder: {text!r}{nearest(path.name, siblings)}{where}"
