"""Parsers for option values. Each failure is one line: the value, what was expected, the nearest.

A parser is called with the text from the command line, or with the default when that is not None,
so values that are parsed already pass through.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import typer

from layline.config import parse_size
from layline.errors import UsageError

SIMILAR = 0.5


class BadValue(typer.BadParameter):
    """A value that a parser here refused, with a message that is the whole line."""


def nearest(value: str, choices: Iterable[str]) -> str | None:
    """The choice that ``value`` most likely means, or None when none is near.

    The same word in other letters comes first, then the choice it begins, then one it is part
    of, then a similar one. Dashes and slashes in front do not count: every flag has them.
    """
    known = {plain(choice): choice for choice in choices}
    word = plain(value)
    if word in known:
        return known[word]
    if len(word) < 2:
        return None
    begun = [name for name in known if name.startswith(word)]
    holding = [name for name in known if len(word) > 2 and word in name]
    similar = difflib.get_close_matches(word, known, n=len(known) or 1, cutoff=SIMILAR)
    # Few people mistype the first letter.
    similar.sort(key=lambda name: name[0] != word[0])
    found = begun or holding or similar
    return known[found[0]] if found else None


def plain(text: str) -> str:
    """``text`` without what flags are spelled differently in: case, underscores, front dashes."""
    return text.lower().replace("_", "-").lstrip("-/")


def closest(value: str, choices: Iterable[str]) -> str:
    """``"; the nearest is 'X'"``, or nothing when none is near."""
    match = nearest(value, choices)
    return "" if match is None else f"; the nearest is {match!r}"


def integer(flag: str, *, minimum: int, maximum: int | None = None) -> Callable[[Any], int]:
    """A whole number within ``[minimum, maximum]``."""

    def parse(value: Any) -> int:
        expected = f"a whole number {bounds(minimum, maximum)}"
        try:
            number = int(str(value))
        except ValueError:
            raise BadValue(
                f"{flag} {value!r} is not {expected}; the nearest valid value is {max(minimum, 0)}"
            ) from None
        if number < minimum or (maximum is not None and number > maximum):
            near = minimum if number < minimum else maximum
            raise BadValue(f"{flag} {number} is not {expected}; the nearest valid value is {near}")
        return number

    return parse


def number(flag: str, expected: str) -> Callable[[Any], float]:
    """Any finite number; the range is checked by the object that takes it, here only named."""

    def parse(value: Any) -> float:
        try:
            parsed = float(str(value))
        except ValueError:
            parsed = math.nan
        if not math.isfinite(parsed):
            raise BadValue(f"{flag} {value!r} is not a finite number; expected {expected}")
        return parsed

    return parse


def seconds(flag: str) -> Callable[[Any], float]:
    """A number of seconds above zero, of at most a day."""
    most = 86400.0

    def parse(value: Any) -> float:
        try:
            parsed = float(str(value))
        except ValueError:
            parsed = math.nan
        if not 0 < parsed <= most:
            raise BadValue(
                f"{flag} {value!r} is not a number of seconds above 0 and up to {most:g}; the "
                f"nearest valid value is {most if parsed > most else 1:g}"
            )
        return parsed

    return parse


def size(flag: str) -> Callable[[Any], int]:
    """A number of bytes above zero, with a binary unit: ``512M``, ``1.5G``, ``2GiB``."""

    def parse(value: Any) -> int:
        try:
            num_bytes = parse_size(value, flag) or 0
        except UsageError:
            num_bytes = 0
        if num_bytes < 1:
            raise BadValue(
                f"{flag} {value!r} is not a size above zero; expected a number with K, M, G or T, "
                "such as '512M'"
            )
        return num_bytes

    return parse


def choice(flag: str, choices: Sequence[str]) -> Callable[[Any], str]:
    """One of a closed set of words."""

    def parse(value: Any) -> str:
        if value in choices:
            return str(value)
        near = closest(str(value), choices)
        raise BadValue(f"{flag} {value!r} is not one of {', '.join(choices)}{near}")

    return parse


def integer_list(flag: str, *, minimum: int) -> Callable[[str], tuple[int, ...]]:
    """Whole numbers separated by commas, each once, in the order given."""
    one = integer(flag, minimum=minimum)

    def parse(value: str) -> tuple[int, ...]:
        good: list[int] = []
        bad: list[str] = []
        for part in (part.strip() for part in value.split(",")):
            try:
                good.append(one(part))
            except BadValue:
                bad.append(part)
        if bad:
            near = ",".join(map(str, good)) or str(minimum)
            raise BadValue(
                f"{flag} {value!r} has {bad[0]!r}; expected whole numbers {bounds(minimum, None)} "
                f"separated by commas; the nearest valid value is {near!r}"
            )
        return tuple(dict.fromkeys(good))

    return parse


def number_list(
    flag: str, *, minimum: int, maximum: int, word: str | None = None
) -> Callable[[Any], tuple[int, ...] | str]:
    """Whole numbers separated by commas, as they are given, or ``word``."""
    one = integer(flag, minimum=minimum, maximum=maximum)

    def parse(value: Any) -> tuple[int, ...] | str:
        if isinstance(value, tuple) or value == word:
            return value  # type: ignore[no-any-return]
        good: list[int] = []
        bad: list[str] = []
        for part in (part.strip() for part in str(value).split(",")):
            try:
                good.append(one(part))
            except BadValue:
                bad.append(part)
        if bad:
            near = ",".join(map(str, good)) or word or str(minimum)
            either = f"{word}, or " if word else ""
            raise BadValue(
                f"{flag} {value!r} has {bad[0]!r}; expected {either}whole numbers "
                f"{bounds(minimum, maximum)} separated by commas; the nearest valid value is "
                f"{near!r}"
            )
        return tuple(good)

    return parse


def choice_list(flag: str, choices: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """Words of a closed set separated by commas, each once."""

    def parse(value: str) -> tuple[str, ...]:
        parts = [part.strip() for part in value.split(",")]
        bad = [part for part in parts if part not in choices]
        if bad:
            kept = [part if part in choices else nearest(part, choices) for part in parts]
            near = ",".join(dict.fromkeys(part for part in kept if part))
            raise BadValue(
                f"{flag} {value!r} has {bad[0]!r}; expected {', '.join(choices)}, separated by "
                "commas" + (f"; the nearest is {near!r}" if near else "")
            )
        return tuple(dict.fromkeys(parts))

    return parse


def bounds(minimum: float, maximum: float | None) -> str:
    """``"of at least 1"`` or ``"from 1 to 8"``."""
    return f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"


def trace_path(value: str) -> str:
    """The path of a timeline."""
    if not value.lower().endswith(".json"):
        raise BadValue(
            f"--trace {value!r} does not end in .json; expected a file for a timeline; the nearest "
            f"is {value + '.json'!r}"
        )
    return value
