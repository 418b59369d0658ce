"""Calls written as a list of Python calls: ``[f(a=1), g(b="x")]`` as a whole answer.

Arguments are literals, given by name. A call is told of once its closing bracket is there. JSON's
``true``, ``false`` and ``null`` are understood beside Python's names of them.
"""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Callable

from layline.text.tools.events import CallArguments, CallBegin, CallEnd
from layline.text.tools.parser import ToolParser

MAX_LENGTH = 1 << 16
MAX_DEPTH = 32
_SPACE = " \t\n\r"
_CLOSES = {"(": ")", "[": "]", "{": "}"}
_JSON_NAMES = {"true": True, "false": False, "null": None}


class PythonicParser(ToolParser):
    """Reads one answer; see the module."""

    markers = ()

    def __init__(self, names: frozenset[str]) -> None:
        super().__init__(names)
        self._name = ""
        self._source = ""
        self._open: list[str] = []
        self._quote = ""
        self._escaped = False
        self.go(self._at_start)

    def begin(self, marker: str) -> None:
        """Nothing marks a call."""
        raise AssertionError(marker)

    def _at_start(self, character: str) -> None:
        if character in _SPACE:
            self.keep(character)
        elif character == "[":
            self.keep(character)
            self.go(self._before_name)
        else:
            self.give_up(character)

    def _before_name(self, character: str) -> None:
        if character in _SPACE:
            self.keep(character)
        else:
            self._name = ""
            self.go(self._in_name)
            self._in_name(character)

    def _in_name(self, character: str) -> None:
        if character == "(" and self._name in self._names:
            self.keep(character)
            self._source, self._open, self._quote, self._escaped = "", [")"], "", False
            self.mark()
            self.go(self._in_arguments)
        elif any(name.startswith(self._name + character) for name in self._names):
            self._name += character
            self.keep(character)
        else:
            self.give_up(character)

    def _in_arguments(self, character: str) -> None:
        self.keep(character)
        if self._quote:
            self._in_text(character)
        elif character in "\"'":
            self._quote = character
        elif character in _CLOSES:
            self._open.append(_CLOSES[character])
        elif character in ")]}" and self._open.pop() != character:
            self._stop()
            return
        if len(self._open) > MAX_DEPTH or len(self._source) > MAX_LENGTH:
            self._stop()
        elif self._open:
            self._source += character
        else:
            self._end_call()

    def _in_text(self, character: str) -> None:
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == self._quote:
            self._quote = ""

    def _end_call(self) -> None:
        arguments = arguments_of(self._source)
        if arguments is None:
            self._stop()
            return
        index = self.num_calls
        self.count_call()
        self.forget()
        self._emit([CallBegin(index, self._name), CallArguments(index, arguments), CallEnd(index)])
        self.go(self.after_call)

    def _stop(self) -> None:
        self.spill()
        self.back_to_text()

    @property
    def between(self) -> tuple[Callable[[str], None], ...]:
        """See ToolParser."""
        return (self.after_call, self._before_name)

    def after_call(self, character: str) -> None:
        """A comma and another call, or the end of the list."""
        self.keep(character)
        if character == ",":
            self.go(self._before_name)
        elif character == "]":
            self.forget()
            self.back_to_text()
        elif character not in _SPACE:
            self._stop()


def arguments_of(source: str) -> str | None:
    """What stands between the brackets of a call, as a JSON object; None where it is no call."""
    try:
        with warnings.catch_warnings(action="ignore", category=SyntaxWarning):
            call = ast.parse(f"f({source}\n)", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        found = {}
        for keyword in call.keywords:
            if keyword.arg is None or keyword.arg in found:
                return None
            found[keyword.arg] = ast.literal_eval(_PythonNames().visit(keyword.value))
        return json.dumps(found, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None


class _PythonNames(ast.NodeTransformer):
    """JSON's names of values as Python's."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Any other name stays, and is refused as no literal."""
        return ast.Constant(_JSON_NAMES[node.id]) if node.id in _JSON_NAMES else node
