"""Parsers for option values. Each failure is one line: the value, what was expected, the nearest.

A parser is called with the text from the command line, or with the default when that is not None,
so values that are parsed already pass through.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Sequence
from typing import Any

import typer

from layline.config import parse_size
from layline.errors import UsageError


class BadValue(typer.BadParameter):
    """A value that a parser here refused, with a message that is the whole line."""


def integer(flag: str, *, minimum: int, maximum: int | None = None) -> Callable[[Any], int]:
    """A whole number within ``[minimum, maximum]``."""

    def parse(value: Any) -> int:
        expected = f"a whole number {bounds(minimum, maximum)}"
        try:
            number = int(str(value))
        except ValueError:
            raise BadValue(
                f"{flag} {value!r} is not {expected}; the nearest valid value is {minimum}"
            ) from None
        if number < minimum or (maximum is not None and number > maximum):
            near = minimum if number < minimum else maximum
            raise BadValue(f"{flag} {number} is not {expected}; the nearest valid value is {near}")
        return number

    return parse


def number(flag: str) -> Callable[[Any], float]:
    """Any finite number; the range is the concern of the object that takes it."""

    def parse(value: Any) -> float:
        try:
            parsed = float(str(value))
        except ValueError:
            parsed = math.nan
        if not math.isfinite(parsed):
            raise BadValue(f"{flag} {value!r} is not a finite number; the nearest valid value is 0")
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
        near = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.0)[0]
        raise BadValue(
            f"{flag} {value!r} is not one of {', '.join(choices)}; the nearest is {near!r}"
        )

    return parse


def integer_list(flag: str, *, minimum: int) -> Callable[[str], tuple[int, ...]]:
    """Whole numbers separated by commas, each once, in the order given."""
    one = integer(flag, minimum=minimum)

    def parse(value: str) -> tuple[int, ...]:
        return tuple(dict.fromkeys(one(part.strip()) for part in value.split(",")))

    return parse


def choice_list(flag: str, choices: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """Words of a closed set separated by commas; an empty text is none of them."""
    one = choice(flag, choices)

    def parse(value: str) -> tuple[str, ...]:
        parts = [part.strip() for part in value.split(",")]
        return tuple(dict.fromkeys(one(part) for part in parts if part))

    return parse


def bounds(minimum: float, maximum: float | None) -> str:
    """``"of at least 1"`` or ``"from 1 to 8"``."""
    return f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
