"""One interface to every kind of checkpoint; ``opening.py`` opens them. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from layline.weights.quantized import QuantizedTensor


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
