"""A pseudo-terminal for commands that talk with a person."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import time
from pathlib import Path


class Terminal:
    """A process of its own on a pseudo-terminal, and a person at its keys."""

    def __init__(self, command: list[str], folder: Path | None = None) -> None:
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=take_terminal,  # noqa: PLW1509 - no thread runs here
            cwd=folder,
        )
        os.close(slave)
        self.seen = ""

    def type(self, text: str) -> None:
        """What a person types; ``\\x03`` is Ctrl-C and ``\\x04`` Ctrl-D."""
        os.write(self.master, text.encode())

    def wait_for(self, text: str, seconds: float = 20) -> None:
        """Read until ``text`` appears after what was waited for before."""
        deadline = time.monotonic() + seconds
        while text not in self.seen:
            ready, _, _ = select.select([self.master], [], [], deadline - time.monotonic())
            assert ready, f"no {text!r} in {self.seen!r}"
            self.seen += os.read(self.master, 4096).decode()
        self.seen = self.seen.split(text, 1)[1]

    def press_until(self, key: str, text: str) -> None:
        """Press ``key`` until ``text`` appears.

        A signal that reaches Python's line editor just before it waits is seen at the next key, as
        a person would press Ctrl-C again.
        """
        for _ in range(40):
            self.type(key)
            ready, _, _ = select.select([self.master], [], [], 0.5)
            if ready:
                break
        self.wait_for(text)

    def close(self) -> None:
        """End the process if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.master)


def take_terminal() -> None:
    """Make the slave the controlling terminal, which is what turns Ctrl-C into a signal."""
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
