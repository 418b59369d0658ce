"""Compiling and finding the native kernels: once, whole, and with a reason where it cannot be."""

from __future__ import annotations

import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from layline.config import EngineConfig
from layline.errors import KernelError, UsageError
from layline.kernels.native import build, library
from layline.kernels.native.build import INSTRUCTION_SETS, compiled
from layline.kernels.native.library import choose, native_kernels

AVX2 = INSTRUCTION_SETS[-1]
EVERY_FLAG = frozenset().union(*(instructions.cpu_flags for instructions in INSTRUCTION_SETS))


@pytest.fixture
def needs_compiler() -> None:
    if not any(shutil.which(name) for name in build.COMPILERS):
        pytest.skip("no C compiler here")


def fake_compiler(folder: Path, script: str) -> None:
    folder.mkdir()
    path = folder / "gcc"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def counting_compiler(folder: Path) -> Path:
    """The real compiler under the name gcc, which notes every start in the file returned."""
    real = next(found for name in build.COMPILERS if (found := shutil.which(name)))
    log = folder / "started"
    fake_compiler(folder, f'echo x >> "{log}"; exec {real} "$@"')
    return log


@pytest.mark.usefixtures("needs_compiler")
def test_it_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = counting_compiler(tmp_path / "bin")
    monkeypatch.setattr(shutil, "which", lambda name: str(tmp_path / "bin" / name))
    first = compiled(AVX2, tmp_path / "cache")
    assert compiled(AVX2, tmp_path / "cache") == first
    assert log.read_text() == "x\n"
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [first.name]
    # Another compiler, other options and other sources make another library.
    log.with_name("gcc").write_text(log.with_name("gcc").read_text() + "\n")
    changed = compiled(AVX2, tmp_path / "cache")
    monkeypatch.setattr(build, "OPTIONS", (*build.OPTIONS, "-DOTHER"))
    other = compiled(AVX2, tmp_path / "cache")
    copies = tmp_path / "sources"
    shutil.copytree(build.SOURCES, copies)
    (copies / "pack.c").write_text((copies / "pack.c").read_text() + "\n")
    monkeypatch.setattr(build, "SOURCES", copies)
    assert len({first, changed, other, compiled(AVX2, tmp_path / "cache")}) == 4


@pytest.mark.usefixtures("needs_compiler")
def test_two_at_once_end_with_one_whole_file(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from layline.kernels.native.build import *\n"
        "print(compiled(INSTRUCTION_SETS[-1], Path(sys.argv[1])))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "cache")]
    with ThreadPoolExecutor(2) as pool:
        runs = [
            pool.submit(subprocess.run, command, capture_output=True, text=True, check=True)
            for _ in range(2)
        ]
    printed = {run.result().stdout.strip() for run in runs}
    assert len(printed) == 1
    assert [str(path) for path in (tmp_path / "cache").iterdir()] == list(printed)


def test_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = choose(EVERY_FLAG, tmp_path)
    assert found.library is None
    assert found.reason == "no C compiler found; install gcc"


def test_a_compiler_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_compiler(tmp_path / "bin", "echo 'error: unknown option' >&2; exit 3")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/bin")
    found = choose(EVERY_FLAG, tmp_path / "cache")
    assert found.library is None
    assert found.reason.endswith("gcc ended with status 3: error: unknown option")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_compiler_too_old_for_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def load(instructions: build.InstructionSet, folder: Path) -> object:
        tried.append(instructions)
        if instructions is not AVX2:
            raise KernelError("unknown option")
        return library.NativeLibrary(instructions, folder, *[print] * 6, pool=0)

    monkeypatch.setattr(library, "load", load)
    found = choose(EVERY_FLAG, tmp_path)
    assert tried == list(INSTRUCTION_SETS)
    assert found.library is not None
    assert found.library.instructions is AVX2


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_compiler(tmp_path / "bin", "exit 0")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (tmp_path / "file").write_text("")
    with pytest.raises(KernelError, match="file"):
        compiled(AVX2, tmp_path / "file" / "cache")


@pytest.mark.usefixtures("needs_compiler")
def test_a_library_that_does_not_load(tmp_path: Path) -> None:
    path = compiled(AVX2, tmp_path)
    path.write_bytes(b"not a library")
    with pytest.raises(KernelError, match="cannot be loaded"):
        library.load(AVX2, tmp_path)


def test_a_torch_without_openmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "__init__.py"))
    with pytest.raises(KernelError, match="OpenMP library was not found"):
        library.load(AVX2, tmp_path)


def test_a_cpu_without_vectors(tmp_path: Path) -> None:
    found = choose(frozenset({"sse2"}), tmp_path)
    assert found.library is None
    assert found.reason == "this CPU has none of AVX-512 VNNI, AVX-VNNI, AVX2"


def test_the_environment_turns_them_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAYLINE_CPU_KERNELS", "torch")
    assert native_kernels().library is None
    assert native_kernels().reason == "LAYLINE_CPU_KERNELS is torch"
    monkeypatch.setenv("LAYLINE_CPU_KERNELS", "touch")
    with pytest.raises(UsageError, match=r"'touch' is not one of auto, torch; did you mean"):
        EngineConfig()
