"""Reading one JSON object character by character, as strictly as JSON is defined (RFC 8259)."""

from __future__ import annotations

MAX_DEPTH = 200
_SPACE = " \t\n\r"
_HEX = frozenset("0123456789abcdefABCDEF")
_LITERALS = {"t": "true", "f": "false", "n": "null"}
_DIGITS = frozenset("0123456789")
# What may follow in a number, by what was read of it: sign, zero, digits, point, decimals, e, sign
# of e, digits of e. A number may end in the states of _ENDS.
_NUMBER = {
    "-": {"0": "0", "d": "9"},
    "0": {".": ".", "e": "e"},
    "9": {"d": "9", ".": ".", "e": "e"},
    ".": {"d": "5"},
    "5": {"d": "5", "e": "e"},
    "e": {"+": "+", "d": "8"},
    "+": {"d": "8"},
    "8": {"d": "8"},
}
_ENDS = frozenset("0958")


class JsonError(ValueError):
    """The character cannot follow."""


class ObjectScanner:
    """Checks an object and says of each character whether it belongs to a member's value.

    ``key`` is the raw text, quotes included, of the outermost object's latest key; ``ended`` is
    true after a character with which that member's value ended, ``complete`` once the object has.
    """

    def __init__(self) -> None:
        self.key = ""
        self.ended = False
        self.complete = False
        self._stack: list[str] = []
        self._expected = "start"
        self._rest = ""
        self._in_value = False
        self._in_key = False

    def feed(self, character: str) -> bool:
        """Take one character; True when it is part of a value. Raises JsonError."""
        self.ended = False
        if self._expected == "number" and self._number(character):
            return self._in_value
        before = self._in_value
        self._step(character)
        if self._in_key:
            self.key += character
        return before or self._in_value

    def _step(self, character: str) -> None:
        expected = self._expected
        if expected in ("string", "escape", "hex"):
            self._string(character)
        elif expected == "literal":
            self._literal(character)
        elif character in _SPACE and expected != "start":
            pass
        elif expected == "start":
            self._require(character == "{")
            self._open("{")
        elif expected in ("key", "key or end"):
            self._key(character, may_end=expected == "key or end")
        elif expected == "colon":
            self._require(character == ":")
            self._expected = "value"
        elif expected in ("value", "value or end"):
            self._value(character, may_end=expected == "value or end")
        else:
            self._comma(character)

    def _key(self, character: str, *, may_end: bool) -> None:
        if character == "}" and may_end:
            self._close(character)
            return
        self._require(character == '"')
        self._expected = "string"
        self._rest = "key"
        if len(self._stack) == 1:
            self.key, self._in_key = "", True

    def _value(self, character: str, *, may_end: bool) -> None:
        if character == "]" and may_end:
            self._close(character)
            return
        if len(self._stack) == 1:
            self._in_value = True
        if character == '"':
            self._expected, self._rest = "string", "value"
        elif character in "{[":
            self._open(character)
        elif character in _LITERALS:
            self._expected, self._rest = "literal", _LITERALS[character][1:]
        else:
            self._require(character == "-" or character in _DIGITS)
            self._expected = "number"
            self._rest = character if character in "-0" else "9"

    def _comma(self, character: str) -> None:
        if character in "}]":
            self._close(character)
            return
        self._require(character == ",")
        self._expected = "key" if self._stack[-1] == "{" else "value"

    def _open(self, bracket: str) -> None:
        self._require(len(self._stack) < MAX_DEPTH)
        self._stack.append(bracket)
        self._expected = "key or end" if bracket == "{" else "value or end"

    def _close(self, bracket: str) -> None:
        self._require(self._stack.pop() + bracket in ("{}", "[]"))
        if self._stack:
            self._finish_value()
        else:
            self.complete = True
            self._expected = "nothing"

    def _finish_value(self) -> None:
        self._expected = "comma"
        if len(self._stack) == 1:
            self.ended, self._in_value = True, False

    def _string(self, character: str) -> None:
        if self._expected == "escape":
            self._require(character in '"\\/bfnrtu')
            self._expected = "hex" if character == "u" else "string"
            self._rest = f"{self._rest}:" if character == "u" else self._rest
        elif self._expected == "hex":
            self._require(character in _HEX)
            kind, _, seen = self._rest.partition(":")
            done = len(seen) == 3
            self._rest = kind if done else f"{self._rest}{character}"
            self._expected = "string" if done else "hex"
        elif character == "\\":
            self._expected = "escape"
        elif character != '"':
            self._require(character >= " ")
        elif self._rest == "key":
            self._expected = "colon"
            if self._in_key:
                self.key, self._in_key = f"{self.key}{character}", False
        else:
            self._finish_value()

    def _literal(self, character: str) -> None:
        self._require(character == self._rest[0])
        self._rest = self._rest[1:]
        if not self._rest:
            self._finish_value()

    def _number(self, character: str) -> bool:
        """Take a character of a number; False when it ended before this one."""
        kind = character
        if character in _DIGITS:
            kind = "0" if character == "0" and self._rest == "-" else "d"
        elif character in "eE":
            kind = "e"
        elif character in "+-":
            kind = "+"
        following = _NUMBER[self._rest].get(kind)
        if following is not None:
            self._rest = following
            return True
        self._require(self._rest in _ENDS)
        self._finish_value()
        return False

    def _require(self, holds: bool) -> None:
        if not holds:
            raise JsonError
