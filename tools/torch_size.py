"""Say how much pip is about to download for torch, on a machine without an NVIDIA GPU.

Usage: torch_size.py VERSION. pip's own configuration is asked where packages come from; nothing is
downloaded but the index page of torch and of the CUDA libraries that its wheel names. Whatever goes
wrong, one line is printed and the status is 0: this is a courtesy before the installation.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.parse
import urllib.request
from pathlib import Path

JSON_FORM = "application/vnd.pypi.simple.v1+json"
ADVICE = "LAYLINE_TORCH_INDEX=URL make ... takes torch from an index of CPU builds"


def pip_settings() -> dict[str, list[str]]:
    """pip's settings by name, from its files and from the environment."""
    shown = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    )
    settings: dict[str, list[str]] = {}
    for line in shown.stdout.splitlines():
        name, _, value = line.partition("=")
        settings.setdefault(name.split(".")[-1], []).extend(value.strip("'\"").split())
    return settings


def index_url(settings: dict[str, list[str]]) -> str:
    """The index that pip asks first; its built-in default has no public name."""
    if settings.get("index-url"):
        return settings["index-url"][-1]
    from pip._internal.models.index import PyPI

    return str(PyPI.simple_url)


def local_wheel(settings: dict[str, list[str]], version: str) -> Path | None:
    """A torch wheel for this Python in one of pip's find-links folders."""
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    for link in settings.get("find-links", []):
        folder = Path(urllib.parse.urlparse(link).path)
        for wheel in folder.glob(f"torch-{version}*-{tag}-{tag}-*.whl") if folder.is_dir() else ():
            return wheel
    return None


def wheel_files(index: str, project: str, version: str) -> list[dict[str, object]]:
    """The wheels of one version that this platform could take, from the index's JSON page."""
    url = f"{index.rstrip('/')}/{project}/"
    request = urllib.request.Request(url, headers={"Accept": JSON_FORM})
    with urllib.request.urlopen(request, timeout=10) as reply:
        files: list[dict[str, object]] = json.load(reply)["files"]
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    prefix = f"{project.replace('-', '_')}-{version}-"
    return [
        entry
        for entry in files
        if str(entry["filename"]).startswith(prefix)
        and "x86_64" in str(entry["filename"])
        and (f"-{python}-{python}-" in str(entry["filename"]) or "-py3-" in str(entry["filename"]))
        and "manylinux" in str(entry["filename"])
    ]


def cuda_requirements(entry: dict[str, object]) -> list[tuple[str, str]]:
    """The pinned nvidia packages that a torch wheel requires on Linux."""
    with urllib.request.urlopen(f"{entry['url']}.metadata", timeout=10) as reply:
        metadata = reply.read().decode("utf-8")
    pattern = r"^Requires-Dist: ((?:nvidia|cuda|triton)[\w-]*)(?:\[[^\]]*\])?\s*\(?==([\w.]+)"
    return re.findall(pattern, metadata, flags=re.MULTILINE)


def total_size(index: str, version: str) -> tuple[int, int]:
    """Bytes of the torch wheel, and of the CUDA libraries that come with it."""
    torch_file = wheel_files(index, "torch", version)[0]
    libraries = 0
    for project, pinned in cuda_requirements(torch_file):
        files = wheel_files(index, project, pinned)
        libraries += max((int(str(entry.get("size") or 0)) for entry in files), default=0)
    return int(str(torch_file.get("size") or 0)), libraries


def report(version: str) -> str:
    """The line to print."""
    settings = pip_settings()
    wheel = local_wheel(settings, version)
    if wheel is not None:
        return f"torch {version} comes from disk, {wheel.stat().st_size / 1e6:.0f} MB"
    torch_bytes, cuda_bytes = total_size(index_url(settings), version)
    line = f"downloading torch {version}, {torch_bytes / 1e6:.0f} MB"
    if cuda_bytes:
        # A floor: some of those packages name further ones, which only pip itself resolves.
        line += f", and at least {cuda_bytes / 1e6:.0f} MB of CUDA libraries ({ADVICE})"
    return line


if __name__ == "__main__":
    try:
        print("setup:", report(sys.argv[1]))
    except Exception as error:
        print(f"setup: downloading torch; its size could not be read ({type(error).__name__})")
        print(f"setup: a CUDA build is several GB; {ADVICE}")
