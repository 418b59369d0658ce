"""``layline pull``: fetch a model into the cache and print where it lies."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Annotated, Any

import typer

from layline.cli.output import note, size_text, write_line
from layline.config import DEFAULT_MODEL

PLAIN_STEP_PERCENT = 10


def pull(
    model: Annotated[
        str, typer.Argument(metavar="[MODEL]", help="a catalogue name or ORG/NAME")
    ] = DEFAULT_MODEL,
    revision: Annotated[
        str | None,
        typer.Option("--revision", metavar="TEXT", help="branch, tag or commit of a repository"),
    ] = None,
    offline: Annotated[
        bool, typer.Option("--offline", help="use only what is already on this machine")
    ] = False,
) -> None:
    """Fetch MODEL, verify it, and print its path. Quick when it is already there."""
    from layline.weights.pull import pull as fetch

    with Progress(model, bar=sys.stderr.isatty()) as progress:
        path = fetch(model, progress=progress.report, revision=revision, offline=offline)
    write_line(str(path))


class Progress:
    """Download progress on stderr: a bar on a terminal, a line every tenth in a log.

    It stays silent when the first report is already the last: then there was nothing to fetch.
    """

    def __init__(self, name: str, *, bar: bool) -> None:
        self.name = name
        self.bar = bar
        self.display: Any = None
        self.task: Any = None
        self.next_percent = 0

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.display is not None:
            self.display.stop()

    def report(self, done: int, total: int | None) -> None:
        """Show that ``done`` of ``total`` bytes are there; ``total`` None means not known."""
        if self.bar:
            self.update_bar(done, total)
        elif total:
            percent = 100 * done // total
            started = self.next_percent > 0
            if percent >= self.next_percent and (started or done < total):
                note(f"pulling {self.name}: {percent}% of {size_text(total)}")
                self.next_percent = percent - percent % PLAIN_STEP_PERCENT + PLAIN_STEP_PERCENT

    def update_bar(self, done: int, total: int | None) -> None:
        """Draw the bar, which is made with the first report that leaves something to fetch."""
        if self.display is None:
            if done == total:
                return
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
            from rich.progress import Progress as Bar

            self.display = Bar(
                TextColumn("pulling {task.description}"),
                BarColumn(),
                DownloadColumn(binary_units=True),
                TransferSpeedColumn(),
                console=Console(stderr=True),
            )
            self.task = self.display.add_task(self.name, total=total)
            self.display.start()
        self.display.update(self.task, completed=done, total=total)
