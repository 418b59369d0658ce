"""One interface to every kind of checkpoint; ``opening.py`` opens them. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from layline.errors import TensorError

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
class Region:
    """A part of a vector or matrix whose whole ``shape`` is known; the default is all of it.

    ``rows`` and ``columns`` are half-open ``(first, stop)``, None for all. Raises TensorError when
    they lie outside the shape.
    """

    shape: tuple[int, ...]
    rows: tuple[int, int] | None = None
    columns: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        dims = len(self.shape)
        if self.rows is not None and not (dims in (1, 2) and _inside(self.rows, self.shape[0])):
            raise TensorError(f"rows {self.rows} are no part of a tensor of shape {self.shape}")
        if self.columns is not None and not (dims == 2 and _inside(self.columns, self.shape[1])):
            raise TensorError(f"columns {self.columns} are no part of a shape {self.shape}")

    @property
    def size(self) -> tuple[int, ...]:
        """The shape of the part."""
        size = list(self.shape)
        if self.rows is not None:
            size[0] = self.rows[1] - self.rows[0]
        if self.columns is not None:
            size[1] = self.columns[1] - self.columns[0]
        return tuple(size)

    @property
    def row_slice(self) -> slice:
        """The rows as an index."""
        return slice(None) if self.rows is None else slice(*self.rows)

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The part of a tensor of this shape, as a view."""
        part = whole if self.rows is None else whole[self.row_slice]
        return part if self.columns is None else part[:, slice(*self.columns)]


def _inside(part: tuple[int, int], size: int) -> bool:
    return 0 <= part[0] <= part[1] <= size


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

    def read(self, name: str, region: Region | None = None) -> torch.Tensor | QuantizedTensor:
        """The stored tensor or a part of it, a view of the mapped file where possible.

        Never write to it. Of a part, no other bytes of the file are touched. Columns that do not
        begin and end with a block of a quantised matrix come expanded, in float32.

        Raises:
            TensorError: there is no such tensor, or ``region`` is part of another shape.
            UnsupportedFormatError: its encoding is not read.
            CorruptFileError: the file does not hold what its header says.
        """
        ...

    def read_into(self, name: str, out: torch.Tensor, region: Region | None = None) -> None:
        """Fill ``out``, converting or dequantising in pieces; scratch memory stays small.

        ``out`` has the stored shape, or the size of ``region``, a floating dtype, any strides and
        any device. Of a part, no other bytes of the file are touched.

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
