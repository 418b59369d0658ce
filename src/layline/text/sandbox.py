"""The jinja2 environment in which a checkpoint's chat template runs.

A template is somebody else's program. It can reach neither the interpreter nor files (jinja2's
immutable sandbox, no loader), and what it may use is bounded by ``Limits``: loops and macros count
their passes, and an operation that would make too long a text or list is refused before it runs.
"""

from __future__ import annotations

import inspect
import json
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import wraps
from typing import Any

from jinja2 import TemplateError, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from layline.text.limits import Limits

# Names that no template can spell.
_METER = "the meter of this rendering"
_COUNT = "count a pass"
_WIDE_FIELD = re.compile(r"\d{6}")  # a field width in a format string, far beyond any real one
_REFUSED_METHODS = frozenset(("expandtabs", "translate", "maketrans", "format_map"))


class LimitError(TemplateError):
    """The template used more than one rendering may."""


class RefusedError(TemplateError):
    """The template called ``raise_exception``: it does not accept these messages."""


class Meter:
    """Counts what one rendering uses."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._passes = 0
        self._characters = 0
        self._deadline = time.monotonic() + limits.seconds

    def step(self) -> None:
        """Count one loop pass or macro call."""
        self._passes += 1
        if self._passes > self._limits.passes:
            raise LimitError(f"it takes more than {self._limits.passes} loop passes")
        if time.monotonic() > self._deadline:
            raise LimitError(f"it takes longer than {self._limits.seconds:g} seconds")

    def output(self, text: str) -> str:
        """Count ``text`` as output and return it."""
        self._characters += len(text)
        if self._characters > self._limits.length:
            raise LimitError(f"it writes more than {self._limits.length} characters")
        return text


class Guard:
    """Refuses operations by the size of what they would make."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits

    def length(self, length: int) -> None:
        """Refuse a text or list of this length."""
        if length > self._limits.length:
            raise LimitError(f"it builds a value longer than {self._limits.length}")

    def result(self, value: Any) -> Any:
        """``value``, unless it is too long."""
        self.length(_size(value))
        return value

    def use(self, name: str, value: Any, arguments: Sequence[Any]) -> None:
        """Refuse a call of method or filter ``name`` on ``value``."""
        numbers = [abs(a) for a in arguments if isinstance(a, int)]
        if max(numbers, default=0) > self._limits.number:
            raise LimitError(f"it calls {name!r} with a number above {self._limits.number}")
        if not isinstance(value, str):
            return
        texts = [a for a in arguments if isinstance(a, str)]
        if name == "replace" and len(texts) > 1:
            self.length(value.count(texts[0]) * len(texts[1]))
        elif name == "format":
            self.format(value, arguments)
        elif name == "indent":
            width = max([len(text) for text in texts] + numbers, default=0)
            self.length((value.count("\n") + 1) * width)

    def join(self, items: Any, separator: str) -> None:
        """Refuse joining ``items``."""
        if isinstance(items, list | tuple | str):
            self.length(len(items) * len(separator) + sum(map(_size, items)))

    def format(self, text: str, arguments: Iterable[Any]) -> None:
        """Refuse a format string with a field width no text needs."""
        values = [v for a in arguments for v in (a if isinstance(a, tuple) else (a,))]
        largest = max((abs(v) for v in values if isinstance(v, int)), default=0)
        if _WIDE_FIELD.search(text) or ("*" in text and largest > self._limits.number):
            raise LimitError("it formats a value with an absurd width")

    def product(self, left: Any, right: Any) -> None:
        """Refuse ``left * right``."""
        if isinstance(left, int) and isinstance(right, int):
            self._bits(left.bit_length() + right.bit_length())
        elif isinstance(right, int):
            self.length(_size(left) * max(right, 0))
        elif isinstance(left, int):
            self.length(_size(right) * max(left, 0))

    def power(self, base: Any, exponent: Any) -> None:
        """Refuse ``base ** exponent``."""
        if isinstance(base, int) and isinstance(exponent, int):
            self._bits(base.bit_length() * abs(exponent))

    def _bits(self, bits: int) -> None:
        if bits > self._limits.bits:
            raise LimitError("it computes an absurdly large number")


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

    def __init__(self, limits: Limits) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
        )
        self._limits = limits
        self._guard = Guard(limits)
        self.filters = {name: self._bounded(name, f) for name, f in self.filters.items()}
        self.filters["tojson"] = self._bounded("tojson", _to_json)
        self.filters[_COUNT] = _count
        del self.globals["lipsum"]
        self.globals["namespace"] = _namespace
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = self._strftime_now

    def render(self, template: Any, variables: Mapping[str, Any]) -> str:
        """Run a template made by ``prepare``."""
        meter = Meter(self._limits)
        pieces = template.generate({**variables, _METER: meter})
        return "".join([meter.output(piece) for piece in pieces])

    def prepare(self, source: str) -> Any:
        """Compile ``source`` with a pass counted in every loop, macro and block."""
        if len(source) > self._limits.source:
            raise LimitError(f"its source is longer than {self._limits.source} characters")
        tree = self.parse(source)
        for node in list(tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock, nodes.Block))):
            count = nodes.Filter(nodes.Const(None), _COUNT, [], [], None, None, lineno=node.lineno)
            node.body.insert(0, nodes.ExprStmt(count, lineno=node.lineno))  # type: ignore[attr-defined]
        for reference in tree.find_all(nodes.NSRef):
            _check_attribute(reference.attr)
        _join_concatenations(tree)
        tree.set_environment(self)
        return self.from_string(tree)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
        """Refuse at once; jinja2's own answer would print as nothing."""
        raise SecurityError(f"access to attribute {attribute!r} of {type(obj).__name__} is unsafe")

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Also refuse methods of text whose result is hard to foresee."""
        if isinstance(obj, str) and attr in _REFUSED_METHODS:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Run one of ``intercepted_binops`` within the bounds."""
        if operator == "%" and isinstance(left, str):
            self._guard.format(left, [right])
        elif operator == "+":
            self._guard.length(_size(left) + _size(right))
        elif operator == "*":
            self._guard.product(left, right)
        elif operator == "**":
            self._guard.power(left, right)
        return self._guard.result(super().call_binop(context, operator, left, right))

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a method or function of the template within the bounds."""
        # jinja2 wraps str.format; the method itself is inside.
        method = inspect.unwrap(obj) if inspect.isfunction(obj) else obj
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str):
            if method.__name__ == "join" and args:
                self._guard.join(args[0], owner)
            self._guard.use(method.__name__, owner, [*args, *kwargs.values()])
        return self._guard.result(super().call(context, obj, *args, **kwargs))

    def _bounded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        # Filters marked by jinja2 are given the context or environment before the value.
        first = 1 if hasattr(function, "jinja_pass_arg") else 0

        @wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            value, others = args[first], [*args[first + 1 :], *kwargs.values()]
            if name == "join":
                self._guard.join(value, next((a for a in others if isinstance(a, str)), ""))
            self._guard.use(name, value, others)
            return self._guard.result(function(*args, **kwargs))

        return bounded

    def _strftime_now(self, pattern: str) -> str:
        self._guard.format(pattern, ())
        return datetime.now().strftime(pattern)


@pass_context
def _count(context: Context, _: None) -> None:
    """What ``prepare`` puts into loops: the meter is among the variables of the rendering."""
    context.parent[_METER].step()


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


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple | dict) else 0


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
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
