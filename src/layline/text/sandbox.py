"""The jinja2 environment in which a checkpoint's chat template runs.

A template is somebody else's program. It can reach neither the interpreter nor files (jinja2's
immutable sandbox, no loader), and what it may use is bounded: loop passes and macro calls, time,
the length of text and lists it builds, and the length of the output. Crossing a bound raises
``LimitError``.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import wraps
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

_PASSES = 1_000_000  # loop passes and macro calls in one rendering
_SECONDS = 10.0
_LENGTH = 1 << 24  # characters or items in one value, and characters of output
_NUMBER = 100_000  # the largest number that a method or filter is given
_BITS = 1 << 14  # of an integer that is multiplied or raised to a power
_SOURCE = 1 << 20  # characters of template source
_METER = "the meter of this rendering"  # no template can spell this name
_WIDE_FIELD = re.compile(r"\d{6}")  # a field width in a format string, far beyond any real one
_REFUSED_METHODS = frozenset(("expandtabs", "translate", "maketrans", "format_map"))


class LimitError(TemplateError):
    """The template used more than one rendering may."""


class RefusedError(TemplateError):
    """The template called ``raise_exception``: it does not accept these messages."""


class Meter:
    """Counts what one rendering uses."""

    def __init__(self) -> None:
        self._passes = 0
        self._characters = 0
        self._deadline = time.monotonic() + _SECONDS

    def step(self) -> None:
        """Count one loop pass or macro call."""
        self._passes += 1
        if self._passes > _PASSES:
            raise LimitError(f"it takes more than {_PASSES} loop passes")
        if time.monotonic() > self._deadline:
            raise LimitError(f"it takes longer than {_SECONDS:.0f} seconds")

    def output(self, text: str) -> str:
        """Count ``text`` as output and return it."""
        self._characters += len(text)
        if self._characters > _LENGTH:
            raise LimitError(f"it writes more than {_LENGTH} characters")
        return text


class _Generation(Extension):
    """``{% generation %}`` marks what the assistant said, for training; here it does nothing."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 reads a plain set of the class

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox with the globals and filters that chat templates expect, and the bounds."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
        )
        self.filters = {name: _bounded_filter(name, f) for name, f in self.filters.items()}
        self.filters["tojson"] = _to_json
        del self.globals["lipsum"]
        self.globals["namespace"] = _namespace
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def render(self, template: Any, variables: Mapping[str, Any]) -> str:
        """Run a template made by ``prepare``."""
        meter = Meter()
        pieces = template.generate({**variables, _METER: meter})
        return "".join([meter.output(piece) for piece in pieces])

    def prepare(self, source: str) -> Any:
        """Compile ``source`` with a step counted in every loop, macro and block."""
        if len(source) > _SOURCE:
            raise LimitError(f"its source is longer than {_SOURCE} characters")
        tree = self.parse(source)
        for node in list(tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock, nodes.Block))):
            count = nodes.Call(
                nodes.EnvironmentAttribute("count_step"), [nodes.ContextReference()], [], None, None
            )
            node.body.insert(0, nodes.ExprStmt(count).set_lineno(node.lineno))  # type: ignore[attr-defined]
        for reference in tree.find_all(nodes.NSRef):
            _check_attribute(reference.attr)
        _join_concatenations(tree)
        tree.set_environment(self)
        return self.from_string(tree)

    def count_step(self, context: Context) -> None:
        """What ``prepare`` puts into the template; finds the meter in the rendering's variables."""
        context.parent[_METER].step()

    def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
        """Refuse at once; jinja2's own answer would print as nothing."""
        raise SecurityError(f"access to attribute {attribute!r} of {type(obj).__name__} is unsafe")

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str) and attr in _REFUSED_METHODS:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            _check_format(left, [right])
        elif operator == "+":
            _check_length(_size(left) + _size(right))
        elif operator == "*":
            _check_product(left, right)
        elif operator == "**":
            _check_power(left, right)
        return _checked(super().call_binop(context, operator, left, right))

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str):
            name = getattr(obj, "__name__", "")
            if name == "join" and args:
                _check_join(args[0], owner)
            _check_use(name, owner, [*args, *kwargs.values()])
        return _checked(super().call(context, obj, *args, **kwargs))


def _join_concatenations(tree: nodes.Node) -> None:
    """Turn ``a ~ b`` into a call of the bounded filter "join", which does the same."""
    for field, value in tree.iter_fields():
        if isinstance(value, nodes.Concat):
            setattr(tree, field, _as_join(value))
        elif isinstance(value, list):
            setattr(tree, field, [_as_join(v) if isinstance(v, nodes.Concat) else v for v in value])
    for child in tree.iter_child_nodes():
        _join_concatenations(child)


def _as_join(concat: nodes.Concat) -> nodes.Filter:
    items = nodes.List(concat.nodes, lineno=concat.lineno)
    return nodes.Filter(items, "join", [nodes.Const("")], [], None, None, lineno=concat.lineno)


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    # Filters marked by jinja2 are given the context or environment before the value.
    first = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        value, others = args[first], [*args[first + 1 :], *kwargs.values()]
        if name == "join":
            _check_join(value, next((a for a in others if isinstance(a, str)), ""))
        _check_use(name, value, others)
        return _checked(function(*args, **kwargs))

    return bounded


def _check_use(name: str, value: Any, arguments: Sequence[Any]) -> None:
    """Refuse a method or filter call whose result would be longer than a value may be."""
    numbers = [abs(a) for a in arguments if isinstance(a, int)]
    if max(numbers, default=0) > _NUMBER:
        raise LimitError(f"it calls {name!r} with a number above {_NUMBER}")
    texts = [a for a in arguments if isinstance(a, str)]
    if name == "replace" and isinstance(value, str) and len(texts) > 1:
        _check_length(value.count(texts[0]) * len(texts[1]))
    elif name == "format" and isinstance(value, str):
        _check_format(value, arguments)
    elif name == "indent" and isinstance(value, str):
        width = max([len(t) for t in texts] + numbers, default=0)
        _check_length((value.count("\n") + 1) * width)


def _check_join(items: Any, separator: str) -> None:
    if isinstance(items, list | tuple | str):
        _check_length(len(items) * len(separator) + sum(map(_size, items)))


def _check_format(text: str, arguments: Iterable[Any]) -> None:
    numbers = [n for a in arguments for n in (a if isinstance(a, tuple) else (a,))]
    if _WIDE_FIELD.search(text) or ("*" in text and any(_is_large(n) for n in numbers)):
        raise LimitError("it formats a value with an absurd width")


def _is_large(number: Any) -> bool:
    return isinstance(number, int) and abs(number) > _NUMBER


def _check_product(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        if left.bit_length() + right.bit_length() > _BITS:
            raise LimitError("it computes an absurdly large number")
    elif isinstance(right, int):
        _check_length(_size(left) * max(right, 0))
    elif isinstance(left, int):
        _check_length(_size(right) * max(left, 0))


def _check_power(base: Any, exponent: Any) -> None:
    whole = isinstance(base, int) and isinstance(exponent, int)
    if whole and base.bit_length() * abs(exponent) > _BITS:
        raise LimitError("it computes an absurdly large number")


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple | dict) else 0


def _check_length(length: int) -> None:
    if length > _LENGTH:
        raise LimitError(f"it builds a value longer than {_LENGTH}")


def _checked(value: Any) -> Any:
    _check_length(_size(value))
    return value


def _check_attribute(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold the attribute {name!r}")


def _namespace(*args: Any, **kwargs: Any) -> Namespace:
    attributes = dict(*args, **kwargs)
    for name in attributes:
        _check_attribute(name)
    return Namespace(attributes)


def _raise_exception(message: object) -> None:
    raise RefusedError(str(message))


def _strftime_now(pattern: str) -> str:
    _check_format(pattern, ())
    return datetime.now().strftime(pattern)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is, where jinja2's own filter would escape it for HTML."""
    if indent is not None and not 0 <= indent <= 16:
        raise LimitError(f"it indents JSON by {indent}")
    text = json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
    _check_length(len(text))
    return text
