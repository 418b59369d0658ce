"""A GGUF file as a checkpoint: Hugging Face names, shapes and row order."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from layline.errors import CorruptFileError, TensorError, UnsupportedFormatError, nearest
from layline.weights.checkpoint import Region, TensorInfo, VocabularySource
from layline.weights.gguf_file import GGUFFile, GGUFTensor, read_encodings, shorten
from layline.weights.gguf_names import (
    hugging_face_config,
    hugging_face_generation,
    hugging_face_name,
)

if TYPE_CHECKING:
    import torch

    from layline.weights.quantized import QuantizedTensor

_PERMUTED = re.compile(r"model\.layers\.\d+\.self_attn\.([qk])_proj\.(weight|bias)")


class GGUFCheckpoint:
    """Weights of a GGUF file (architectures llama, qwen2, qwen3).

    The llama architecture stores the rows of q and k, heads apart, in the order of an interleaved
    rotary embedding; here they always appear in Hugging Face's order, two halves per head.

    Raises:
        CorruptFileError: the file does not hold what it should.
        UnsupportedFormatError: a tensor has an encoding that is not read.
        UnsupportedModelError: another architecture.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.kind = "gguf"
        self._file = GGUFFile(path)
        try:
            self._stored = self._name_tensors()
            shapes = {name: tensor.shape for name, tensor in self._stored.items()}
            self.config = hugging_face_config(path, self._file.metadata, shapes)
            self.generation = hugging_face_generation(self._file.metadata)
            self._check_encodings()
        except BaseException:
            self._file.close()
            raise
        self._infos = MappingProxyType(
            {
                name: TensorInfo(name, tensor.shape, tensor.encoding, path)
                for name, tensor in self._stored.items()
            }
        )
        self._bytes: torch.Tensor | None = None

    def infos(self) -> Mapping[str, TensorInfo]:
        """Every tensor by its Hugging Face name; names without one keep GGUF's."""
        return self._infos

    def read(self, name: str, region: Region | None = None) -> torch.Tensor | QuantizedTensor:
        """See ``Checkpoint.read``. q and k of the llama architecture are copies, the rest views."""
        import torch

        from layline.weights.quantized import QuantizedTensor

        stored = self._find(name)
        region = region or Region(stored.shape)
        value = self._part(name, stored, region)
        if not isinstance(value, QuantizedTensor) or region.columns is None:
            return value
        if value.shape == region.size:
            return value
        return value.expand_columns(region.columns[0], torch.empty(region.size))

    def read_into(self, name: str, out: torch.Tensor, region: Region | None = None) -> None:
        """See ``Checkpoint.read_into``. The mapped pages are given back as they are used up."""
        from layline.weights.pages import copy_mapped, release_pages
        from layline.weights.quantized import QuantizedTensor

        stored = self._find(name)
        region = region or Region(tuple(out.shape))
        value = self._part(name, stored, region)
        assert tuple(out.shape) == region.size
        mapped = self._raw(stored)
        if isinstance(value, QuantizedTensor):
            matrix = out.unsqueeze(0) if out.dim() == 1 else out.flatten(0, -2)
            if out.dim() > 2 and matrix.data_ptr() != out.data_ptr():
                raise TensorError(f"{self.path}: tensor {name} cannot be filled with these strides")
            if region.columns is None:
                value.dequantize(out.dtype, out=matrix)
            else:
                value.expand_columns(region.columns[0], matrix)
        elif value.untyped_storage().data_ptr() == mapped.untyped_storage().data_ptr():
            copy_mapped(value, out)
        else:
            out.copy_(value)
        release_pages(mapped)

    def release(self, name: str) -> None:
        """See ``Checkpoint.release``."""
        from layline.weights.pages import release_pages

        release_pages(self._raw(self._find(name)))

    def vocabulary(self) -> VocabularySource:
        """The file's own metadata."""
        return VocabularySource(gguf_metadata=self._file.metadata)

    def close(self) -> None:
        """Drop the mapping; it stays as long as tensors that view it."""
        self._bytes = None
        self._file.close()

    def _name_tensors(self) -> dict[str, GGUFTensor]:
        named: dict[str, GGUFTensor] = {}
        for tensor in self._file.tensors.values():
            name = hugging_face_name(tensor.name)
            if name in named:
                raise CorruptFileError(
                    f"{self.path}: tensors {shorten(named[name].name)} and "
                    f"{shorten(tensor.name)} are both {shorten(name)}"
                )
            named[name] = tensor
        return named

    def _check_encodings(self) -> None:
        for tensor in self._stored.values():
            if tensor.encoding not in read_encodings():
                raise UnsupportedFormatError(
                    f"{self.path}: tensor {shorten(tensor.name)} has type {tensor.encoding}, "
                    f"which is not one of {', '.join(read_encodings())}"
                )

    def _find(self, name: str) -> GGUFTensor:
        stored = self._stored.get(name)
        if stored is None:
            raise TensorError(
                f"{self.path}: no tensor {shorten(name)}{nearest(name, self._stored)}"
            )
        return stored

    def _part(
        self, name: str, stored: GGUFTensor, region: Region
    ) -> torch.Tensor | QuantizedTensor:
        """The region's rows and columns, of a quantised matrix the blocks that hold the columns."""
        import torch

        if region.shape != stored.shape:
            raise TensorError(
                f"{self.path}: tensor {name} has shape {stored.shape}, expected {region.shape}"
            )
        value = self._view(stored)
        index = self._row_order(name, stored)
        if index is None and isinstance(value, torch.Tensor):
            return region.of(value)
        whole = index is None and region.rows is None
        rows = region.row_slice if index is None else index[region.row_slice]
        if isinstance(value, torch.Tensor):
            return Region(region.shape, columns=region.columns).of(value)[rows]
        if len(stored.shape) == 1 and not whole:
            # The values of a quantised vector are the columns of its one row.
            return value.dequantize(torch.float32)[0, rows]
        if region.columns is not None:
            value = value.covering(*region.columns)
        return value if whole else value.rows(rows)

    def _raw(self, stored: GGUFTensor) -> torch.Tensor:
        """The tensor's bytes, uint8 [bytes], as a view of the mapped file."""
        import numpy as np
        import torch

        if self._bytes is None:
            if self._file.map.closed:
                raise CorruptFileError(f"{self.path}: closed before {stored.name} was read")
            with warnings.catch_warnings():
                # torch warns that the map is read-only, which is what protects the file.
                warnings.simplefilter("ignore", UserWarning)
                # NumPy keeps the map's buffer exported; torch alone would let close() unmap the
                # file under tensors that still view it.
                self._bytes = torch.from_numpy(np.frombuffer(self._file.map, dtype=np.uint8))
        return self._bytes[stored.start : stored.start + stored.nbytes]

    def _view(self, stored: GGUFTensor) -> torch.Tensor | QuantizedTensor:
        import torch

        from layline.weights.quantized import QuantizedTensor

        raw = self._raw(stored)
        plain = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
        if stored.encoding in plain:
            return raw.view(plain[stored.encoding]).view(stored.shape)
        columns = stored.shape[-1]
        rows = 1
        for size in stored.shape[:-1]:
            rows *= size
        return QuantizedTensor(stored.encoding, raw.view(rows, -1), (rows, columns))

    def _row_order(self, name: str, stored: GGUFTensor) -> torch.Tensor | None:
        """Which stored row each Hugging Face row is, int64 [rows]; None where they agree."""
        match = _PERMUTED.fullmatch(name)
        if match is None or self._file.metadata.get("general.architecture") != "llama":
            return None
        import torch

        key = "num_attention_heads" if match[1] == "q" else "num_key_value_heads"
        heads, rows = self.config[key], stored.shape[0]
        if rows % (2 * heads):
            raise TensorError(
                f"{self.path}: tensor {name} has {rows} rows, expected an even number for each "
                f"of {heads} heads"
            )
        return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).reshape(rows)
