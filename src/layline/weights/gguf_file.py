"""The header of a GGUF file, read from a memory map.

Layout (little-endian, versions 2 and 3): magic, version, number of tensors, number of metadata
entries; the entries (key, type, value); the tensor descriptions (name, dimensions, type, offset);
padding to the alignment; tensor data. Every count, length and offset is checked against the bytes
that are really there before it is used, so a hostile header costs time in proportion to the file
and no memory. Large arrays (a vocabulary) are only located here and decoded on request.
"""

from __future__ import annotations

import array
import mmap
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from layline.errors import CorruptFileError, UnsupportedFormatError

MAGIC = b"GGUF"
_MAX_NAME = 65535
_MAX_DIMENSIONS = 4
_MAX_ALIGNMENT = 1 << 20
_DEFAULT_ALIGNMENT = 32

_STRING = 8
_ARRAY = 9
# Metadata type number -> struct and array code of a scalar. Bool (7) is one byte.
_SCALARS = MappingProxyType(
    {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
)
_BOOL = 7

# ggml type number -> (name, values per block, bytes per block). Types that Layline does not read
# are here as well: their sizes are needed to check that tensors do not overlap, and their names
# to say what was found.
GGML_TYPES = MappingProxyType(
    {
        0: ("F32", 1, 4),
        1: ("F16", 1, 2),
        2: ("Q4_0", 32, 18),
        3: ("Q4_1", 32, 20),
        6: ("Q5_0", 32, 22),
        7: ("Q5_1", 32, 24),
        8: ("Q8_0", 32, 34),
        9: ("Q8_1", 32, 36),
        10: ("Q2_K", 256, 84),
        11: ("Q3_K", 256, 110),
        12: ("Q4_K", 256, 144),
        13: ("Q5_K", 256, 176),
        14: ("Q6_K", 256, 210),
        15: ("Q8_K", 256, 292),
        16: ("IQ2_XXS", 256, 66),
        17: ("IQ2_XS", 256, 74),
        18: ("IQ3_XXS", 256, 98),
        19: ("IQ1_S", 256, 50),
        20: ("IQ4_NL", 32, 18),
        21: ("IQ3_S", 256, 110),
        22: ("IQ2_S", 256, 82),
        23: ("IQ4_XS", 256, 136),
        24: ("I8", 1, 1),
        25: ("I16", 1, 2),
        26: ("I32", 1, 4),
        27: ("I64", 1, 8),
        28: ("F64", 1, 8),
        29: ("IQ1_M", 256, 56),
        30: ("BF16", 1, 2),
        34: ("TQ1_0", 256, 54),
        35: ("TQ2_0", 256, 66),
        39: ("MXFP4", 32, 17),
        40: ("NVFP4", 64, 36),
        41: ("Q1_0", 128, 18),
    }
)
_READ = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor's description; ``shape`` is outermost first, ``start`` counts from the file's."""

    name: str
    shape: tuple[int, ...]
    encoding: str
    start: int
    nbytes: int


@dataclass(frozen=True)
class _LazyArray:
    """Where an array's values are: not decoded until asked for."""

    kind: int
    count: int
    start: int


class GGUFMetadata(Mapping[str, Any]):
    """The metadata entries. Scalars and strings are ready; arrays are decoded at each access."""

    def __init__(
        self, values: Mapping[str, Any], decode: Callable[[str, _LazyArray], list[Any]]
    ) -> None:
        self._values = values
        self._decode = decode

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        return self._decode(key, value) if isinstance(value, _LazyArray) else value

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def array_length(self, key: str) -> int | None:
        """How many values the array ``key`` has, without decoding it; None if it is not one."""
        value = self._values.get(key)
        return value.count if isinstance(value, _LazyArray) else None


class GGUFFile:
    """A mapped GGUF file: ``metadata``, and ``tensors`` by their names in the file.

    Raises:
        CorruptFileError: the header is truncated, or says something that cannot be true.
        UnsupportedFormatError: another version or byte order, or a part of a split file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.map = _map_file(path)
        try:
            self._parse()
        except BaseException:
            self.map.close()
            raise

    def close(self) -> None:
        """Drop the mapping; it stays while tensors made from it are alive."""
        try:
            self.map.close()
        except BufferError:  # a tensor still looks at the mapped bytes
            return

    def _parse(self) -> None:
        reader = _Reader(self.path, self.map)
        num_tensors, num_entries = self._read_counts(reader)
        values: dict[str, Any] = {}
        for position in range(num_entries):
            key = reader.string(f"metadata key {position}", limit=_MAX_NAME)
            if key in values:
                raise reader.corrupt(f"metadata key {shorten(key)} appears twice")
            values[key] = reader.value(key)
        self.metadata = GGUFMetadata(values, self._decode_array)
        num_parts = values.get("split.count", 1)
        if isinstance(num_parts, int) and num_parts > 1:
            raise UnsupportedFormatError(
                f"{self.path}: part of a GGUF split into {num_parts} files, which is not read; "
                "join the parts with llama-gguf-split --merge"
            )
        alignment = values.get("general.alignment", _DEFAULT_ALIGNMENT)
        if (
            not isinstance(alignment, int)
            or not 8 <= alignment <= _MAX_ALIGNMENT
            or alignment & (alignment - 1)
        ):
            raise reader.corrupt(
                f"general.alignment is {shorten(alignment)}; expected a power of two from 8 to "
                f"{_MAX_ALIGNMENT}"
            )
        described = _read_tensors(reader, num_tensors, alignment)
        start = reader.position + -reader.position % alignment
        self.tensors = _place_tensors(reader, described, start)

    def _read_counts(self, reader: _Reader) -> tuple[int, int]:
        if reader.size < 4 or self.map[:4] != MAGIC:
            raise reader.corrupt("not a GGUF file (it does not start with 'GGUF')")
        reader.position = 4
        version = reader.scalar("I", "version")
        if version not in (2, 3):
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            what = "big-endian" if swapped in (2, 3) else f"version {version}"
            raise UnsupportedFormatError(
                f"{self.path}: GGUF {what} is not read; versions 2 and 3, little-endian, are"
            )
        num_tensors: int = reader.scalar("Q", "tensor count")
        num_entries: int = reader.scalar("Q", "metadata count")
        # The smallest description is a length, a dimension count, a type and an offset; the
        # smallest entry a length, a type and one byte.
        reader.room(num_tensors * 24, f"{num_tensors} tensors")
        reader.room(num_entries * 13, f"{num_entries} metadata entries")
        return num_tensors, num_entries

    def _decode_array(self, key: str, location: _LazyArray) -> list[Any]:
        if self.map.closed:
            raise CorruptFileError(f"{self.path}: closed before {key} was read")
        reader = _Reader(self.path, self.map)
        reader.position = location.start
        if location.kind == _STRING:
            return reader.strings(key, location.count)
        values = array.array(_SCALARS[location.kind])
        end = location.start + location.count * values.itemsize
        values.frombytes(self.map[location.start : end])
        if sys.byteorder == "big":
            values.byteswap()
        return [bool(v) for v in values] if location.kind == _BOOL else values.tolist()


class _Reader:
    """A position in the mapped file; every step is checked against the file's end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.position = 0

    def corrupt(self, problem: str) -> CorruptFileError:
        return CorruptFileError(f"{self.path}: {problem}")

    def room(self, num_bytes: int, what: str) -> None:
        if num_bytes > self.size - self.position:
            raise self.corrupt(
                f"{what} need at least {num_bytes} bytes at offset {self.position}, "
                f"but the file has {self.size - self.position} left"
            )

    def scalar(self, code: str, what: str) -> Any:
        size = struct.calcsize("<" + code)
        self.room(size, what)
        (value,) = struct.unpack_from("<" + code, self.data, self.position)
        self.position += size
        return value

    def string(self, what: str, limit: int | None = None) -> str:
        position = self.position
        if self.size - position < 8:
            raise self.corrupt(f"ends inside the length of {shorten(what)}")
        (length,) = _LENGTH.unpack_from(self.data, position)
        if length > self.size - position - 8 or (limit is not None and length > limit):
            raise self.corrupt(
                f"{shorten(what)} at offset {position} claims {length} bytes; "
                f"{min(self.size - position - 8, limit or self.size)} are possible"
            )
        self.position = position + 8 + length
        try:
            return self.data[position + 8 : self.position].decode("utf-8")
        except UnicodeDecodeError:
            raise self.corrupt(f"{shorten(what)} at offset {position} is not valid UTF-8") from None

    def strings(self, what: str, count: int) -> list[str]:
        """``count`` strings in a row. A tokenizer has a hundred thousand, so the loop is tight."""
        unpack, data, position = _LENGTH.unpack_from, self.data, self.position
        texts: list[str] = []
        keep = texts.append
        try:
            for _ in range(count):
                start = position + 8
                position = start + unpack(data, position)[0]
                keep(data[start:position].decode())
        except (struct.error, UnicodeDecodeError):
            raise self.corrupt(
                f"{shorten(what)}: string {len(texts)} of {count} is cut off or not valid UTF-8"
            ) from None
        if position > self.size:
            raise self.corrupt(f"the last string of {shorten(what)} passes the end of the file")
        self.position = position
        return texts

    def value(self, key: str) -> Any:
        kind = self.scalar("I", f"type of {shorten(key)}")
        if kind == _STRING:
            return self.string(key)
        if kind == _ARRAY:
            return self.skip_array(key)
        if kind not in _SCALARS:
            raise self.corrupt(f"metadata {shorten(key)} has unknown type {kind}")
        value = self.scalar(_SCALARS[kind], shorten(key))
        return bool(value) if kind == _BOOL else value

    def skip_array(self, key: str) -> _LazyArray:
        kind = self.scalar("I", f"element type of {shorten(key)}")
        count = self.scalar("Q", f"length of {shorten(key)}")
        location = _LazyArray(kind, count, self.position)
        if kind in _SCALARS:
            num_bytes = count * struct.calcsize("<" + _SCALARS[kind])
            self.room(num_bytes, f"{count} values of {shorten(key)}")
            self.position += num_bytes
        elif kind == _STRING:
            self.room(count * 8, f"{count} strings of {shorten(key)}")
            self._skip_strings(key, count)
        else:
            what = "nested arrays are" if kind == _ARRAY else f"element type {kind} is"
            raise self.corrupt(f"metadata {shorten(key)}: {what} not read")
        return location

    def _skip_strings(self, key: str, count: int) -> None:
        # The hot loop of opening a file: two steps for each of some hundred thousand strings.
        unpack, data, position = _LENGTH.unpack_from, self.data, self.position
        last = self.size - 8
        for index in range(count):
            if position > last:
                raise self.corrupt(f"ends inside {shorten(key)}, string {index} of {count}")
            position += 8 + unpack(data, position)[0]
        if position > self.size:
            raise self.corrupt(f"the last string of {shorten(key)} passes the end of the file")
        self.position = position


_LENGTH = struct.Struct("<Q")


def read_encodings() -> tuple[str, ...]:
    """The tensor encodings that are read from GGUF files."""
    return _READ


def shorten(value: object) -> str:
    """``value`` as one printable line of at most 80 characters, for error messages."""
    text = value if isinstance(value, str) and value.isprintable() else repr(value)
    return text if len(text) <= 80 else f"{text[:60]}...{text[-12:]}"


def _map_file(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:
        raise CorruptFileError(f"{path}: the file is empty") from None
    except OSError as error:
        raise CorruptFileError(f"{path}: cannot be read ({error.strerror or error})") from None


def _read_tensors(reader: _Reader, count: int, alignment: int) -> list[GGUFTensor]:
    """The descriptions in file order; ``start`` is still relative to the tensor data."""
    described = []
    for position in range(count):
        name = reader.string(f"name of tensor {position}", limit=_MAX_NAME)
        label = f"tensor {shorten(name)}"
        num_dims = reader.scalar("I", f"dimension count of {label}")
        if not 1 <= num_dims <= _MAX_DIMENSIONS:
            raise reader.corrupt(f"{label} has {num_dims} dimensions; expected 1 to 4")
        dims = [reader.scalar("Q", f"shape of {label}") for _ in range(num_dims)]
        kind = reader.scalar("I", f"type of {label}")
        offset = reader.scalar("Q", f"offset of {label}")
        if kind not in GGML_TYPES:
            raise UnsupportedFormatError(
                f"{reader.path}: {label} has unknown ggml type {kind}; supported: "
                f"{', '.join(_READ)}"
            )
        encoding, block_values, block_bytes = GGML_TYPES[kind]
        num_values = 1
        for dim in dims:
            num_values *= dim
        if not num_values or dims[0] % block_values:
            raise reader.corrupt(
                f"{label} of type {encoding} has shape {dims[::-1]}; rows must be non-empty "
                f"multiples of {block_values}"
            )
        if offset % alignment:
            raise reader.corrupt(f"{label} starts at {offset}, not a multiple of {alignment}")
        nbytes = num_values // block_values * block_bytes
        described.append(GGUFTensor(name, tuple(reversed(dims)), encoding, offset, nbytes))
    return described


def _place_tensors(
    reader: _Reader, described: list[GGUFTensor], data_start: int
) -> dict[str, GGUFTensor]:
    """Absolute positions, after checking that tensors fit in the file and do not overlap."""
    placed: dict[str, GGUFTensor] = {}
    previous_end, previous_name = 0, ""
    for tensor in sorted(described, key=lambda tensor: tensor.start):
        end = tensor.start + tensor.nbytes
        if data_start + end > reader.size:
            raise reader.corrupt(
                f"tensor {shorten(tensor.name)} needs bytes up to {data_start + end}, but the "
                f"file has {reader.size}; it may be truncated"
            )
        if tensor.start < previous_end:
            raise reader.corrupt(
                f"tensors {shorten(previous_name)} and {shorten(tensor.name)} overlap"
            )
        if tensor.name in placed:
            raise reader.corrupt(f"tensor {shorten(tensor.name)} appears twice")
        previous_end, previous_name = end, tensor.name
        placed[tensor.name] = GGUFTensor(
            tensor.name, tensor.shape, tensor.encoding, data_start + tensor.start, tensor.nbytes
        )
    return placed
