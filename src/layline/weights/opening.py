"""Open a model by path or by name.

No torch is imported until a tensor is read, so that planning and the command line can use a
checkpoint's configuration alone.
"""

from __future__ import annotations

import os
from pathlib import Path

from layline.errors import ModelNotFoundError, UnsupportedFormatError, nearest
from layline.weights import cache
from layline.weights.checkpoint import Checkpoint
from layline.weights.embedding_checkpoint import EmbeddingCheckpoint
from layline.weights.pooling import read_pooling

CONFIG_PREFIX = "config:"


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

        pooling = read_pooling(path)
        folder = SafetensorsCheckpoint(path)
        return folder if pooling is None else EmbeddingCheckpoint(folder, pooling)
    if not path.is_file():
        raise ModelNotFoundError(f"{path}: neither a folder nor a regular file")
    if path.suffix == ".safetensors":
        raise UnsupportedFormatError(
            f"{path}: a single safetensors file has no configuration; "
            f"give its folder, {path.parent}, instead"
        )
    if path.suffix in (".bin", ".pt", ".pth", ".ckpt"):
        raise UnsupportedFormatError(
            f"{path}: by its name a file of pickled tensors, which can run code and are never "
            "loaded; expected a .gguf file or a folder of safetensors"
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
