"""What a parser finds in a text, piece by piece, and what all of it adds up to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Content:
    """Text that is no part of a call."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """Call number ``index`` of the answer is one of function ``name``."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the arguments, as JSON."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The arguments are complete: one JSON object."""

    index: int


@dataclass(frozen=True, slots=True)
class CallBroken:
    """What had begun is no call: its arguments are no JSON. ``text`` is all that was read of it.

    ``cut`` says that nothing was wrong with it but that the text ended.
    """

    index: int
    text: str
    cut: bool


Event = Content | CallBegin | CallArguments | CallEnd | CallBroken


@dataclass(slots=True)
class ReadCall:
    """A call as far as it was read."""

    name: str
    arguments: str = ""
    complete: bool = False


@dataclass(slots=True)
class ReadAnswer:
    """The text and the calls of an answer; broken calls are text, cut ones stay where they are."""

    content: str = ""
    calls: dict[int, ReadCall] = field(default_factory=dict)

    def add(self, events: Iterable[Event], *, keeps_cut: bool = True) -> None:
        """Take events in. Without ``keeps_cut`` a call that the end cut off is text as well."""
        for event in events:
            if isinstance(event, Content):
                self.content += event.text
            elif isinstance(event, CallBegin):
                self.calls[event.index] = ReadCall(event.name)
            elif isinstance(event, CallArguments):
                self.calls[event.index].arguments += event.text
            elif isinstance(event, CallEnd):
                self.calls[event.index].complete = True
            elif not (event.cut and keeps_cut):
                del self.calls[event.index]
                self.content += event.text
