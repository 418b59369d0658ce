"""Stop strings over a stream, against a search in the whole text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layline.errors import SamplingError
from layline.text.stop import StopMatcher


def whole_text_search(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """What the matcher must release in total, by searching the complete text."""
    found = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    end, start, stop = min(found)
    return text[:end] if include else text[:start], stop


def run(matcher: StopMatcher, chunks: list[str]) -> tuple[list[str], str | None]:
    released = []
    for chunk in chunks:
        text, matched = matcher.feed(chunk)
        released.append(text)
        if matched is not None:
            return released, matched
    return [*released, matcher.flush()], None


few_letters = st.text(alphabet="abc", max_size=24)


@settings(max_examples=400, deadline=None, database=None)
@given(
    chunks=st.lists(st.text(alphabet="abc", max_size=6), max_size=12),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=4),
    include=st.booleans(),
)
def test_equals_a_search_in_the_whole_text(
    chunks: list[str], stops: list[str], include: bool
) -> None:
    expected = whole_text_search("".join(chunks), stops, include)
    released, matched = run(StopMatcher(stops, include_in_output=include), chunks)
    assert ("".join(released), matched) == expected


@settings(max_examples=300, deadline=None, database=None)
@given(
    text=few_letters,
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=5), min_size=1, max_size=3),
)
def test_holds_back_exactly_what_may_begin_a_stop(text: str, stops: list[str]) -> None:
    """Never a character more or less than the longest suffix that begins a stop string."""
    matcher = StopMatcher(stops)
    released = ""
    for end, character in enumerate(text, 1):
        part, matched = matcher.feed(character)
        released += part
        if matched is not None:
            break
        seen = text[:end]
        begins = [n for n in range(end + 1) if any(s.startswith(seen[end - n :]) for s in stops)]
        assert released == seen[: end - max(begins)]


@settings(max_examples=100, deadline=None, database=None)
@given(text=st.text(max_size=30), cut=st.integers(0, 30), stop=st.text(min_size=1, max_size=3))
def test_any_unicode(text: str, cut: int, stop: str) -> None:
    released, matched = run(StopMatcher([stop]), [text[:cut], text[cut:]])
    assert ("".join(released), matched) == whole_text_search(text, [stop], False)


def test_the_first_complete_stop_wins() -> None:
    assert StopMatcher(["abc", "b"]).feed("xabcx") == ("xa", "b")
    assert StopMatcher(["bc", "abc"]).feed("xabcx") == ("x", "abc")
    assert StopMatcher(["abc", "ab"]).feed("abc") == ("", "ab")


def test_spanning_chunks() -> None:
    matcher = StopMatcher(["<|end|>"])
    assert [matcher.feed(part) for part in ("so <", "|en", "d", "|>", "more")] == [
        ("so ", None),
        ("", None),
        ("", None),
        ("", "<|end|>"),
        ("", "<|end|>"),
    ]
    assert matcher.flush() == ""


def test_a_false_start_is_released() -> None:
    matcher = StopMatcher(["aab"])
    assert [matcher.feed(c)[0] for c in "aaab"] == ["", "", "a", ""]
    assert matcher.matched == "aab"


def test_include_in_output() -> None:
    matcher = StopMatcher(["\n\n"], include_in_output=True)
    assert matcher.feed("one\n") == ("one", None)
    assert matcher.feed("\ntwo") == ("\n\n", "\n\n")


def test_without_stops_everything_passes() -> None:
    matcher = StopMatcher([])
    assert matcher.feed("text") == ("text", None)
    assert matcher.flush() == ""


@pytest.mark.parametrize("stops", [[""], ["ok", ""], [None], [3]])
def test_stops_that_are_no_strings(stops: list[str]) -> None:
    with pytest.raises(SamplingError, match="stop string"):
        StopMatcher(stops)
