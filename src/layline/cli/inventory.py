"""Facts about the machine and the installation, as plain data."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

from layline.cli.output import size_text
from layline.cores import usable_cores
from layline.errors import LaylineError

REQUIRED = ("torch", "numpy", "tokenizers", "safetensors", "jinja2", "typer", "rich")
OPTIONAL = ("transformers", "gguf", "huggingface_hub", "triton", "uvicorn", "llama_cpp_python")
# Instruction sets that torch's CPU kernels choose by, under their names in /proc/cpuinfo.
CPU_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8")
DOOR_PREFIX = "LAYLINE_"
# docs/cpu.md has the measurement.
TORCH_COST = "decoding takes about 1.3 times as long as with the native kernels, a batch of 8 twice"


def inventory() -> dict[str, Any]:
    """Everything ``layline doctor`` shows; section name to data that JSON can hold."""
    return {
        "versions": versions(),
        "processor": processor(),
        "kernels": kernels(),
        "memory": memory(),
        "cuda": cuda(),
        "cache": cache(),
        "environment": doors(),
    }


def versions() -> dict[str, str | None]:
    """Version of each package that matters; None for one that is not installed."""
    from layline import __version__

    found: dict[str, str | None] = {"python": platform.python_version(), "layline": __version__}
    for name in (*REQUIRED, *OPTIONAL):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def processor() -> dict[str, Any]:
    """Model, cores and the instruction sets useful here."""
    import torch

    facts = cpu_facts()
    return {
        "model": facts.get("model name") or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "usable cores": usable_cores(),
        "instructions": [flag for flag in CPU_FLAGS if flag in facts.get("flags", "").split()],
        "torch uses": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }


def kernels() -> dict[str, str | None]:
    """What multiplies with quantised matrices on the CPU, and why; compiles it where it must."""
    from layline.kernels.native.build import compiler_version
    from layline.kernels.native.library import native_kernels

    found = native_kernels()
    if found.library is None:
        return {"packed matrices": "torch", "reason": found.reason, "cost": TORCH_COST}
    return {
        "packed matrices": f"native, {found.library.instructions.name}",
        "compiler": compiler_version(),
        "library": str(found.library.path),
    }


def cpu_facts() -> dict[str, str]:
    """The first processor's entry in /proc/cpuinfo; empty elsewhere than on Linux."""
    return colon_table(Path("/proc/cpuinfo"))


def colon_table(path: Path) -> dict[str, str]:
    """``name : value`` lines up to the first empty one."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    table = {}
    for line in text.split("\n\n", 1)[0].splitlines():
        name, _, value = line.partition(":")
        table[name.strip()] = value.strip()
    return table


def memory() -> dict[str, str | None]:
    """Total and available memory."""
    table = colon_table(Path("/proc/meminfo"))
    sizes = {"total": table.get("MemTotal"), "available": table.get("MemAvailable")}
    return {
        name: size_text(int(value.split()[0]) * 1024) if value else None
        for name, value in sizes.items()
    }


def cuda() -> dict[str, Any]:
    """GPUs, and for each the others whose memory it can reach directly."""
    import torch

    if not torch.cuda.is_available():
        return {"devices": [], "built for": torch.version.cuda}
    count = torch.cuda.device_count()
    devices = []
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        devices.append(
            {
                "index": index,
                "name": properties.name,
                "memory": size_text(properties.total_memory),
                "capability": f"{properties.major}.{properties.minor}",
                "peers": [
                    other
                    for other in range(count)
                    if other != index and torch.cuda.can_device_access_peer(index, other)
                ],
            }
        )
    return {"devices": devices, "built for": torch.version.cuda}


def cache() -> dict[str, Any]:
    """The cache folder and the models in it, each checked as opening it would."""
    from layline.weights.cache import cache_root, find_model, pulled_names

    root = cache_root()
    models = []
    for name in pulled_names(root):
        try:
            path = find_model(name, root)
        except LaylineError as error:
            models.append({"name": name, "size": None, "state": str(error)})
            continue
        num_bytes = sum(file.stat().st_size for file in files_under(path))
        models.append({"name": name, "size": size_text(num_bytes), "state": "verified"})
    return {"directory": str(root), "models": models}


def files_under(path: Path) -> list[Path]:
    """``path`` itself, or the files below it."""
    return [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]


def doors() -> dict[str, str]:
    """The LAYLINE_ variables that are set, by name."""
    return {
        name: value for name, value in sorted(os.environ.items()) if name.startswith(DOOR_PREFIX)
    }
