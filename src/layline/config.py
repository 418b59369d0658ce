"""The engine's configuration: what flags and keywords say, resolved and checked.

Flags arrive here as keyword arguments with underscores. Nothing here imports torch.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from layline.errors import UsageError, one_of

DEFAULT_MODEL = "smollm2-135m"
DEVICES = ("cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16", "float16")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?b)?", re.IGNORECASE)
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
CPU_KERNELS = ("auto", "torch")
MAX_THREADS = 1024
MAX_SIZE = 1 << 60


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How one engine runs.

    ``kv_memory`` is in bytes; None lets the engine size the cache for ``max_running`` requests of
    ``max_model_len`` tokens within a cap. ``max_model_len`` None means the model's own context.
    ``prefill_tokens`` bounds the prompt tokens of one step.
    """

    model: str = DEFAULT_MODEL
    device: str = "cpu"
    dtype: str = "auto"
    threads: int | None = None
    max_model_len: int | None = None
    kv_memory: int | None = None
    max_running: int = 16
    prefill_tokens: int = 2048
    seed: int = 0

    def __post_init__(self) -> None:
        if self.device not in DEVICES:
            raise UsageError(one_of("device", self.device, DEVICES))
        if self.dtype not in DTYPES:
            raise UsageError(one_of("dtype", self.dtype, DTYPES))
        _require_positive("threads", self.threads, MAX_THREADS)
        _require_positive("max_model_len", self.max_model_len)
        if self.max_model_len == 1:
            raise UsageError("max_model_len 1 must be at least 2: a prompt token and its answer")
        _require_positive("kv_memory", self.kv_memory)
        _require_positive("max_running", self.max_running)
        _require_positive("prefill_tokens", self.prefill_tokens)
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise UsageError(f"seed {self.seed!r} must be an integer")
        cpu_kernels()


def parse_size(value: int | str | None, name: str = "kv_memory") -> int | None:
    """Bytes from a number or from text such as ``512M`` or ``2GiB`` (powers of 1024)."""
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    size = float(match[1]) * _UNITS[match[2].lower()] if match else 0.0
    if not 1 <= size < MAX_SIZE:
        raise UsageError(
            f"{name} {shorten(value)} is not a size; expected bytes or a form like 512M, 2G"
        )
    return int(size)


def shorten(value: object, most: int = 60) -> str:
    """``repr(value)``, cut to a length that fits a message."""
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}..."


def cpu_kernels() -> str:
    """LAYLINE_CPU_KERNELS: ``auto``, or ``torch`` to do without the native kernels.

    Raises UsageError for anything else.
    """
    asked = os.environ.get("LAYLINE_CPU_KERNELS") or "auto"
    if asked not in CPU_KERNELS:
        raise UsageError(one_of("LAYLINE_CPU_KERNELS", asked, CPU_KERNELS))
    return asked


def default_threads() -> int:
    """OMP_NUM_THREADS where it is a number, else the cores this process may run on."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return int(asked) if asked.isdecimal() and 0 < int(asked) <= MAX_THREADS else usable_cores()


def usable_cores() -> int:
    """Cores this process may run on."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def _require_positive(name: str, value: int | None, most: int | None = None) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{name} {value!r} must be a positive integer")
    if most is not None and value > most:
        raise UsageError(f"{name} {value} is too large; the most is {most}")
