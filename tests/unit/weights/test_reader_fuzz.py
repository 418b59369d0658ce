"""Both readers on damaged files: a documented error or a consistent checkpoint, nothing else."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save
from tiny_gguf import entry, raw_gguf, tensor, text, write_gguf

from layline.errors import CheckpointError, UsageError
from layline.weights.opening import open_checkpoint
from layline.weights.quantized import QuantizedTensor

SETTINGS = settings(
    max_examples=150, deadline=2000, suppress_health_check=[HealthCheck.too_slow], database=None
)
# Values that overflow, wrap or barely miss when a reader trusts them.
EDGES = [0, 1, 3, 8, 9, 31, 32, 33, 255, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32]
EDGES += [(1 << 61) + 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 32, (1 << 64) - 1]


@cache
def valid_gguf() -> bytes:
    with TemporaryDirectory() as folder:
        return write_gguf(
            Path(folder) / "m.gguf", encodings={"blk.0.ffn_up.weight": "Q8_0"}
        ).read_bytes()


@cache
def small_gguf() -> bytes:
    """A header of a few hundred bytes, so that mutations hit every field of it."""
    entries = [
        entry("general.architecture", 8, text("llama")),
        entry("names", 9, struct.pack("<IQ", 8, 2) + text("a") + text("bc")),
        entry("numbers", 9, struct.pack("<IQ3f", 6, 3, 1, 2, 3)),
        entry("llama.embedding_length", 4, struct.pack("<I", 32)),
    ]
    tensors = [tensor("token_embd.weight", (32, 2), 8, 0), tensor("b", (8,), 0, 96)]
    return raw_gguf(entries, tensors, data=b"\1" * 128)


@cache
def valid_safetensors() -> bytes:
    tensors = {"a.weight": torch.ones(3, 4), "b": torch.zeros(2, dtype=torch.bfloat16)}
    return save(tensors, metadata={"format": "pt"})


@st.composite
def damaged(draw: st.DrawFn, source: Callable[[], bytes], header: int) -> bytes:
    """The file with a few bytes or 4- and 8-byte fields changed, and perhaps cut or extended."""
    raw = bytearray(source())
    header = min(header, len(raw))
    for _ in range(draw(st.integers(0, 4))):
        size = draw(st.sampled_from([1, 4, 8]))
        where = draw(st.integers(0, header - size))
        value = draw(st.one_of(st.sampled_from(EDGES), st.integers(0, (1 << 64) - 1)))
        raw[where : where + size] = (value & ((1 << 8 * size) - 1)).to_bytes(size, "little")
    end = draw(st.one_of(st.just(len(raw)), st.integers(0, len(raw)), st.integers(0, header)))
    return bytes(raw[:end]) + draw(st.binary(max_size=8))


def check_message(error: Exception) -> None:
    assert "\n" not in str(error)
    assert len(str(error)) < 600


def read_everything(model: Path) -> None:
    """Open and read every tensor; only documented errors may come out."""
    try:
        checkpoint = open_checkpoint(model)
    except (CheckpointError, UsageError) as error:
        check_message(error)
        return
    for name, info in checkpoint.infos().items():
        try:
            value = checkpoint.read(name)
        except (CheckpointError, UsageError) as error:
            check_message(error)
            continue
        if isinstance(value, QuantizedTensor):
            value = value.dequantize(torch.float32).view(info.shape)
        assert tuple(value.shape) == info.shape
        value.float().sum()
    source = checkpoint.vocabulary().gguf_metadata
    for key in source or ():
        try:
            source[key]
        except CheckpointError:
            continue
    checkpoint.close()


@SETTINGS
@given(damaged(small_gguf, 400))
def test_damaged_small_gguf(raw: bytes) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "m.gguf"
        path.write_bytes(raw)
        read_everything(path)


@SETTINGS
@given(damaged(valid_gguf, 4000))
def test_damaged_gguf(raw: bytes) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "m.gguf"
        path.write_bytes(raw)
        read_everything(path)


@SETTINGS
@given(damaged(valid_safetensors, 260))
def test_damaged_safetensors(raw: bytes) -> None:
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text("{}")
        (Path(folder) / "model.safetensors").write_bytes(raw)
        read_everything(Path(folder))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=8,
)


@SETTINGS
@given(
    st.dictionaries(
        st.sampled_from(["a.weight", "b", "c"]),
        st.sampled_from(["model.safetensors", "m2.safetensors", "../x", "", "a\0b"]) | JSON,
        max_size=3,
    )
    | JSON,
    st.binary(max_size=20),
)
def test_odd_index(weight_map: object, tail: bytes) -> None:
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text("{}")
        (Path(folder) / "model.safetensors").write_bytes(valid_safetensors())
        index = json.dumps({"weight_map": weight_map}).encode() + tail
        (Path(folder) / "model.safetensors.index.json").write_bytes(index)
        read_everything(Path(folder))


@SETTINGS
@given(st.dictionaries(st.sampled_from(["a.weight", "b", "c", "\n"]), JSON, max_size=3))
def test_odd_safetensors_header(header: object) -> None:
    text_bytes = json.dumps(header).encode()
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text("{}")
        raw = struct.pack("<Q", len(text_bytes)) + text_bytes + b"\0" * 16
        (Path(folder) / "model.safetensors").write_bytes(raw)
        read_everything(Path(folder))
