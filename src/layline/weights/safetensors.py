"""A Hugging Face folder: config.json and one or more safetensors files.

Headers are parsed here, without torch, so that every error can name the file and the tensor; the
safetensors library then maps the file and checks it again.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from layline.errors import (
    CorruptFileError,
    ModelNotFoundError,
    TensorError,
    UnsupportedFormatError,
    nearest,
)
from layline.weights.checkpoint import Region, TensorInfo, VocabularySource
from layline.weights.folders import file_inside, parse_json_object, read_json_object
from layline.weights.gguf_file import shorten

if TYPE_CHECKING:
    import torch

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
READ_ENCODINGS = ("F32", "F16", "BF16")
# The format's own limit on a header.
_MAX_HEADER = 100_000_000
_BITS = MappingProxyType(
    {
        **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
        **dict.fromkeys(("F32", "I32", "U32"), 32),
        **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
        **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    }
)


class SafetensorsCheckpoint:
    """Weights of a Hugging Face folder.

    With an index, the index alone decides which file each tensor comes from; copies of it in
    other files, and tensors the index does not list, are ignored.

    Raises:
        ModelNotFoundError: the folder has no config.json or no weights.
        UnsupportedFormatError: it has weights of a kind that is not read.
        CorruptFileError: a file is missing, truncated, outside the folder or not what it should be.
        TensorError: the index places a tensor in a file that does not hold it.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory
        self.kind = "safetensors"
        config = file_inside(directory, "config.json")
        index = file_inside(directory, INDEX_NAME)
        single = None if index else _single_file(directory)
        if config is None:
            raise ModelNotFoundError(f"{directory}: no config.json beside the weights")
        self.config = read_json_object(config)
        generation = file_inside(directory, "generation_config.json")
        self.generation = read_json_object(generation) if generation else {}
        if index is not None:
            infos = _infos_by_index(directory, index)
        else:
            assert single is not None
            infos = read_header(single)
        self._infos = MappingProxyType(infos)
        self._open_files: dict[Path, Any] = {}

    def infos(self) -> Mapping[str, TensorInfo]:
        """Every tensor of the checkpoint by name."""
        return self._infos

    def read(self, name: str, region: Region | None = None) -> torch.Tensor:
        """See ``Checkpoint.read``: always a view of the mapped file."""
        tensor = self._whole(name)
        if region is None:
            return tensor
        self._check_shape(name, region.shape)
        return region.of(tensor)

    def read_into(self, name: str, out: torch.Tensor, region: Region | None = None) -> None:
        """See ``Checkpoint.read_into``. The mapped pages are given back as they are used up."""
        from layline.weights.pages import copy_mapped

        if region is None:
            region = Region(tuple(out.shape))
        assert tuple(out.shape) == region.size
        copy_mapped(self.read(name, region), out)

    def release(self, name: str) -> None:
        """See ``Checkpoint.release``; nothing is kept that could be let go."""

    def vocabulary(self) -> VocabularySource:
        """The folder."""
        return VocabularySource(directory=self.path)

    def close(self) -> None:
        """Drop the mappings; they stay as long as tensors that view them."""
        self._open_files.clear()

    def _whole(self, name: str) -> torch.Tensor:
        """A view of the whole tensor, none of it read."""
        info = self._infos.get(name)
        if info is None:
            raise TensorError(f"{self.path}: no tensor {shorten(name)}{nearest(name, self._infos)}")
        if info.encoding not in READ_ENCODINGS:
            raise UnsupportedFormatError(
                f"{info.file}: tensor {shorten(name)} has type {info.encoding}, which is not one "
                f"of {', '.join(READ_ENCODINGS)}"
            )
        from safetensors import SafetensorError, safe_open

        try:
            if info.file not in self._open_files:
                self._open_files[info.file] = safe_open(info.file, framework="pt")
            tensor: torch.Tensor = self._open_files[info.file].get_tensor(name)
        except (SafetensorError, OSError, RuntimeError) as error:
            reason = " ".join(str(error).split())[:120]
            raise CorruptFileError(f"{info.file}: tensor {shorten(name)}: {reason}") from None
        return tensor

    def _check_shape(self, name: str, expected: tuple[int, ...]) -> None:
        info = self._infos[name]
        if info.shape != expected:
            raise TensorError(
                f"{info.file}: tensor {shorten(name)} has shape {info.shape}, expected {expected}"
            )


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors a safetensors file describes, after checking that its data is all there.

    Raises:
        CorruptFileError: truncated, overlapping, or a header that cannot be true.
    """
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            start = file.read(8)
            if len(start) < 8:
                raise CorruptFileError(f"{path}: {size} bytes are too few for a safetensors file")
            (length,) = struct.unpack("<Q", start)
            if length > min(size - 8, _MAX_HEADER):
                raise CorruptFileError(
                    f"{path}: claims a header of {length} bytes; at most "
                    f"{min(size - 8, _MAX_HEADER)} are possible in a file of {size}"
                )
            header = parse_json_object(file.read(length), f"{path}: header")
    except OSError as error:
        raise CorruptFileError(f"{path}: cannot be read ({error.strerror or error})") from None
    header.pop("__metadata__", None)
    spans: list[tuple[int, int, str]] = []
    infos: dict[str, TensorInfo] = {}
    for name, entry in header.items():
        info, begin, end = _check_entry(path, name, entry)
        infos[name] = info
        spans.append((begin, end, name))
    _check_spans(path, sorted(spans), size - 8 - length)
    return infos


def _check_entry(path: Path, name: str, entry: Any) -> tuple[TensorInfo, int, int]:
    label = f"{path}: tensor {shorten(name)}"
    if not isinstance(entry, dict):
        raise CorruptFileError(f"{label} is not described by an object")
    encoding: Any = entry.get("dtype")
    shape: Any = entry.get("shape")
    offsets: Any = entry.get("data_offsets")
    if not isinstance(encoding, str):
        raise CorruptFileError(f"{label} has no dtype")
    if not _whole_numbers(shape):
        raise CorruptFileError(f"{label} has shape {shorten(repr(shape))}")
    if not _whole_numbers(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CorruptFileError(f"{label} has data offsets {shorten(repr(offsets))}")
    begin, end = offsets
    if encoding in _BITS:
        expected = math.prod(shape) * _BITS[encoding] // 8
        if end - begin != expected:
            raise CorruptFileError(
                f"{label} of type {encoding} and shape {shape} needs {expected} bytes, "
                f"but its offsets span {end - begin}"
            )
    return TensorInfo(name, tuple(shape), encoding, path), begin, end


def _whole_numbers(value: Any) -> bool:
    if not isinstance(value, list) or len(value) > 64:
        return False
    return all(type(entry) is int and 0 <= entry < 1 << 63 for entry in value)


def _check_spans(path: Path, spans: list[tuple[int, int, str]], available: int) -> None:
    if not spans:
        return
    last_end, last_name = spans[-1][1], spans[-1][2]
    if last_end > available:
        raise CorruptFileError(
            f"{path}: truncated: tensor {shorten(last_name)} ends at byte {last_end} of the data, "
            f"but the file holds {available}"
        )
    if spans[0][0] or last_end != available:
        raise CorruptFileError(
            f"{path}: tensors cover bytes {spans[0][0]} to {last_end} of {available} in the file"
        )
    for (_, end, name), (begin, _, following) in pairwise(spans):
        if begin != end:
            problem = "overlap" if begin < end else "leave a gap"
            raise CorruptFileError(
                f"{path}: tensors {shorten(name)} and {shorten(following)} {problem}"
            )


def _infos_by_index(directory: Path, index: Path) -> dict[str, TensorInfo]:
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CorruptFileError(f"{index}: expected a 'weight_map' from tensor to file names")
    headers: dict[str, dict[str, TensorInfo]] = {}
    infos: dict[str, TensorInfo] = {}
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str):
            raise CorruptFileError(
                f"{index}: tensor {shorten(name)} maps to {shorten(repr(file_name))}, "
                "expected a file name"
            )
        if file_name not in headers:
            headers[file_name] = _shard_header(directory, file_name, name)
        info = headers[file_name].get(name)
        if info is None:
            raise TensorError(
                f"{directory / file_name}: no tensor {shorten(name)}, which {INDEX_NAME} "
                "places there"
            )
        infos[name] = info
    return infos


def _shard_header(directory: Path, file_name: str, tensor: str) -> dict[str, TensorInfo]:
    path = file_inside(directory, file_name)
    if path is None:
        hint = ""
        if (directory / SINGLE_NAME).is_file() and file_name != SINGLE_NAME:
            hint = f"; if {SINGLE_NAME} is the whole model, remove the index"
        raise CorruptFileError(
            f"{directory / shorten(file_name)}: missing, though {INDEX_NAME} places tensor "
            f"{shorten(tensor)} there{hint}"
        )
    return read_header(path)


def _single_file(directory: Path) -> Path:
    """The only safetensors file of a folder without an index."""
    if (single := file_inside(directory, SINGLE_NAME)) is not None:
        return single
    names = sorted(path.name for path in directory.iterdir())
    weights = [name for name in names if name.endswith(".safetensors")]
    if len(weights) == 1 and (path := file_inside(directory, weights[0])) is not None:
        return path
    if weights:
        raise CorruptFileError(
            f"{directory}: {len(weights)} safetensors files but no {INDEX_NAME} to say which "
            "tensor is where"
        )
    pickles = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]
    if pickles:
        raise UnsupportedFormatError(
            f"{directory}: only pickle weights ({shorten(pickles[0])}), which are never loaded "
            "because they can run code; convert the model to safetensors"
        )
    files = [name for name in names if name.endswith(".gguf")]
    if files:
        raise ModelNotFoundError(
            f"{directory}: no safetensors weights; for GGUF give the file, "
            f"{directory / shorten(files[0])}"
        )
    if "config.json" in names:
        raise ModelNotFoundError(
            f"{directory}: a config.json but no weights; for random weights use config:{directory}"
        )
    what = "an empty folder" if not names else "no config.json and no safetensors weights"
    raise ModelNotFoundError(f"{directory}: {what}")
