"""What goes ahead of a payload between processes: what it is, and which one it is.

gloo delivers a short message into a longer buffer, and a message of another step into this one's,
without a word. So the receiver learns the size from a header of fixed length, and compares the
header's cut and sequence number with those that it waits for.
"""

from __future__ import annotations

import struct

import msgspec
import torch
from torch import Tensor

from layline.errors import TransferError
from layline.pipeline.payload import Layout, Part, aligned

HEADER_BYTES = 1024
MOST_BYTES = 1 << 36  # A payload that says it is larger is not believed.
_LENGTH = struct.Struct(">I")
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float32, torch.bfloat16, torch.float16, torch.float64),
        *(torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}


class Header(msgspec.Struct, array_like=True, frozen=True):
    """``parts`` are (name, shape, dtype); ``size`` is what the layout made of them takes."""

    cut: str
    sequence: int
    parts: list[tuple[str, list[int], str]]
    size: int


def pack(cut: str, sequence: int, layout: Layout) -> Tensor:
    """The header as uint8 [HEADER_BYTES].

    Raises TransferError for a dtype that is not sent and for names too long to fit.
    """
    parts = []
    for part in layout.parts:
        dtype = str(part.dtype).removeprefix("torch.")
        if dtype not in DTYPES:
            raise TransferError(
                f"{cut}: dtype {dtype} is not sent; expected one of {', '.join(DTYPES)}"
            )
        parts.append((part.name, list(part.shape), dtype))
    encoded = msgspec.msgpack.encode(Header(cut, sequence, parts, layout.size))
    framed = _LENGTH.pack(len(encoded)) + encoded
    if len(framed) > HEADER_BYTES:
        raise TransferError(
            f"{cut}: the header of {len(parts)} tensors takes {len(framed)} bytes; expected at "
            f"most {HEADER_BYTES}"
        )
    return torch.frombuffer(bytearray(framed.ljust(HEADER_BYTES, b"\0")), dtype=torch.uint8)


def unpack(received: Tensor, cut: str, sequence: int) -> Layout:
    """The layout of the payload behind a header that should be number ``sequence`` of ``cut``.

    Raises TransferError when it is another's, or no header at all.
    """
    framed = received.numpy().tobytes()
    (length,) = _LENGTH.unpack(framed[: _LENGTH.size])
    try:
        header = msgspec.msgpack.decode(framed[_LENGTH.size :][:length], type=Header)
    except msgspec.DecodeError as error:
        raise TransferError(
            f"{cut}: what came for #{sequence} is no header of a payload: {error}"
        ) from error
    if (header.cut, header.sequence) != (cut, sequence):
        raise TransferError(
            f"{cut}: #{header.sequence} of {header.cut} came where #{sequence} was due; the "
            "processes run different steps"
        )
    return _layout(header)


def _layout(header: Header) -> Layout:
    parts, offset = [], 0
    for name, shape, dtype_name in header.parts:
        dtype = DTYPES.get(dtype_name)
        if dtype is None or any(length < 0 for length in shape):
            raise TransferError(
                f"{header.cut}: #{header.sequence} has {name!r} of dtype {dtype_name} and shape "
                f"{shape}; expected one of {', '.join(DTYPES)} and lengths from 0"
            )
        size = dtype.itemsize
        for length in shape:
            size *= length
        parts.append(Part(name, tuple(shape), dtype, offset, size))
        offset += aligned(size)
    if offset != header.size or not parts or offset > MOST_BYTES:
        raise TransferError(
            f"{header.cut}: #{header.sequence} announces {header.size} bytes for tensors that "
            f"take {offset}"
        )
    return Layout(tuple(parts), offset)
