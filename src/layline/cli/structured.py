"""Flags that say what a generated text must look like."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from layline.errors import SamplingError, UsageError

if TYPE_CHECKING:
    from layline.grammar import Grammar

FLAGS = ("json_schema", "regex", "grammar")
_LARGEST = 1 << 20


@dataclass(frozen=True, kw_only=True)
class StructuredOptions:
    """At most one of these."""

    json_schema: Annotated[
        str | None,
        typer.Option(
            "--json-schema",
            metavar="FILE|TEXT",
            help="the answer is JSON that this schema accepts; {} is any",
        ),
    ] = None
    regex: Annotated[
        str | None,
        typer.Option("--regex", metavar="TEXT", help="the answer matches this from end to end"),
    ] = None
    grammar: Annotated[
        Path | None,
        typer.Option("--grammar", metavar="FILE", help="the answer follows this Lark grammar"),
    ] = None

    def chosen(self) -> Grammar | None:
        """The grammar that the flags give. Raises UsageError in one line that names the flag."""
        given = [name for name in FLAGS if getattr(self, name) is not None]
        if not given:
            return None
        flags = [f"--{name.replace('_', '-')}" for name in given]
        if len(given) > 1:
            raise UsageError(f"{' and '.join(flags)} are given; expected one of them")
        from layline.text.constraint import check_readable

        try:
            grammar = self._grammar(given[0])
            # Now, and not when the model has been loaded.
            check_readable(grammar)
        except SamplingError as error:
            raise SamplingError(f"{flags[0]}: {error}") from None
        return grammar

    def _grammar(self, name: str) -> Grammar:
        from layline.grammar import Grammar

        if name == "json_schema":
            return Grammar.json_schema(schema_text(self.json_schema or ""))
        if name == "regex":
            return Grammar.regex(self.regex or "")
        return Grammar.lark(file_text(self.grammar or Path(), "--grammar"))


def schema_text(given: str) -> str:
    """A schema that is written out, or that of a file."""
    if given.lstrip().startswith("{") or given.strip() in ("true", "false"):
        return given
    return file_text(Path(given), "--json-schema")


def file_text(path: Path, flag: str) -> str:
    """What is in a file. Raises UsageError when it cannot be read."""
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(_LARGEST + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise UsageError(
            f"{flag} {str(path)!r} cannot be read: {reason}; expected a text file"
        ) from None
    if len(text) > _LARGEST:
        raise UsageError(f"{flag} {str(path)!r} is larger than {_LARGEST} characters")
    return text
