"""Calls in text: what is one, what is not, and that cutting the text anywhere changes nothing."""

from __future__ import annotations

import json
import keyword
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layline.text.tools.events import CallArguments, CallBegin, Content, Event, ReadAnswer
from layline.text.tools.formats import FORMATS, HERMES, LLAMA, MISTRAL, PYTHONIC, format_of
from layline.text.tools.json_scan import JsonError, ObjectScanner
from support.writer import TEMPLATES

NAMES = frozenset({"get_weather", "now", "get_weather_2"})
WEATHER = {"city": "Zürich, [CH]", "days": [1, {"a": 'quote " }] and \\'}], "ok": True, "no": None}


def parsed(form: str, pieces: list[str], *, cut: bool = False) -> ReadAnswer:
    return read(events_of(form, pieces, cut=cut), cut=cut)


def events_of(form: str, pieces: list[str], *, cut: bool = False) -> list[Event]:
    parser = FORMATS[form].parser(NAMES)
    events = [event for piece in pieces for event in parser.feed(piece)]
    return events + parser.finish(cut=cut)


def read(events: list[Event], *, cut: bool = False) -> ReadAnswer:
    answer = ReadAnswer()
    answer.add(events, keeps_cut=cut)
    return answer


def calls_of(answer: ReadAnswer) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in answer.calls.values()]


def written(form: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """Calls as a model of that form writes them."""
    if form == "pythonic":
        listed = [
            f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
            for name, arguments in calls
        ]
        return f"[{', '.join(listed)}]"
    key = FORMATS[form].arguments
    objects = [json.dumps({"name": n, key: a}, ensure_ascii=False) for n, a in calls]
    if form == "hermes":
        return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects)
    return f"[TOOL_CALLS] [{', '.join(objects)}]" if form == "mistral" else "; ".join(objects)


TWO = [("get_weather", WEATHER), ("now", {})]


@pytest.mark.parametrize("form", FORMATS)
def test_calls_are_found(form: str) -> None:
    answer = parsed(form, [written(form, TWO)])
    assert (answer.content, calls_of(answer)) == ("", TWO)
    assert all(call.complete for call in answer.calls.values())


@pytest.mark.parametrize("form", FORMATS)
def test_a_name_that_begins_another_name(form: str) -> None:
    calls = [("get_weather_2", {"a": 1}), ("get_weather", {})]
    assert calls_of(parsed(form, [written(form, calls)])) == calls


@pytest.mark.parametrize("form", ["hermes", "mistral"])
def test_text_before_marked_calls_is_content(form: str) -> None:
    answer = parsed(form, ["Let me look.\n\n", written(form, TWO), "\n"])
    assert (answer.content, calls_of(answer)) == ("Let me look.", TWO)


NO_CALLS = {
    "plain": "There is 1 < 2, a [list] and {braces}.\n",
    "unknown function": '<tool_call>{"name": "rm", "arguments": {}}</tool_call>',
    "no name": '<tool_call>{"arguments": {"a": 1}}</tool_call>',
    "no object": "<tool_call>now()</tool_call>",
    "half a marker": "<tool_cal",
    "name is a number": '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
    "python quotes": "<tool_call>{'name': 'now', 'arguments': {}}</tool_call>",
    "arguments are a list": '<tool_call>{"name": "now", "arguments": [1]}</tool_call>',
    "bad head": '<tool_call>{"name": "now", "arguments": tru}</tool_call>',
    "mistral no list": '[TOOL_CALLS] {"name": "now"}',
    "json answer": '{"name": "Bob", "age": 3}',
    "json answer of a function's name": '{"name": "now", "age": 3}',
    "json list": "[1, 2, 3]",
    "python tag and code": "<|python_tag|>print(1)",
    "positional": "[now(1)]",
    "unknown in list": "[rm(a=1)]",
    "no literal": "[now(a=open('x'))]",
    "unclosed": "[now(a=1",
    "bracket": "[now(a=(1]",
    "set": "[now(a={1})]",
    "twice": "[now(a=1, a=2)]",
    "stars": "[now(**{})]",
}


@pytest.mark.parametrize("text", NO_CALLS.values(), ids=NO_CALLS)
@pytest.mark.parametrize("form", FORMATS)
def test_what_is_no_call_comes_back_as_it_was(form: str, text: str) -> None:
    answer = parsed(form, [text])
    assert (answer.content, answer.calls) == (text, {})


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (form, text)
        for form in ("hermes", "mistral", "llama")
        for text in ('{"a": tru}', '{"a": "\n"}', '{"a" 1}', '{"a": 1,}', '{"a": 01}')
    ],
)
def test_arguments_that_break_are_text(form: str, text: str) -> None:
    whole = written(form, [("now", {})]).replace("{}", text)
    answer = parsed(form, [whole])
    assert answer.calls == {}
    assert answer.content == whole


def test_a_call_after_a_broken_one_is_found() -> None:
    broken = '<tool_call>{"name": "now", "arguments": {"a"}}</tool_call>'
    answer = parsed("hermes", [broken + written("hermes", TWO)])
    assert [call.name for call in answer.calls.values()] == ["get_weather", "now"]
    assert answer.content == broken


@pytest.mark.parametrize("form", ["hermes", "mistral", "llama"])
def test_the_name_comes_first_and_arguments_in_pieces(form: str) -> None:
    text = written(form, TWO[:1])
    parser = FORMATS[form].parser(NAMES)
    seen: list[Event] = []
    lengths = []
    for character in text:
        seen += parser.feed(character)
        lengths.append(len(seen))
    assert isinstance(seen[0], CallBegin)
    assert len([event for event in seen if isinstance(event, CallArguments)]) > 20
    # Each piece is told of with the character that it ends with.
    at = text.index("Zürich")
    assert lengths[at + 1] > lengths[at] > lengths[at - 1]


@pytest.mark.parametrize("form", ["hermes", "mistral"])
def test_no_part_of_a_marker_is_shown(form: str) -> None:
    text = f"Hello. {written(form, TWO)}"
    shown = ""
    for event in events_of(form, list(text)):
        if isinstance(event, Content):
            shown += event.text
    assert shown == "Hello."


@pytest.mark.parametrize("form", FORMATS)
def test_a_call_that_its_length_cut_off(form: str) -> None:
    text = written(form, TWO)
    for end in range(len(text)):
        answer = parsed(form, [text[:end]], cut=True)
        # Nothing but text that could still be an ordinary answer is content.
        marker = FORMATS[form].markers[0] if form in ("hermes", "mistral") else text
        assert answer.content == text[:end] or answer.content == ""
        if end >= len(marker):
            assert "Zürich" not in answer.content
        for call in answer.calls.values():
            assert call.name in NAMES
            assert json.dumps(WEATHER, ensure_ascii=False).startswith(call.arguments) or (
                form == "pythonic" or call.arguments == "{}"
            )


@pytest.mark.parametrize("form", ["hermes", "mistral", "llama"])
def test_arguments_before_the_name_and_as_text(form: str) -> None:
    key = FORMATS[form].arguments
    early = f'{{"id": "x", "{key}": {{"a": 1}}, "name": "now"}}'
    quoted = f'{{"name": "now", "{key}": "{{\\"a\\": 1}}"}}'
    for text in (early, quoted):
        whole = written(form, [("now", {})])
        start, end = whole.index("{"), whole.rindex("}") + 1
        answer = parsed(form, [whole[:start] + text + whole[end:]])
        assert calls_of(answer) == [("now", {"a": 1})]


def test_llama_tags_and_white_space() -> None:
    text = ' <|python_tag|> {"name": "now", "parameters": {}}\n{"name": "now", "parameters": {}}'
    assert calls_of(parsed("llama", [text])) == [("now", {})] * 2


def test_a_missing_end_of_a_call_is_forgiven() -> None:
    answer = parsed("hermes", ['<tool_call>{"name": "now", "arguments": {}} and more'])
    assert (answer.content, calls_of(answer)) == (" and more", [("now", {})])


def test_pythonic_names_of_values() -> None:
    text = "[now(a=true, b=None, c=[False, null], d={'x': -1.5}, e='it\\'s', f=(1, 2))]"
    (call,) = calls_of(parsed("pythonic", [text]))
    values = [True, None, [False, None], {"x": -1.5}, "it's", [1, 2]]
    assert call[1] == dict(zip("abcdef", values, strict=True))


HOSTILE = {
    "brackets": "[now(a=" + "[" * 5000 + "]" * 5000 + ")]",
    "signs": "[now(a=" + "-" * 60000 + "1)]",
    "sum": "[now(a=" + "+".join("1" * 5000) + ")]",
    "digits": f"[now(a={'9' * 10000})]",
    "objects": '<tool_call>{"name": "now", "arguments": ' + '{"a":' * 5000,
    "quoted objects": '<tool_call>{"name": "now", "arguments": "' + "[" * 5000 + '"}',
    "markers": "<tool_call>" * 2000 + "[TOOL_CALLS][" * 2000,
    "nul": "[now(a='\0')]",
    "surrogate": '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("form", FORMATS)
def test_hostile_text_is_text(form: str, text: str) -> None:
    answer = parsed(form, [text])
    assert (answer.content, answer.calls) == (text, {})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(alphabet=st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc"), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
# Python's own words name no argument of a pythonic call.
KEYS = st.text("abcdefgh", min_size=1, max_size=4).filter(lambda key: not keyword.iskeyword(key))
CALLS = st.lists(
    st.tuples(st.sampled_from(sorted(NAMES)), st.dictionaries(KEYS, JSON, max_size=3)),
    min_size=1,
    max_size=3,
)
MARKERS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>"]
PARTS = ['{"name": "now", "arguments": {', '"parameters": {"a": 1}}', "now(a=1)", "[now(", "text"]
SCRAPS = st.sampled_from([*'<>[]{}"\\ \n;,', *MARKERS, *PARTS])


@st.composite
def cut_up(draw: st.DrawFn, text: str) -> list[str]:
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.mark.parametrize("form", FORMATS)
@given(data=st.data())
def test_any_calls_in_any_pieces(form: str, data: st.DataObject) -> None:
    calls = data.draw(CALLS)
    text = written(form, calls)
    answer = parsed(form, data.draw(cut_up(text)))
    assert (answer.content, calls_of(answer)) == ("", calls)


@pytest.mark.parametrize("form", FORMATS)
@given(data=st.data(), cut=st.booleans())
def test_any_text_in_any_pieces(form: str, data: st.DataObject, cut: bool) -> None:
    text = "".join(data.draw(st.lists(SCRAPS, max_size=25)))
    whole = parsed(form, [text], cut=cut)
    assert parsed(form, data.draw(cut_up(text)), cut=cut) == whole
    for call in whole.calls.values():
        if call.complete:
            assert isinstance(json.loads(call.arguments), dict)
    if not whole.calls and not cut:
        assert whole.content == text


@given(value=st.dictionaries(KEYS, JSON, max_size=4), indent=st.none() | st.integers(0, 2))
def test_the_scanner_takes_what_json_is(value: dict[str, Any], indent: int | None) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=indent == 1)
    scanner = ObjectScanner()
    for character in text:
        assert not scanner.complete
        scanner.feed(character)
    assert scanner.complete


@given(text=st.text('{}[]:,"\\0123eE+-.truefalsn \nab', max_size=30))
def test_the_scanner_takes_nothing_else(text: str) -> None:
    scanner = ObjectScanner()
    taken = ""
    try:
        for character in text:
            scanner.feed(character)
            taken += character
            if scanner.complete:
                break
    except JsonError:
        return
    if scanner.complete:
        assert isinstance(json.loads(taken), dict)
    elif taken:
        with pytest.raises(json.JSONDecodeError):
            json.loads(taken)


def test_each_form_is_known_by_its_template() -> None:
    assert {name: format_of(text).name for name, text in TEMPLATES.items()} == {  # type: ignore[union-attr]
        name: name for name in TEMPLATES
    }
    llama = 'Respond in the format {"name": function name, "parameters": dictionary of ...}.'
    assert format_of(llama) is LLAMA
    assert format_of("[func_name1(params_name1=params_value1, ...), f()]") is PYTHONIC
    assert format_of("{{ '[TOOL_CALLS]' }}") is MISTRAL
    assert format_of('\'\\n<tool_call>\\n{"name": "\'') is HERMES
    assert format_of("<tool_call>\n<function=example>") is None
    assert format_of("{% if tools %}{{ tools }}{% endif %}") is None
