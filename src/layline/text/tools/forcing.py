"""Grammars of answers that call: of all that must, and of calls whose arguments must be right."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from layline.errors import SamplingError
from layline.grammar import JSON_SCHEMA, Grammar, dumped
from layline.text.constraint import schema_options
from layline.text.tools.formats import HERMES, LLAMA, MISTRAL, PYTHONIC, ToolFormat
from layline.text.tools.keyword_calls import keyword_call

Terminal = Callable[[str], str]
"""How a grammar writes a marker: its token where it is special, its text otherwise."""


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
                    f"grammar of the arguments of {self.name!r} has the type "
                    f"{str(given['type'])[:50]!r}; "
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
    answer: Grammar,
    *,
    parallel: bool,
) -> Grammar:
    """An answer that is calls, or the JSON of ``answer``.

    Raises SamplingError where the first characters do not tell one from the other.
    """
    if form is LLAMA:
        raise SamplingError(
            "grammar cannot tell a call from another JSON object in this model's form of calls; "
            "expected tools or a JSON format, not both"
        )
    schema = json.loads(answer.text) if answer.kind == JSON_SCHEMA else {"type": "object"}
    if isinstance(schema, dict):
        schema = {**schema, "x-guidance": schema_options(lenient=answer.lenient)}
    rules = _rules(form, functions, terminal, parallel=parallel, free=False)
    return Grammar.lark(
        "\n".join(["start: calls | answer", f"answer: %json {dumped(schema)}", *rules])
    )


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
            rules += keyword_call(
                number, function.name, function.schema(free=loose), exact=function.strict
            )
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
