"""``layline pull``: fetch a model into the cache and print where it lies."""

from __future__ import annotations

from typing import Annotated

import typer

from layline.config import DEFAULT_MODEL


def pull(
    model: Annotated[
        str, typer.Argument(metavar="[MODEL]", help="a catalogue name or ORG/NAME")
    ] = DEFAULT_MODEL,
    revision: Annotated[
        str | None, typer.Option("--revision", help="branch, tag or commit of a repository")
    ] = None,
    offline: Annotated[
        bool, typer.Option("--offline", help="use only what is already on this machine")
    ] = False,
) -> None:
    """Fetch MODEL, verify it, and print its path. Quick when it is already there."""
    raise NotImplementedError
