"""What a cached key or value takes, by the name of the cache's type. No torch here."""

from __future__ import annotations

VALUE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "int8": 1}
QUANTISED_KV_DTYPES = ("fp8", "int8")
SCALE_BYTES = 2
"""Of the bfloat16 scale beside each token's key and value of one head; see kernels.kv_rounding."""


def columns(kv_dtype: str, head_dim: int) -> int:
    """Elements that one head's key, or value, of a token has where it is stored.

    The scale of a quantised one counts as so many values of a byte.
    """
    return head_dim + (SCALE_BYTES if kv_dtype in QUANTISED_KV_DTYPES else 0)


def head_bytes(kv_dtype: str, head_dim: int) -> int:
    """Bytes that one head's key, or value, of a token takes, its scale included."""
    return columns(kv_dtype, head_dim) * VALUE_BYTES[kv_dtype]
