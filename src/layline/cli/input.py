"""What commands read: standard input, and text that must be UTF-8."""

from __future__ import annotations

import sys
from typing import BinaryIO

from layline.errors import PromptError, UsageError


def require_stdin(instead: str) -> None:
    """Raise UsageError when the process was started without a standard input."""
    # Typeshed says that there always is one; Python sets None for a closed descriptor.
    if getattr(sys, "stdin", None) is None:
        raise UsageError(f"standard input is closed; expected {instead}")


def stdin_bytes() -> BinaryIO:
    """Standard input without a guess at its encoding."""
    return sys.stdin.buffer


def utf8(data: bytes, name: str) -> str:
    """``data`` as text. Raises PromptError, which says ``name`` and the first wrong byte."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise PromptError(
            f"{name} has byte 0x{data[error.start]:02x} at position {error.start}; "
            "expected UTF-8 text"
        ) from None
