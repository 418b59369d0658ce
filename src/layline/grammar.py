"""What a generated text must look like: JSON, a JSON schema, a regular expression or a grammar.

Plain data, checked when it is made for what would cost much to find out later. Whether it can be
followed is known once it is compiled for a vocabulary (``layline.text.constraint``).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from layline.errors import SamplingError, one_of

JSON_OBJECT = "json_object"
JSON_SCHEMA = "json_schema"
REGEX = "regex"
LARK = "lark"
KINDS = (JSON_OBJECT, JSON_SCHEMA, REGEX, LARK)

MAX_LENGTH = 1 << 18
"""Characters of a schema, expression or grammar."""
MAX_DEPTH = 64
"""Objects and lists within each other in a schema."""
MAX_MULTIPLE = 50_000
"""Of all ``multipleOf`` in a schema, the least common multiple: it is what an automaton counts."""
MAX_CHOICES = 4096

_EMBEDDED = re.compile(r"%json\b")
_MOST_DECIMALS = 12


@dataclass(frozen=True, slots=True)
class Grammar:
    """One of ``KINDS`` and its text; empty for ``json_object``.

    ``json_schema`` is a JSON schema whose properties come in the order in which it names them.
    ``regex`` is one of Rust's regex crate (no look-around, no references) with ASCII digits for
    ``\\d``, for the whole text.
    ``lark`` is a grammar in llguidance's dialect of Lark, whose first rule is ``start``. With
    ``lenient`` keywords of a schema that cannot be enforced are ignored, and ``oneOf`` may be met
    by several; otherwise such a schema is refused.

    Raises:
        SamplingError: the kind is not known; the text is too long, no JSON, nested too deeply,
            refers to another document, or would need an automaton that is too large.
    """

    kind: str
    text: str = ""
    lenient: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise SamplingError(one_of("grammar kind", str(self.kind)[:50], KINDS))
        if not isinstance(self.text, str):
            raise SamplingError(f"grammar text is {type(self.text).__name__}; expected a string")
        if len(self.text) > MAX_LENGTH:
            raise SamplingError(
                f"grammar of {len(self.text)} characters is too long; expected up to {MAX_LENGTH}"
            )
        try:
            self.text.encode()
        except UnicodeEncodeError:
            raise SamplingError(
                "grammar holds half of a surrogate pair, which is no Unicode text"
            ) from None
        if self.kind == JSON_SCHEMA:
            check_schema(parsed_schema(self.text))
        elif self.kind == LARK:
            for schema in _embedded_schemas(self.text):
                check_schema(schema)

    @classmethod
    def json_object(cls) -> Grammar:
        """Any JSON object."""
        return cls(JSON_OBJECT)

    @classmethod
    def json_schema(cls, schema: str | Mapping[str, Any], *, lenient: bool = False) -> Grammar:
        """JSON that a schema accepts; the schema as text, or as an object."""
        if not isinstance(schema, str):
            schema = dumped(schema)
        return cls(JSON_SCHEMA, schema, lenient)

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Text that matches an expression from its beginning to its end."""
        return cls(REGEX, pattern)

    @classmethod
    def lark(cls, text: str) -> Grammar:
        """Text that a grammar in llguidance's dialect of Lark generates."""
        return cls(LARK, text)

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Grammar:
        """One of several texts."""
        if isinstance(texts, str) or not texts or not all(isinstance(one, str) for one in texts):
            raise SamplingError("choice is no list of texts; expected one or more strings")
        if len(texts) > MAX_CHOICES:
            raise SamplingError(f"choice has {len(texts)} texts; expected up to {MAX_CHOICES}")
        return cls(REGEX, "|".join(_escaped(one) for one in texts))


def dumped(schema: Any) -> str:
    """A schema as text. Raises SamplingError for what JSON cannot hold."""
    try:
        return json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else _line(error)
        raise SamplingError(f"grammar is no JSON schema: {reason}") from None


def parsed_schema(text: str) -> Any:
    """The schema in ``text``. Raises SamplingError when it is none."""
    try:
        schema = json.loads(text, parse_float=Decimal, parse_constant=_no_constant)
    except RecursionError:
        raise SamplingError("grammar is no JSON schema: nested too deeply") from None
    except (ValueError, InvalidOperation) as error:
        raise SamplingError(f"grammar is no JSON schema: {_line(error)}") from None
    if not isinstance(schema, dict | bool):
        raise SamplingError(
            f"grammar is no JSON schema but a {type(schema).__name__}; expected an object"
        )
    return schema


def check_schema(schema: Any) -> None:
    """Raise SamplingError for a schema that must not be compiled."""
    multiples: list[Decimal] = []
    for node, depth in _nodes(schema):
        if depth > MAX_DEPTH:
            raise SamplingError(
                f"grammar nests more than {MAX_DEPTH} objects and lists; expected a flatter schema"
            )
        if not isinstance(node, dict):
            continue
        for name in ("$ref", "$dynamicRef"):
            target = node.get(name)
            if isinstance(target, str) and not target.startswith("#"):
                raise SamplingError(
                    f"grammar refers to {target[:100]!r}, another document; expected a reference "
                    "that begins with #"
                )
        multiple = node.get("multipleOf")
        if isinstance(multiple, int | Decimal) and not isinstance(multiple, bool):
            multiples.append(Decimal(multiple))
    _check_multiples(multiples)


def _nodes(schema: Any) -> Iterator[tuple[Any, int]]:
    """Every object and list of a schema with its depth; no recursion, so any depth is walked."""
    waiting = [(schema, 1)]
    while waiting:
        node, depth = waiting.pop()
        yield node, depth
        inner = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
        waiting += [(each, depth + 1) for each in inner if isinstance(each, dict | list)]


def _check_multiples(multiples: Sequence[Decimal]) -> None:
    """Compiling takes time and memory that grow with the square of what has to be counted."""
    if not multiples:
        return
    for each in multiples:
        small = each.is_finite() and 0 < each <= MAX_MULTIPLE
        if not small or round(each, _MOST_DECIMALS) != each:
            raise SamplingError(
                f"grammar has multipleOf {str(each)[:50]}; expected above 0 and up to "
                f"{MAX_MULTIPLE}, with at most {_MOST_DECIMALS} decimals"
            )
    # Digits after the point are counted too: in steps of the finest value's last one.
    scaled = [int(each.scaleb(_MOST_DECIMALS)) for each in multiples]
    unit = 10 ** min(_trailing_zeros(each) for each in scaled)
    least = math.lcm(*(each // unit for each in scaled))
    if least > MAX_MULTIPLE:
        raise SamplingError(
            f"grammar has values of multipleOf whose least common multiple is {least} in their "
            f"last digit; expected up to {MAX_MULTIPLE}"
        )


def _trailing_zeros(number: int) -> int:
    digits = str(number)
    return min(len(digits) - len(digits.rstrip("0")), _MOST_DECIMALS)


def _embedded_schemas(text: str) -> Iterator[Any]:
    """The JSON schemas inside a Lark grammar; what is no JSON is refused when it is compiled."""
    decoder = json.JSONDecoder(parse_float=Decimal)
    for found in _EMBEDDED.finditer(text):
        start = found.end()
        while start < len(text) and text[start].isspace():
            start += 1
        try:
            yield decoder.raw_decode(text, start)[0]
        except RecursionError:
            raise SamplingError("grammar has a JSON schema that is nested too deeply") from None
        except (ValueError, InvalidOperation):
            continue


def _escaped(text: str) -> str:
    return "".join("\\" + one if one in r"\.+*?()|[]{}^$#&-~/" else one for one in text)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
