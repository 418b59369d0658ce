"""How far a batch of requests is, shown on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from layline.engine.request import Request


@contextmanager
def progress_bar(
    requests: Sequence[Request], *, shown: bool = True
) -> Iterator[Callable[[], None] | None]:
    """What to call after each step so that a bar on stderr follows ``requests``.

    None, and no bar, for a single request, where stderr is no terminal, or with ``shown`` False.
    The bar goes when the block ends, however it does.
    """
    if not shown or len(requests) < 2 or not _on_terminal():
        yield None
        return
    # Importing it takes longer than a short answer.
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    generates = any(request.most_tokens for request in requests)
    columns = (
        TextColumn("generating" if generates else "reading"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[tokens]} tokens"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(requests), tokens=0)

        def advance() -> None:
            done = sum(request.finish_reason is not None for request in requests)
            tokens = sum(
                len(request.output_ids) if generates else request.num_read for request in requests
            )
            progress.update(task, completed=done, tokens=tokens)

        yield advance


def _on_terminal() -> bool:
    # A process may have no stderr, and a notebook's may be of any kind.
    isatty = getattr(sys.stderr, "isatty", None)
    try:
        return bool(isatty and isatty())
    except ValueError:  # It is closed.
        return False
