"""Grammars of answers that call: of all that must, and of calls whose arguments must be right."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from layline.errors import SamplingError
from layline.grammar import Grammar, dumped
from layline.text.constraint import schema_options
from layline.text.tools.formats import HERMES, LLAMA, MISTRAL, PYTHONIC, ToolFormat

Terminal = Callable[[str], str]
"""How a grammar writes a marker: its token where it is special, its text otherwise."""

_SHARED = ("$defs", "definitions")


@dataclass(frozen=True)
class Function:
    """A function that may be called: its name, and the schema of its arguments.

    Those of a ``strict`` one follow the schema even where calling is up to the model.
    """

    name: str
    parameters: Mapping[str, Any] | None = None
    strict: bool = False

    def schema(self, *, free: bool = False) -> dict[str, Any]:
        """The schema of the arguments, with how it is enforced; ``free`` is any object.

        Raises SamplingError for one that is no object's.
        """
        given: Mapping[str, Any] = {"type": "object"}
        if not free:
            given = {"properties": {}, "additionalProperties": False}
            given = given if self.parameters is None else self.parameters
            if given.get("type", "object") != "object":
                raise SamplingError(
                    f"grammar of the arguments of {self.name!r} has the type {given['type']!r}; "
                    "expected 'object'"
                )
        options = schema_options(lenient=not self.strict)
        return {"type": "object", **given, "x-guidance": options}


def forced_calls(
    form: ToolFormat, functions: Sequence[Function], terminal: Terminal, *, parallel: bool
) -> Grammar:
    """An answer that is one call, or several where they may be ``parallel``."""
    rules = _rules(form, functions, terminal, parallel=parallel, free=False)
    return Grammar.lark("\n".join(["start: calls", *rules]))


def calls_or(
    form: ToolFormat,
    functions: Sequence[Function],
    terminal: Terminal,
    answer: str,
    *,
    parallel: bool,
) -> Grammar:
    """An answer that is calls, or JSON that the schema with the text ``answer`` accepts.

    Raises SamplingError where the first characters do not tell one from the other.
    """
    if form is LLAMA:
        raise SamplingError(
            "grammar cannot tell a call from another JSON object in this model's form of calls; "
            "expected tools or a JSON format, not both"
        )
    rules = _rules(form, functions, terminal, parallel=parallel, free=False)
    return Grammar.lark("\n".join(["start: calls | answer", f"answer: %json {answer}", *rules]))


def strict_calls(
    form: ToolFormat, functions: Sequence[Function], terminal: Terminal, *, parallel: bool
) -> Grammar:
    """Any text, but what begins as a call is one, and right where its function is strict."""
    rules = _rules(form, functions, terminal, parallel=parallel, free=True)
    marker = terminal(form.markers[0]) if form.markers else ""
    if form in (HERMES, MISTRAL):
        # Lazy: the text ends where the marker does, the first time.
        lazy = "" if marker.startswith("<") else "[lazy]"
        begin = f"begin{lazy}: TEXT {marker}"
        repeated = "*" if parallel else "?"
        start = f"start: (begin call_rest){repeated} rest"
        return Grammar.lark("\n".join([start, begin, "rest: TEXT", r"TEXT: /(.|\n)*/", *rules]))
    first = {LLAMA.name: "{", PYTHONIC.name: r"\["}[form.name]
    text = rf"TEXT: /([^{first} \n\r\t](.|\n)*)?/"
    return Grammar.lark("\n".join(["start: calls | TEXT", text, *rules]))


def _rules(
    form: ToolFormat,
    functions: Sequence[Function],
    terminal: Terminal,
    *,
    parallel: bool,
    free: bool,
) -> list[str]:
    """``calls``, and ``call_rest``: what follows the first marker. ``free``: by strictness."""
    bodies = " | ".join(f"call_{number}" for number in range(len(functions)))
    rules = [f"body: {bodies}"]
    for number, function in enumerate(functions):
        loose = free and not function.strict
        if form is PYTHONIC:
            rules += _keyword_call(number, function, loose=loose)
            continue
        head = f'{{"name": {json.dumps(function.name)}, "{form.arguments}": '
        schema = dumped(function.schema(free=loose))
        rules.append(f'call_{number}: {json.dumps(head)} arguments_{number} "}}"')
        rules.append(f"arguments_{number}: %json {schema}")
    return [*_frame(form, terminal, parallel=parallel), *rules]


def _frame(form: ToolFormat, terminal: Terminal, *, parallel: bool) -> list[str]:
    """What stands around and between calls."""

    def several(separator: str) -> str:
        return f"body ({json.dumps(separator)} body)*" if parallel else "body"

    if form is HERMES:
        opening, closing = (terminal(marker) for marker in form.markers)
        more = rf'("\n" {opening} call_rest)*' if parallel else ""
        return [
            f"calls: {opening} call_rest {more}",
            rf"call_rest: /\n?/ body /\n?/ {closing}",
        ]
    if form is MISTRAL:
        rest = several(", ")
        return [
            f"calls: {terminal(form.markers[0])} call_rest",
            f'call_rest: / ?/ "[" {rest} "]"',
        ]
    if form is LLAMA:
        return [f"calls: {several('; ')}"]
    return [f'calls: "[" {several(", ")} "]"']


def _keyword_call(number: int, function: Function, *, loose: bool) -> list[str]:
    """``name(key=value, ...)``; keys in the order of the schema, values as JSON writes them."""
    head = json.dumps(f"{function.name}(")
    schema = function.schema(free=loose)
    properties = schema.get("properties")
    if not isinstance(properties, dict) or not properties:
        if schema.get("additionalProperties") is False or (not loose and properties == {}):
            return [f'call_{number}: {head} ")"']
        value = f"value_{number}: %json {{}}"
        pair = f'pair_{number}: /[A-Za-z_][A-Za-z0-9_]*/ "=" value_{number}'
        pairs = f'(pair_{number} (", " pair_{number})*)?'
        return [f'call_{number}: {head} {pairs} ")"', pair, value]
    required = schema.get("required")
    needed = set(required) if isinstance(required, list) else set()
    shared = {name: schema[name] for name in (*_SHARED, "x-guidance") if name in schema}
    rules = []
    for place, (key, inner) in enumerate(properties.items()):
        if not key.isidentifier():
            raise SamplingError(
                f"grammar of the arguments of {function.name!r} has the name {key[:50]!r}, which "
                "this model's form of calls cannot write; expected letters, digits and _"
            )
        value = dumped({**inner, **shared} if isinstance(inner, dict) else inner)
        rules.append(
            f"pair_{number}_{place}: {json.dumps(key + '=', ensure_ascii=False)} %json {value}"
        )
    rules += _in_order(number, [key in needed for key in properties])
    return [f'call_{number}: {head} keys_{number}_0 ")"', *rules]


def _in_order(number: int, needed: Sequence[bool]) -> list[str]:
    """``keys_N_0``: the pairs of call N in order, with commas between; what is not needed may miss.

    ``keys`` has no pair before it yet, ``more`` has one.
    """
    rules = []
    last = len(needed)
    for place, is_needed in enumerate(needed):
        pair, after = f"pair_{number}_{place}", f"more_{number}_{place + 1}"
        skip_first = "" if is_needed else f" | keys_{number}_{place + 1}"
        skip_later = "" if is_needed else f" | {after}"
        rules.append(f"keys_{number}_{place}: {pair} {after}{skip_first}")
        rules.append(f'more_{number}_{place}: ", " {pair} {after}{skip_later}')
    return [*rules, f'keys_{number}_{last}: ""', f'more_{number}_{last}: ""']
