"""The native kernels for tests: every instruction set that this machine can run."""

from __future__ import annotations

import functools

import pytest

from layline.errors import KernelError
from layline.kernels.native.build import INSTRUCTION_SETS, InstructionSet, cpu_flags
from layline.kernels.native.library import NativeLibrary, load
from layline.weights.cache import cache_root

NAMES = [instructions.name for instructions in INSTRUCTION_SETS]


def native(name: str) -> NativeLibrary:
    """The library for an instruction set; skips where it cannot run or be compiled here."""
    library = _load(next(found for found in INSTRUCTION_SETS if found.name == name))
    if isinstance(library, str):
        pytest.skip(library)
    return library


@functools.cache
def _load(instructions: InstructionSet) -> NativeLibrary | str:
    if missing := instructions.cpu_flags - cpu_flags():
        return f"this CPU has no {', '.join(sorted(missing))}"
    try:
        return load(instructions, cache_root() / "kernels")
    except KernelError as error:
        return str(error)


def every_native() -> list[NativeLibrary]:
    """The libraries of all instruction sets that work here."""
    return [found for found in map(_load, INSTRUCTION_SETS) if isinstance(found, NativeLibrary)]
