"""Tiny GGUF files: complete ones by the gguf package, hostile ones byte by byte."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB, CONTEXT = 64, 4, 2, 16, 96, 40, 128


def tiny_arrays(*, tied: bool = True, bias: bool = False, qk_norm: bool = False) -> dict[str, Any]:
    """float32 tensors of a one-layer model under GGUF names, every value distinct in its tensor."""
    rng = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return rng.normal(0, columns**-0.5, (rows, columns)).astype(np.float32)

    def vector(size: int) -> np.ndarray:
        return rng.normal(1, 0.1, size).astype(np.float32)

    arrays = {
        "token_embd.weight": matrix(VOCAB, HIDDEN),
        "output_norm.weight": vector(HIDDEN),
        "blk.0.attn_norm.weight": vector(HIDDEN),
        "blk.0.ffn_norm.weight": vector(HIDDEN),
        "blk.0.attn_q.weight": matrix(HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_k.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_v.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_output.weight": matrix(HIDDEN, HEADS * HEAD_DIM),
        "blk.0.ffn_gate.weight": matrix(FFN, HIDDEN),
        "blk.0.ffn_up.weight": matrix(FFN, HIDDEN),
        "blk.0.ffn_down.weight": matrix(HIDDEN, FFN),
    }
    if not tied:
        arrays["output.weight"] = matrix(VOCAB, HIDDEN)
    if bias:
        arrays["blk.0.attn_q.bias"] = vector(HEADS * HEAD_DIM)
        arrays["blk.0.attn_k.bias"] = vector(KV_HEADS * HEAD_DIM)
        arrays["blk.0.attn_v.bias"] = vector(KV_HEADS * HEAD_DIM)
    if qk_norm:
        arrays["blk.0.attn_q_norm.weight"] = vector(HEAD_DIM)
        arrays["blk.0.attn_k_norm.weight"] = vector(HEAD_DIM)
    return arrays


def write_gguf(
    path: Path,
    arrays: Mapping[str, np.ndarray] | None = None,
    *,
    architecture: str = "llama",
    encodings: Mapping[str, str] | None = None,
    extra: Mapping[str, Any] | None = None,
    without: tuple[str, ...] = (),
) -> Path:
    """Write a model with the gguf package's writer.

    ``encodings`` stores a tensor quantised by that package; ``extra`` adds or replaces metadata
    (keys starting with a dot belong to the architecture), ``without`` leaves keys out.
    """
    import gguf

    writer = gguf.GGUFWriter(path, architecture)
    metadata: dict[str, Any] = {
        ".context_length": CONTEXT,
        ".embedding_length": HIDDEN,
        ".block_count": 1,
        ".feed_forward_length": FFN,
        ".attention.head_count": HEADS,
        ".attention.head_count_kv": KV_HEADS,
        ".attention.layer_norm_rms_epsilon": 1e-5,
        ".rope.freq_base": 5000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [f"tok\u00e9{n}" for n in range(VOCAB)],
        "tokenizer.ggml.token_type": [1] * VOCAB,
        "tokenizer.ggml.eos_token_id": 2,
    }
    metadata.update(extra or {})
    for key, value in metadata.items():
        if key not in without:
            _add(writer, key if not key.startswith(".") else architecture + key, value)
    for name, array in (arrays if arrays is not None else tiny_arrays()).items():
        encoding = (encodings or {}).get(name)
        if encoding is None:
            writer.add_tensor(name, array)
        else:
            kind = gguf.GGMLQuantizationType[encoding]
            packed = array if array.dtype == np.uint8 else gguf.quants.quantize(array, kind)
            writer.add_tensor(name, packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def text(value: str | bytes) -> bytes:
    """A GGUF string."""
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def entry(key: str, kind: int, payload: bytes) -> bytes:
    """A metadata entry."""
    return text(key) + struct.pack("<I", kind) + payload


def tensor(name: str, dims: tuple[int, ...], kind: int, offset: int) -> bytes:
    """A tensor description; ``dims`` innermost first, as in the file."""
    head = text(name) + struct.pack("<I", len(dims))
    return head + struct.pack(f"<{len(dims)}Q", *dims) + struct.pack("<IQ", kind, offset)


def raw_gguf(
    entries: list[bytes] | None = None,
    tensors: list[bytes] | None = None,
    *,
    version: int = 3,
    num_entries: int | None = None,
    num_tensors: int | None = None,
    data: bytes = b"",
    alignment: int = 32,
) -> bytes:
    """A file from its parts, with counts that may lie."""
    entries, tensors = entries or [], tensors or []
    head = b"GGUF" + struct.pack(
        "<IQQ",
        version,
        len(tensors) if num_tensors is None else num_tensors,
        len(entries) if num_entries is None else num_entries,
    )
    head += b"".join(entries) + b"".join(tensors)
    return head + b"\0" * (-len(head) % alignment) + data
