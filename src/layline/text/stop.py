"""Stop strings over a stream of text."""

from __future__ import annotations

from collections.abc import Sequence

from layline.errors import SamplingError


class StopMatcher:
    """Ends a text at the first stop string and never shows the beginning of one.

    The stop string that is complete first, reading character by character, wins; of those complete
    at the same character, the one that begins first, so the longest. This does not depend on how
    the text is cut into chunks, and a complete stop string never waits for the text after it.

    Args:
        stops: the stop strings, none of them empty.
        include_in_output: release the matched stop string as the end of the text.

    Raises:
        SamplingError: a stop string is empty or not a string.
    """

    def __init__(self, stops: Sequence[str], *, include_in_output: bool = False) -> None:
        for stop in stops:
            if not isinstance(stop, str) or not stop:
                raise SamplingError(f"stop string {stop!r} must be a string that is not empty")
        self._stops = tuple(dict.fromkeys(stops))
        self._include = include_in_output
        self._first_characters = frozenset(stop[0] for stop in self._stops)
        self._longest_prefix = max((len(stop) - 1 for stop in self._stops), default=0)
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str, *, armed: bool = True) -> tuple[str, str | None]:
        """Add ``text``; returns (text safe to release, the matched stop string or None).

        A stop string that is complete while ``armed`` is False is ordinary text; one that is then
        only begun still counts once it is complete. After a match the text is over: what is fed
        then is dropped.
        """
        if self.matched is not None:
            return "", self.matched
        if not self._stops:
            return text, None
        text = self._held + text
        match = self._first_match(text) if armed else None
        if match is not None:
            start, stop = match
            self.matched = stop
            self._held = ""
            return text[: start + len(stop)] if self._include else text[:start], stop
        cut = self._start_of_possible_stop(text)
        self._held = text[cut:]
        return text[:cut], None

    def flush(self) -> str:
        """The text still held back, to be released when the stream ends without a match."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, str] | None:
        found = [(text.find(stop), stop) for stop in self._stops]
        matches = [(start + len(stop), start, stop) for start, stop in found if start >= 0]
        if not matches:
            return None
        _, start, stop = min(matches)
        return start, stop

    def _start_of_possible_stop(self, text: str) -> int:
        """Where the longest suffix of ``text`` starts that begins but is no stop string yet."""
        for index in range(max(0, len(text) - self._longest_prefix), len(text)):
            if text[index] in self._first_characters:
                suffix = text[index:]
                if any(len(stop) > len(suffix) and stop.startswith(suffix) for stop in self._stops):
                    return index
        return len(text)
