"""Calls as JSON objects behind a marker: the forms of Hermes and Qwen, of Mistral and of Llama."""

from __future__ import annotations

from collections.abc import Callable

from layline.text.tools.parser import ToolParser

_SPACE = " \t\n\r"


class _ObjectParser(ToolParser):
    """Calls that are JSON objects."""

    def before_object(self, character: str) -> None:
        """Wait for the brace that opens a call."""
        if character in _SPACE:
            self.keep(character)
        elif character == "{":
            self.open_call(character)
        else:
            self.give_up(character)


class HermesParser(_ObjectParser):
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, once or several times."""

    markers = ("<tool_call>",)
    closing = "</tool_call>"

    def begin(self, marker: str) -> None:
        """See ToolParser."""
        self.keep(marker)
        self.go(self.before_object)

    def after_call(self, character: str) -> None:
        """The closing marker; a model that leaves it out has called all the same."""
        self.keep(character)
        seen = self.kept.lstrip(_SPACE)
        if seen == self.closing:
            self.forget()
            self.back_to_text()
        elif not self.closing.startswith(seen):
            raw = self.kept
            self.forget()
            self.back_to_text()
            for each in raw:
                self.take(each)


class MistralParser(_ObjectParser):
    """``[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]``."""

    markers = ("[TOOL_CALLS]",)

    def begin(self, marker: str) -> None:
        """See ToolParser."""
        self.keep(marker)
        self.go(self._before_list)

    def _before_list(self, character: str) -> None:
        if character in _SPACE:
            self.keep(character)
        elif character == "[":
            self.keep(character)
            self.go(self.before_object)
        else:
            self.give_up(character)

    @property
    def between(self) -> tuple[Callable[[str], None], ...]:
        """See ToolParser."""
        return (self.after_call, self.before_object)

    def after_call(self, character: str) -> None:
        """A comma and another call, or the end of the list."""
        self.keep(character)
        if character == ",":
            self.go(self.before_object)
        elif character == "]":
            self.forget()
            self.back_to_text()
        elif character not in _SPACE:
            self.spill()
            self.back_to_text()


class LlamaParser(_ObjectParser):
    """``{"name": ..., "parameters": {...}}`` as a whole answer, several with ``;`` between them.

    ``<|python_tag|>`` may stand before a call; behind it one may begin anywhere in the answer.
    """

    markers = ("<|python_tag|>",)

    def __init__(self, names: frozenset[str]) -> None:
        super().__init__(names)
        self.go(self._at_start)

    def begin(self, marker: str) -> None:
        """See ToolParser."""
        self.keep(marker)
        self.go(self.before_object)

    def _at_start(self, character: str) -> None:
        if character in _SPACE:
            self.keep(character)
        elif character == "{":
            self.open_call(character, needs_arguments=True)
        else:
            self.give_up(character)

    def after_call(self, character: str) -> None:
        """Another call after a semicolon or white space, or text."""
        if character in _SPACE or character == ";":
            self.keep(character)
        elif character == "{":
            self.open_call(character, needs_arguments=True)
        else:
            self.give_up(character)
