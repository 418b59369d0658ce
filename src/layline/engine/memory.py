"""Peak memory of a process."""

from __future__ import annotations

import sys
from pathlib import Path


def peak_bytes() -> int:
    """Highest resident size of this process so far, mapped file pages included."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        status = ""
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # macOS reports bytes here, every other system kibibytes.
    return peak if sys.platform == "darwin" else peak * 1024
