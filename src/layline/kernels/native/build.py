"""Compile the C sources with the system's compiler, once for each version of both.

A library is kept in the cache folder under a name that hashes the sources, the options and the
compiler, so that a change of any makes a new one. It is written under another name first: processes
that compile at the same time end with one whole file.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from layline.errors import KernelError

SOURCES = Path(__file__).parent
COMMON = ("work.h", "packed.h", "vectors.h", "matmul.c", "pack.c", "rows.c", "attend.c")
COMPILERS = ("gcc", "cc", "clang")
OPTIONS = ("-std=gnu11", "-O2", "-ffp-contract=off", "-fPIC", "-shared")
LONGEST_COMPILATION = 120.0  # Seconds.


@dataclass(frozen=True)
class InstructionSet:
    """A vector part: its source, the CPU's flags it needs (as in /proc/cpuinfo), and options."""

    name: str
    source: str
    cpu_flags: frozenset[str]
    options: tuple[str, ...]


INSTRUCTION_SETS = (
    InstructionSet(
        "AVX-512 VNNI",
        "avx512.c",
        frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "fma", "f16c"}),
        ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni", "-mfma", "-mf16c"),
    ),
    InstructionSet(
        "AVX-VNNI",
        "avx2.c",
        frozenset({"avx2", "avx_vnni", "fma", "f16c"}),
        ("-mavx2", "-mavxvnni", "-mfma", "-mf16c"),
    ),
    InstructionSet(
        "AVX2", "avx2.c", frozenset({"avx2", "fma", "f16c"}), ("-mavx2", "-mfma", "-mf16c")
    ),
)
"""Best first."""


def cpu_flags() -> frozenset[str]:
    """This CPU's flags; none where /proc/cpuinfo has no such line."""
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.startswith("flags"):
                    return frozenset(line.partition(":")[2].split())
    except OSError:
        pass
    return frozenset()


def find_compiler() -> Path:
    """The first C compiler on the path. Raises KernelError where there is none."""
    for name in COMPILERS:
        if found := shutil.which(name):
            return Path(found)
    raise KernelError("no C compiler found; install gcc")


def compiler_version() -> str:
    """The first line of what the compiler says of itself; why not, where there is none."""
    try:
        compiler = find_compiler()
        command = [str(compiler), "--version"]
        said = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (KernelError, OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return said.stdout.partition("\n")[0]


def compiled(instructions: InstructionSet, folder: Path) -> Path:
    """The library for ``instructions`` in ``folder``, compiled now where it is not there yet.

    Raises KernelError: no compiler, it failed, or the folder cannot be written.
    """
    compiler = find_compiler()
    try:
        library = folder / f"{_key(instructions, compiler)}.so"
        if not library.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".compiling-", dir=folder) as place:
                made = Path(place) / library.name
                _compile(compiler, instructions, made)
                made.replace(library)
    except OSError as error:
        raise KernelError(f"{error.filename or folder}: {error.strerror or error}") from None
    return library


def _key(instructions: InstructionSet, compiler: Path) -> str:
    """A name for what would come out. A compiler is known by its file, to start none to ask."""
    real = compiler.resolve()
    state = real.stat()
    text = [*OPTIONS, *instructions.options, real, state.st_size, state.st_mtime_ns]
    digest = hashlib.sha256("\n".join(map(str, text)).encode())
    for name in (*COMMON, instructions.source):
        digest.update(b"\0" + (SOURCES / name).read_bytes())
    return f"{Path(instructions.source).stem}-{digest.hexdigest()[:20]}"


def _compile(compiler: Path, instructions: InstructionSet, out: Path) -> None:
    names = [name for name in (*COMMON, instructions.source) if name.endswith(".c")]
    files = [str(SOURCES / name) for name in names]
    command = [str(compiler), *OPTIONS, *instructions.options, "-o", str(out), *files]
    environment = {**os.environ, "LC_ALL": "C"}
    try:
        subprocess.run(
            command,
            check=True,
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=LONGEST_COMPILATION,
            env=environment,
        )
    except subprocess.CalledProcessError as error:
        said = next((line for line in error.stderr.splitlines() if "error" in line), "")
        raise KernelError(
            f"{compiler} ended with status {error.returncode}{said and f': {said}'}"
        ) from None
    except subprocess.TimeoutExpired:
        raise KernelError(f"{compiler} took over {LONGEST_COMPILATION:g} s") from None
