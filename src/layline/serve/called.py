"""The calls in one answer as OpenAI's clients read them, whole and as events of a stream."""

from __future__ import annotations

import secrets
import string
from typing import Literal

from layline.serve.responses import (
    CallFunction,
    ChatFinishReason,
    Delta,
    FunctionDelta,
    ToolCall,
    ToolCallDelta,
)
from layline.serve.tool_use import ToolUse
from layline.text.tools.events import (
    CallArguments,
    CallBegin,
    Content,
    Event,
    ReadAnswer,
)

_LETTERS = string.ascii_letters + string.digits
_FUNCTION: Literal["function"] = "function"


class AnswerCalls:
    """Reads one answer as it arrives."""

    def __init__(self, use: ToolUse) -> None:
        self._use = use
        self._parser = use.form.parser(use.names)
        self._answer = ReadAnswer()
        self._sent = False

    def take(self, text: str, reason: str | None) -> list[Delta]:
        """What ``text``, with which the answer ends if there is a ``reason``, adds to a stream."""
        events = self._read(text, reason)
        return [delta for event in events if (delta := self._delta(event)) is not None]

    def whole(self, text: str, reason: str) -> tuple[str | None, list[ToolCall]]:
        """The content and the calls of an answer that is all there."""
        self._read(text, reason)
        calls = [
            ToolCall(self._new_id(), CallFunction(call.name, call.arguments))
            for call in self._answer.calls.values()
        ]
        return (self._answer.content or None if calls else self._answer.content), calls

    def reason(self, reason: str) -> ChatFinishReason:
        """Why the answer ended: calls are a reason of their own, unless the length was one."""
        if reason == "length":
            return "length"
        return "tool_calls" if self._answer.calls or self._sent else "stop"

    def _read(self, text: str, reason: str | None) -> list[Event]:
        events = self._parser.feed(text)
        if reason is not None:
            cut = reason == "length"
            last = self._parser.finish(cut=cut)
            if cut and self._use.forced:
                # Nothing but calls was written: what is none was to become one.
                last = [event for event in last if not isinstance(event, Content)]
            events += last
        if not self._use.parallel:
            # One call was asked for: what a model adds to it is not answered for.
            events = [event for event in events if getattr(event, "index", 0) == 0]
        self._answer.add(events, keeps_cut=reason == "length")
        return events

    def _delta(self, event: Event) -> Delta | None:
        if isinstance(event, Content):
            return Delta(content=event.text)
        if isinstance(event, CallBegin):
            self._sent = True
            function = FunctionDelta(name=event.name)
            call = ToolCallDelta(event.index, self._new_id(), _FUNCTION, function)
            return Delta(tool_calls=[call])
        if isinstance(event, CallArguments):
            call = ToolCallDelta(event.index, function=FunctionDelta(arguments=event.text))
            return Delta(tool_calls=[call])
        # What broke was sent as far as it went, and cannot be taken back.
        return None

    def _new_id(self) -> str:
        if self._use.form.id_length:
            return "".join(secrets.choice(_LETTERS) for _ in range(self._use.form.id_length))
        return f"call_{secrets.token_hex(12)}"
