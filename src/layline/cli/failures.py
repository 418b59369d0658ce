"""Where the traceback of an unexpected failure goes, since the terminal gets one line."""

from __future__ import annotations

import os
import tempfile
import time
import traceback
from pathlib import Path


def state_directory() -> Path:
    """The XDG state directory for Layline."""
    base = os.environ.get("XDG_STATE_HOME", "")
    return (Path(base) if base else Path.home() / ".local" / "state") / "layline"


def write_traceback() -> Path:
    """Write the exception being handled to a new file and return its path."""
    name = f"error-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
    try:
        path = state_directory() / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(traceback.format_exc(), encoding="utf-8", errors="backslashreplace")
    except (OSError, RuntimeError):
        # No home directory, or one that cannot be written.
        path = Path(tempfile.gettempdir()) / f"layline-{name}"
        path.write_text(traceback.format_exc(), encoding="utf-8", errors="backslashreplace")
    return path
