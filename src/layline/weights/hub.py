"""Hugging Face repositories: pulled at one recorded commit, through huggingface_hub."""

from __future__ import annotations

import fnmatch
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layline.errors import PullError
from layline.weights.cache import (
    read_record,
    record_file,
    sha256_of,
    snapshot_folder,
    write_atomically,
)
from layline.weights.locks import held_lock

Progress = Callable[[int, int | None], None]

# Weights, configuration, tokenizer and templates; nothing that could be run.
PATTERNS = ("*.safetensors", "*.json", "tokenizer.model", "*.jinja")
_LOCK_TIMEOUT = 3600.0
_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class _Remote:
    """A repository as the hub describes it at one commit."""

    commit: str
    sizes: Mapping[str, int]
    checksums: Mapping[str, str]


def pull_repository(
    repository: str,
    root: Path,
    *,
    progress: Progress,
    revision: str | None = None,
    offline: bool = False,
) -> Path:
    """Make ``repository`` available under ``root`` and return its snapshot folder.

    Raises:
        PullError: huggingface_hub is missing, no hub is reachable, there is no such repository or
            revision, it has no safetensors weights, or a file did not verify.
        OSError: the cache cannot be written.
    """
    try:
        from huggingface_hub import constants
    except ImportError:
        raise PullError(
            f"pulling {repository} needs huggingface_hub; run `pip install 'layline[hub]'`"
        ) from None
    offline = offline or bool(constants.HF_HUB_OFFLINE)
    record_path = record_file(repository, root)
    lock = root / "locks" / f"{repository.replace('/', '--')}.lock"
    with held_lock(lock, f"pull of {repository}", _LOCK_TIMEOUT):
        record = read_record(record_path)
        wanted = revision
        if record is not None and (
            revision in (None, record["commit"]) or (offline and revision == record.get("revision"))
        ):
            wanted = record["commit"]
            folder = snapshot_folder(repository, wanted, root)
            if not _remove_damaged(folder, record["files"], record.get("sha256", {})):
                total = sum(record["files"].values())
                progress(total, total)
                return folder
        if offline:
            raise PullError(
                f"{repository}{f' at {wanted}' if wanted else ''} is not complete in {root} "
                "and may not be downloaded (offline)"
            )
        remote = _describe(repository, wanted)
        folder = _download(repository, remote, root, progress)
        if damaged := _remove_damaged(folder, remote.sizes, remote.checksums):
            raise PullError(
                f"{repository}: {damaged[0]} did not match its size or checksum and was removed; "
                "pull again"
            )
        fresh = {
            "repository": repository,
            "revision": revision or (record or {}).get("revision", "main"),
            "commit": remote.commit,
            "files": dict(remote.sizes),
            "sha256": dict(remote.checksums),
        }
        write_atomically(record_path, json.dumps(fresh, indent=1))
    return folder


def _describe(repository: str, revision: str | None) -> _Remote:
    import huggingface_hub

    with _one_line_errors(repository, revision):
        info = huggingface_hub.HfApi().model_info(
            repository, revision=revision, files_metadata=True, timeout=30
        )
    sizes: dict[str, int] = {}
    checksums: dict[str, str] = {}
    for file in info.siblings or []:
        name = file.rfilename
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in PATTERNS):
            continue
        sizes[name] = int(file.size or 0)
        if file.lfs is not None:
            checksums[name] = file.lfs.sha256
    if not any(name.endswith(".safetensors") for name in sizes):
        raise PullError(f"{repository} has no safetensors weights, the only kind that is pulled")
    if not info.sha:
        raise PullError(f"{repository}: the hub names no commit for {revision or 'main'}")
    return _Remote(info.sha, sizes, checksums)


def _download(repository: str, remote: _Remote, root: Path, progress: Progress) -> Path:
    import huggingface_hub
    from huggingface_hub.utils.tqdm import tqdm

    class SilentBar(tqdm):
        """The library's own bar, switched off: the caller has one."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": True})  # type: ignore[no-untyped-call]

    folder = snapshot_folder(repository, remote.commit, root)
    blobs = folder.parent.parent / "blobs"
    total = sum(remote.sizes.values())
    with _reporting(blobs, total, progress), _one_line_errors(repository, remote.commit):
        huggingface_hub.snapshot_download(
            repository,
            revision=remote.commit,
            cache_dir=root / "hub",
            allow_patterns=list(PATTERNS),
            tqdm_class=SilentBar,
        )
    return folder


@contextmanager
def _reporting(blobs: Path, total: int, progress: Progress) -> Iterator[None]:
    """Report how much of a download lies in ``blobs`` while the body runs."""
    finished = threading.Event()
    before = _bytes_in(blobs)

    def watch() -> None:
        while not finished.wait(_POLL_SECONDS):
            progress(min(max(_bytes_in(blobs) - before, 0), total), total)

    watcher = threading.Thread(target=watch, name="layline-pull-progress", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        finished.set()
        watcher.join()
    progress(total, total)


def _bytes_in(folder: Path) -> int:
    total = 0
    try:
        for path in folder.iterdir():
            total += path.stat().st_size
    except OSError:  # not there yet, or a file was renamed while we looked
        return total
    return total


def _remove_damaged(
    folder: Path, sizes: Mapping[str, int], checksums: Mapping[str, str]
) -> list[str]:
    """Names of files that are missing or wrong; wrong ones are removed with their blobs."""
    damaged = []
    for name, num_bytes in sizes.items():
        path = folder / name
        if not path.is_file():
            damaged.append(name)
            continue
        same = path.stat().st_size == num_bytes
        if same and name in checksums:
            same = sha256_of(path) == checksums[name]
        if not same:
            damaged.append(name)
            path.resolve().unlink()
            path.unlink(missing_ok=True)
    return damaged


@contextmanager
def _one_line_errors(repository: str, revision: str | None) -> Iterator[None]:
    from huggingface_hub import errors

    where = f"{repository}{f' at {revision}' if revision else ''}"
    try:
        yield
    except errors.GatedRepoError:
        raise PullError(
            f"{where} needs its licence accepted on the hub and a token in HF_TOKEN"
        ) from None
    except errors.RevisionNotFoundError:
        raise PullError(f"{repository} has no revision {revision!r}") from None
    except errors.RepositoryNotFoundError:
        raise PullError(
            f"no repository {repository!r} on the hub (for a private one set HF_TOKEN)"
        ) from None
    except PullError:
        raise
    except Exception as error:  # the hub's HTTP library is not part of its interface
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        problem = "no hub could be reached" if _is_unreachable(error) else "the download failed"
        raise PullError(f"cannot pull {where}: {problem} ({reason})") from None


def _is_unreachable(error: Exception) -> bool:
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool(
        names
        & {
            "ConnectionError",
            "LocalEntryNotFoundError",
            "NetworkError",
            "OfflineModeIsEnabled",
            "TimeoutException",
            "TimeoutError",
            "Timeout",
        }
    )
