"""A lock between processes, held on a file."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from layline.errors import PullError

_POLL_SECONDS = 0.1


@contextmanager
def held_lock(path: Path, purpose: str, timeout: float) -> Iterator[None]:
    """Hold the lock file ``path``; it is released when the process ends, however it ends.

    The file itself stays: removing it would let a waiting process and a new one hold two locks.

    Raises:
        PullError: another process held it for ``timeout`` seconds.
    """
    import fcntl

    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        deadline = time.monotonic() + timeout
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    holder = os.pread(descriptor, 20, 0).decode("ascii", "replace").strip()
                    raise PullError(
                        f"waited {timeout:g} s for another {purpose} to finish"
                        f"{f' (process {holder})' if holder else ''}; it holds {path}"
                    ) from None
                time.sleep(_POLL_SECONDS)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode("ascii"), 0)
        yield
    finally:
        os.close(descriptor)
