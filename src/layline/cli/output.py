"""What commands write: text as it comes, one JSON object, notes on stderr."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any, TextIO

from layline.errors import RunError

if TYPE_CHECKING:
    from layline.pipeline.trace import Timeline


class OutputClosedError(Exception):
    """Whoever read our output has gone. Not an OSError, which the parser would swallow."""


class OutputFailedError(RunError):
    """What we wrote was refused: the disk is full, or there is no stdout."""


def write(text: str, stream: TextIO | None = None) -> None:
    """Write and flush at once, so that a reader of a pipe sees every piece. Default: stdout.

    Raises OutputClosedError when the pipe is broken, OutputFailedError when the text
    cannot be written.
    """
    target: TextIO | None = sys.stdout if stream is None else stream
    if target is None:
        raise OutputFailedError("cannot write the output: standard output is closed")
    try:
        target.write(text)
        target.flush()
    except BrokenPipeError as error:
        raise OutputClosedError from error
    except OSError as error:
        raise OutputFailedError(cannot_write(error)) from error


def write_line(text: str) -> None:
    """One line on stdout."""
    write(text + "\n")


def note(text: str) -> None:
    """One line on stderr, where there is one."""
    if sys.stderr is not None:
        write(text + "\n", sys.stderr)


def cannot_write(error: OSError) -> str:
    """The line for output that was refused, by a full disk for example."""
    return f"cannot write the output: {error.strerror}"


def write_json(value: Any) -> None:
    """One JSON object on stdout, on one line."""
    write_line(json.dumps(value, ensure_ascii=False, allow_nan=False))


def lenient_streams() -> None:
    """Let a terminal that cannot show a character show a replacement, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")


def abandon_stdout() -> None:
    """After output failed: give the interpreter's last flush somewhere to go."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (AttributeError, OSError, ValueError):
        # stdout is not a file here (a test's buffer), so nothing is flushed to a descriptor.
        return


def size_text(num_bytes: float) -> str:
    """``"731 MiB"`` or ``"2.1 GiB"``."""
    mib = num_bytes / (1 << 20)
    return f"{mib / 1024:.1f} GiB" if mib >= 1024 else f"{mib:.0f} MiB"


def write_timeline(timeline: Timeline, path: str) -> None:
    """Write what ``--trace`` asked for. Raises RunError where the file cannot be written."""
    try:
        timeline.write(path)
    except OSError as error:
        raise RunError(f"--trace {path!r} cannot be written: {error.strerror or error}") from None
