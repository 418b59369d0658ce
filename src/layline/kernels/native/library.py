"""The compiled library of this process: which instruction set, or why there is none.

Work is divided among torch's own threads: the library is handed ``GOMP_parallel`` of the OpenMP
library that torch is linked with, so that there is one pool of threads and one count of them.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from layline.config import cpu_kernels
from layline.errors import KernelError
from layline.kernels.native.build import INSTRUCTION_SETS, InstructionSet, compiled, cpu_flags
from layline.weights.cache import cache_root


class Matrix(ctypes.Structure):
    """``matrix`` of packed.h."""

    _fields_ = (
        ("tiles", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("groups", ctypes.c_int64),
        ("format", ctypes.c_int32),
    )


LANES = 16
"""Values that the row functions and attention compute at once: a row has a multiple of them."""
_TYPES = {
    "p": ctypes.c_void_p,
    "n": ctypes.c_int64,
    "i": ctypes.c_int32,
    "f": ctypes.c_float,
}
# What the C functions take, a letter each, and what they return.
_SIGNATURES: dict[str, tuple[str, type[ctypes.c_int] | None]] = {
    "matmul": ("pppniip", ctypes.c_int),
    "pack": ("ppppp", None),
    "silu_mul": ("ppnnip", None),
    "add_norm": ("pppfppnnip", None),
    "rotate": ("pppnnnnnip", None),
    "attend": ("pinnpnnfppnnpip", ctypes.c_int),
}


@dataclass(frozen=True)
class NativeLibrary:
    """The functions of one compiled library, and the address of torch's ``GOMP_parallel``."""

    instructions: InstructionSet
    path: Path
    matmul: Callable[..., int]
    pack: Callable[..., None]
    silu_mul: Callable[..., None]
    add_norm: Callable[..., None]
    rotate: Callable[..., None]
    attend: Callable[..., int]
    pool: int


@dataclass(frozen=True)
class Availability:
    """The library that packed matrices use, or None; and the reason in words."""

    library: NativeLibrary | None
    reason: str


def native_kernels() -> Availability:
    """What this process uses. The first call may compile; a failure is not tried again."""
    if cpu_kernels() == "torch":
        return Availability(None, "LAYLINE_CPU_KERNELS is torch")
    return _chosen(cache_root() / "kernels")


def choose(flags: frozenset[str], folder: Path) -> Availability:
    """The best library for a CPU with ``flags``, kept in ``folder``.

    A compiler may be too old for an instruction set; then the next one is tried.
    """
    failures = []
    for instructions in INSTRUCTION_SETS:
        if instructions.cpu_flags <= flags:
            try:
                library = load(instructions, folder)
            except KernelError as error:
                failures.append(str(error))
                continue
            return Availability(library, f"compiled from C for {instructions.name}")
    names = ", ".join(instructions.name for instructions in INSTRUCTION_SETS)
    return Availability(None, failures[0] if failures else f"this CPU has none of {names}")


def load(instructions: InstructionSet, folder: Path) -> NativeLibrary:
    """The library for ``instructions``. Raises KernelError where it cannot be made or loaded."""
    pool = _torch_pool()
    path = compiled(instructions, folder)
    try:
        library = ctypes.CDLL(str(path))
        functions = {name: getattr(library, f"layline_{name}") for name in _SIGNATURES}
    except (OSError, AttributeError) as error:
        raise KernelError(f"{path} cannot be loaded: {error}") from None
    for name, (takes, returns) in _SIGNATURES.items():
        functions[name].argtypes = [_TYPES[letter] for letter in takes]
        functions[name].restype = returns
    return NativeLibrary(instructions, path, **functions, pool=pool)


@functools.cache
def _chosen(folder: Path) -> Availability:
    return choose(cpu_flags(), folder)


def _torch_pool() -> int:
    """The address of ``GOMP_parallel`` as torch's own library finds it."""
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        # The lookup follows the libraries that libtorch_cpu is linked with.
        function = ctypes.CDLL(str(path)).GOMP_parallel
    except (OSError, AttributeError):
        raise KernelError("torch's OpenMP library was not found") from None
    return ctypes.cast(function, ctypes.c_void_p).value or 0
