"""Telling text from calls as both arrive: what all parsers have in common.

A parser takes one character after the other, so what it finds does not depend on how a text is cut
into pieces. Of text it holds back what may begin a marker, and white space that a call may follow.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from layline.text.tools.call_object import CallObject
from layline.text.tools.events import CallArguments, CallBroken, Content, Event


class ToolParser(ABC):
    """Reads one answer.

    Args:
        names: the functions that may be called; a call of another one is text.
    """

    markers: tuple[str, ...] = ()
    """Texts that begin calls."""

    def __init__(self, names: frozenset[str]) -> None:
        self.num_calls = 0
        self._names = names
        self._state: Callable[[str], None] = self.text
        self._events: list[Event] = []
        self._held = ""
        self._space = ""
        self._raw = ""
        self._call: CallObject | None = None
        self._marked = False
        self._called = False

    def feed(self, text: str) -> list[Event]:
        """What ``text`` adds, in order; neighbouring pieces of text are one."""
        for character in text:
            self._state(character)
        return self._taken()

    def finish(self, *, cut: bool = False) -> list[Event]:
        """What was held back, when the text is over.

        Where it was ``cut`` by its length, the beginning of a call that a marker told of is left
        out, as neither text nor call.
        """
        if self._call is not None:
            events = self._call.cut()
            if not (cut and self._marked and isinstance(events[0], Content)):
                self._emit(events)
            self._call = None
        elif (cut and self._marked) or (self._called and self._state in self.between):
            # What was to close a call, or to lead to one.
            self.forget()
        else:
            self.spill()
        if not (cut and self._called):
            # After a call the beginning of a marker is likely to be another one's.
            self._say(self._held)
        self._held = ""
        if not self._called:
            self._flush_space()
        return self._taken()

    @property
    def between(self) -> tuple[Callable[[str], None], ...]:
        """The states in which, after a call, nothing but separators has been read."""
        return (self.after_call,)

    def text(self, character: str) -> None:
        """Between calls: text until a marker is complete."""
        held = self._held + character
        while held and not any(marker.startswith(held) for marker in self.markers):
            self._say(held[0])
            held = held[1:]
        if held in self.markers:
            self._held = ""
            self.mark()
            self.begin(held)
        else:
            self._held = held

    @abstractmethod
    def begin(self, marker: str) -> None:
        """A marker is complete: go to the state of what follows it."""

    def mark(self) -> None:
        """From here on it is a call that is read, whatever becomes of it."""
        self._marked = True

    def back_to_text(self) -> None:
        """What comes next is text."""
        self._marked = False
        self._state = self.text

    def go(self, state: Callable[[str], None]) -> None:
        """Have ``state`` take the next character."""
        self._state = state

    def take(self, character: str) -> None:
        """Have the present state take a character again."""
        self._state(character)

    @property
    def kept(self) -> str:
        """What would be text if no call came of it."""
        return self._raw

    def count_call(self) -> None:
        """A call is complete; white space around calls is no text."""
        self.num_calls += 1
        self._called = True
        self._space = ""

    def keep(self, raw: str) -> None:
        """Remember ``raw``, which is text if no call comes of it."""
        self._raw += raw

    def forget(self) -> None:
        """What was kept belongs to a call."""
        self._raw = ""

    def spill(self) -> None:
        """What was kept is text."""
        raw, self._raw = self._raw, ""
        self._say(raw)

    def give_up(self, character: str) -> None:
        """No call after all: what was kept is text, and so may ``character`` be."""
        self.spill()
        self.back_to_text()
        self.text(character)

    def open_call(self, character: str, *, needs_arguments: bool = False) -> None:
        """A call's object begins with ``character``."""
        self._call = CallObject(
            self.num_calls, self._names, self._raw, needs_arguments=needs_arguments
        )
        self._raw = ""
        self._state = self._in_call
        self._in_call(character)

    @abstractmethod
    def after_call(self, character: str) -> None:
        """The state after a complete call."""

    def _in_call(self, character: str) -> None:
        assert self._call is not None
        events = self._call.feed(character)
        self._emit(events)
        if self._call.complete:
            self.count_call()
            self._call = None
            self.mark()
            self._state = self.after_call
        elif self._call.failed:
            taken = self._call.took_last
            self._call = None
            self.back_to_text()
            if not taken:
                self.text(character)

    def _emit(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Content):
                self._say(event.text)
            elif isinstance(event, CallBroken):
                # What was begun keeps its number, whatever became of it.
                self.num_calls += 1
                space, self._space = self._space, ""
                self._events.append(CallBroken(event.index, space + event.text, event.cut))
            elif isinstance(event, CallArguments) and self._goes_on(event):
                self._events[-1] = CallArguments(event.index, self._last_text() + event.text)
            else:
                self._events.append(event)

    def _goes_on(self, event: CallArguments) -> bool:
        last = self._events[-1] if self._events else None
        return isinstance(last, CallArguments) and last.index == event.index

    def _last_text(self) -> str:
        last = self._events[-1]
        assert isinstance(last, Content | CallArguments)
        return last.text

    def _say(self, text: str) -> None:
        """Text that is certain; white space at its end waits for what follows."""
        shown = text.rstrip()
        if shown:
            self._flush_space()
            self._add(shown)
        self._space += text[len(shown) :]

    def _flush_space(self) -> None:
        space, self._space = self._space, ""
        self._add(space)

    def _add(self, text: str) -> None:
        if not text:
            return
        if self._events and isinstance(self._events[-1], Content):
            text = self._last_text() + text
            self._events.pop()
        self._events.append(Content(text))

    def _taken(self) -> list[Event]:
        events, self._events = self._events, []
        return events
