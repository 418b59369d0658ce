"""One call written as a JSON object with a name and arguments, read as it arrives."""

from __future__ import annotations

import json

from layline.text.tools.events import CallArguments, CallBegin, CallBroken, CallEnd, Content, Event
from layline.text.tools.json_scan import JsonError, ObjectScanner

ARGUMENTS = ("arguments", "parameters")
_NO_ARGUMENTS = "{}"


class CallObject:
    """Reads the object of call number ``index``; anything but a call of one of ``names`` fails.

    Args:
        index: the call's number in its answer.
        names: the functions that may be called.
        before: what stands before the object and is text again if this is no call.
        needs_arguments: an object without arguments is no call.
    """

    def __init__(
        self, index: int, names: frozenset[str], before: str, *, needs_arguments: bool = False
    ) -> None:
        self.complete = False
        self.failed = False
        self.took_last = False
        self._index = index
        self._names = names
        self._raw = before
        self._needs_arguments = needs_arguments
        self._scanner = ObjectScanner()
        self._value = ""
        self._name = ""
        self._arguments = ""
        self._has_arguments = False
        self._begun = False

    def feed(self, character: str) -> list[Event]:
        """Take one character in; afterwards look at ``complete`` and ``failed``.

        Where ``took_last`` is false the character that made it fail is no part of the call: it is
        text, or the beginning of another one.
        """
        try:
            in_value = self._scanner.feed(character)
        except JsonError:
            self.took_last = False
            return self._fail()
        self.took_last = True
        self._raw += character
        fresh = ""
        if in_value:
            self._value += character
            fresh = self._streamed(character)
        events = self._ended_value() if self._scanner.ended else []
        if self.failed:
            return events
        if fresh and self._begun:
            events = [CallArguments(self._index, fresh), *events]
        elif self._ready():
            events += self._begin()
        return events + self._completed() if self._scanner.complete else events

    def cut(self) -> list[Event]:
        """The text ends here."""
        return self._fail(cut=True)

    def _key(self) -> str:
        key: str = json.loads(self._scanner.key)
        return key

    def _streamed(self, character: str) -> str:
        """``character``, where it belongs to arguments that are an object."""
        is_object = self._value.startswith("{") and not self._has_arguments
        if not is_object or self._key() not in ARGUMENTS:
            return ""
        self._arguments += character
        return character

    def _ended_value(self) -> list[Event]:
        key, value = self._key(), self._value
        self._value = ""
        if key == "name" and not self._name:
            name = json.loads(value)
            if not isinstance(name, str) or name not in self._names:
                return self._fail()
            self._name = name
        elif key in ARGUMENTS and not self._has_arguments:
            self._has_arguments = True
            if not self._arguments:
                self._arguments = _unwrapped(value)
                if not self._arguments:
                    return self._fail()
        return []

    def _ready(self) -> bool:
        return bool(self._name and self._arguments) and not self._begun

    def _begin(self) -> list[Event]:
        self._begun = True
        return [CallBegin(self._index, self._name), CallArguments(self._index, self._arguments)]

    def _completed(self) -> list[Event]:
        if not self._begun:
            if not self._name or self._needs_arguments:
                return self._fail()
            self._arguments = _NO_ARGUMENTS
            self.complete = True
            return [*self._begin(), CallEnd(self._index)]
        self.complete = True
        return [CallEnd(self._index)]

    def _fail(self, *, cut: bool = False) -> list[Event]:
        self.failed = True
        if self._begun:
            return [CallBroken(self._index, self._raw, cut)]
        return [Content(self._raw)]


def _unwrapped(value: str) -> str:
    """Arguments that are no object: text that holds one, or null for none; "" for anything else."""
    found = json.loads(value)
    if found is None:
        return _NO_ARGUMENTS
    if isinstance(found, str):
        try:
            inner = json.loads(found)
        except (ValueError, RecursionError):
            return ""
        return found if isinstance(inner, dict) else ""
    return ""
