"""Chat templates: the text against transformers, and templates that mean harm."""

from __future__ import annotations

import enum
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from layline.errors import PromptError
from layline.text.limits import Limits
from layline.text.template import ChatTemplate

CHATML = """\
{%- for message in messages %}
    {%- if loop.first and message.role != 'system' %}
        {{- '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

HEADERS = """\
{{ bos_token }}
{%- set offset = 0 %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set offset = 1 %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
<|start_header|>system<|end_header|>

Year: {{ strftime_now('%Y') }}
{{ system ~ '<|eot|>' }}
{% for message in messages[offset:] %}
    {% if message['role'] == 'user' %}
        {# indented blocks and comments leave nothing behind #}
    {% endif %}
    <|start_header|>{{ message['role'] }}<|end_header|>

    {{- '\\n\\n' + message['content'] | trim }}<|eot|>
{% endfor %}
{% if add_generation_prompt %}<|start_header|>assistant<|end_header|>

{% endif %}
"""

TOOLS = """\
{%- macro call(tool) -%}
<tool_call>{{ {"name": tool.name, "arguments": tool.arguments} | tojson }}</tool_call>
{%- endmacro -%}
{%- set seen = namespace(user=0, last=none) -%}
{%- if tools %}{{ '# Tools\\n' }}{% for tool in tools %}{{ tool | tojson(indent=2) }}
{% endfor %}{% endif -%}
{%- for message in messages -%}
    {%- if message.role == 'user' %}{% set seen.user = seen.user + 1 %}{% endif -%}
    {%- set seen.last = message.role -%}
    {%- if message.role == 'debug' %}{% continue %}{% endif -%}
    {{- '[' ~ message.role ~ seen.user ~ ']' -}}
    {%- if message.content is string and '</think>' in message.content -%}
        {{- message.content.split('</think>')[-1].lstrip('\\n') -}}
    {%- elif message.content is defined -%}
        {% generation %}{{ message.content }}{% endgeneration %}
    {%- endif -%}
    {%- for tool in message.tool_calls or [] %}{{ call(tool.function) }}{% endfor -%}
    {%- if message.role == 'stop' %}{% break %}{% endif -%}
{%- endfor -%}
{{- '|' + seen.last }}
{%- if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}
"""

ALTERNATING = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate: user, assistant, user, ...') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {{- '[INST] ' + message['content'] + ' [/INST]' }}
    {%- else %}
        {{- ' ' + message['content'] | replace('  ', ' ') + eos_token }}
    {%- endif %}
{%- endfor %}
"""

NAMES = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>"}
USER = {"role": "user", "content": 'Is <b> & "quoted" fine? 你好 '}
ANSWER = {"role": "assistant", "content": "<think>hm</think>\n\nYes,  it is."}
SYSTEM = {"role": "system", "content": "  Speak plainly.  "}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "ort": "Köln <&>"}},
}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"a": 1}}}],
}
CONVERSATIONS = [
    [USER],
    [USER, ANSWER, USER],
    [SYSTEM, USER],
    [SYSTEM, USER, ANSWER, USER],
]


@pytest.fixture
def reference(byte_level_directory: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(byte_level_directory)


def rendered_by_transformers(
    reference: PreTrainedTokenizerFast, source: str, messages: list[dict[str, Any]], **more: Any
) -> str:
    return reference.apply_chat_template(messages, chat_template=source, tokenize=False, **more)


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("source", [CHATML, HEADERS, TOOLS])
@pytest.mark.parametrize("prompt", [True, False])
def test_equals_transformers(
    reference: PreTrainedTokenizerFast, source: str, messages: list[dict[str, Any]], prompt: bool
) -> None:
    expected = rendered_by_transformers(reference, source, messages, add_generation_prompt=prompt)
    ours = ChatTemplate({"default": source}, NAMES)
    assert ours.render(messages, add_generation_prompt=prompt) == expected
    assert 'Is <b> & "quoted" fine?' in expected


def test_tools_and_variables_equal_transformers(reference: PreTrainedTokenizerFast) -> None:
    messages = [
        SYSTEM,
        USER,
        CALL,
        {"role": "tool", "content": "12 °C"},
        {"role": "debug", "content": "skipped"},
        {"role": "stop", "content": "here"},
        {"role": "user", "content": "never seen"},
    ]
    more = {"tools": [WEATHER], "enable_thinking": False}
    expected = rendered_by_transformers(
        reference, TOOLS, messages, add_generation_prompt=True, **more
    )
    assert ChatTemplate({"default": TOOLS}, NAMES).render(messages, **more) == expected
    for part in ("Köln <&>", '"arguments": {"a": 1}', "[stop1]here|stop<think></think>"):
        assert part in expected
    assert "skipped" not in expected
    assert "never" not in expected


def test_alternation(reference: PreTrainedTokenizerFast) -> None:
    ours = ChatTemplate({"default": ALTERNATING}, NAMES)
    messages = [USER, ANSWER, USER]
    assert ours.render(messages) == rendered_by_transformers(reference, ALTERNATING, messages)
    with pytest.raises(PromptError) as caught:
        ours.render([USER, USER])
    assert str(caught.value).endswith("roles must alternate: user, assistant, user, ...")


def test_rendering_again_starts_afresh() -> None:
    ours = ChatTemplate({"default": TOOLS}, NAMES)
    assert ours.render([USER]) == ours.render([USER])


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    ours = ChatTemplate({"default": "{{ messages[0].content }}"})
    assert ours.render([{"role": "user", "content": parts}]) == "one two"


def test_the_callers_messages_stay_as_they_are() -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "a"}], "name": None}
    ours = ChatTemplate({"default": "{{ messages[0].name is defined }}"})
    assert ours.render([message]) == "False"
    assert message == {"role": "user", "content": [{"type": "text", "text": "a"}], "name": None}


class Role(str, enum.Enum):  # noqa: UP042 - a subclass of str with a different str()
    USER = "user"


def test_plain_types_only() -> None:
    ours = ChatTemplate({"default": "{{ messages[0].role }}"})
    assert ours.render([{"role": Role.USER, "content": "a"}]) == "user"
    with pytest.raises(PromptError, match="PosixPath"):
        ours.render([{"role": "user", "content": "a", "extra": [Path("/")]}])
    with pytest.raises(PromptError, match="PosixPath"):
        ours.render([USER], secret=Path("/"))
    nested: list[Any] = []
    nested.append(nested)
    with pytest.raises(PromptError, match="nested"):
        ours.render([{"role": "user", "content": "a", "extra": nested}])


def test_choice_of_template() -> None:
    with pytest.raises(PromptError, match="it has rag"):
        ChatTemplate({"rag": "x"}).render([USER])
    assert ChatTemplate({"default": "x"}).render([USER], tools=[WEATHER]) == "x"


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "empty"),
        ("hello", "messages is str"),
        ({"role": "user"}, "messages is dict"),
        (None, "messages is NoneType"),
        (["hello"], r"messages\[0\] is str"),
        ([USER, {"content": "x"}], r"messages\[1\].role is None"),
        ([{"role": "", "content": "x"}], r"role is ''"),
        ([{"role": 3, "content": "x"}], "role is 3"),
        ([{"role": "user"}], "has no content"),
        ([{"role": "user", "content": None}], "has no content"),
        ([{"role": "user", "content": 7}], "content is int"),
        ([{"role": "user", "content": {"text": "x"}}], "content is dict"),
        ([{"role": "user", "content": ["x"]}], r"content\[0\] is of type 'str'"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "'image_url'"),
        ([{"role": "user", "content": [{"type": "text", "text": 3}]}], "'text'"),
    ],
)
def test_malformed_messages(messages: Any, words: str) -> None:
    with pytest.raises(PromptError, match=words) as caught:
        ChatTemplate({"default": CHATML}).render(messages)
    assert "\n" not in str(caught.value)


def test_malformed_tools() -> None:
    with pytest.raises(PromptError, match="tools"):
        ChatTemplate({"default": CHATML}).render([USER], tools=["weather"])


HARMFUL = {
    "class of a string": "{{ ''.__class__ }}",
    "the way to subclasses": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals of a global": "{{ raise_exception.__globals__ }}",
    "globals of a filter's result": "{{ (messages|map('upper')).gi_frame }}",
    "attribute by filter": "{{ ''|attr('__class__') }}",
    "attribute in a format": "{{ '{0.__class__}'.format(1) }}",
    "attribute in a format map": "{{ '{a.__class__}'.format_map({'a': 1}) }}",
    "change of the messages": "{{ messages.append(1) }}",
    "namespace in disguise": "{% set n = namespace() %}{% set n.__class__ = 1 %}",
    "namespace made in disguise": "{{ namespace(_x=1) }}",
    "other files": "{% include '/etc/passwd' %}",
    "long range": "{% for i in range(10**9) %}{% endfor %}",
    "nested loops": "{% for i in range(99999) %}"
    "{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "nested loops over a string": "{% set s = 'x' * 90000 %}"
    "{% for i in s %}{% for j in s %}{{ '' }}{% endfor %}{% endfor %}",
    "doubling macros": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
    "endless macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "endless recursive loop": "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "endless block": "{% block b %}{{ self.b() }}{% endblock %}",
    "long string": "{{ 'x' * 10**10 }}",
    "long list": "{{ ([1] * 10**10)|length }}",
    "doubling string": "{% set n = namespace(s='x' * 1000) %}"
    "{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "doubling string by ~": "{% set n = namespace(s='x' * 1000) %}"
    "{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "doubling list": "{% set n = namespace(s=[1]) %}"
    "{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "large power": "{{ 9 ** (9 ** 9) }}",
    "doubling number": "{% set n = namespace(x=9) %}"
    "{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "wide field": "{{ '%9999999999d' % 1 }}",
    "wide field by argument": "{{ '%*d' % (999999999, 1) }}",
    "wide format": "{{ '{:>9999999999}'.format(1) }}",
    "wide format by filter": "{{ '%9999999999d'|format(1) }}",
    "wide time": "{{ strftime_now('%9999999999Y') }}",
    "method with a number": "{{ 'x'.center(10**10) }}",
    "filter with a number": "{{ 'x'|center(10**10) }}",
    "filter with a named number": "{{ 'x'|center(width=10**10) }}",
    "padding": "{{ 'x'.zfill(10**10) }}",
    "replacement": "{% set s = 'x' * 99999 %}{{ s.replace('x', s) }}",
    "replacement by filter": "{% set s = 'x' * 99999 %}{{ s|replace('x', s) }}",
    "joining": "{% set s = 'x' * 99999 %}{{ s.join(s) }}",
    "joining by filter": "{% set s = 'x' * 99999 %}{{ s|join(s) }}",
    "joining a list": "{% set s = 'x' * 99999 %}{{ ([s] * 9999)|join }}",
    "tabs": "{{ ('\\t' * 99999).expandtabs(99999) }}",
    "indentation": "{{ ('\\n' * 99999)|indent(99999) }}",
    "indented JSON": "{{ [[1]]|tojson(indent=10**9) }}",
    "sample text": "{{ lipsum(10**6) }}",
    "long output": "{% set s = 'x' * 99999 %}{% for i in range(99999) %}{{ s }}{% endfor %}",
    "unknown name": "{{ nothing.at.all }}",
    "division": "{{ 1 / 0 }}",
    "syntax": "{% for %}",
    "unknown filter": "{{ 1|nothing }}",
    "deep nesting": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "long source": "x" * (1 << 20) + "x",
    "several lines": "{{ raise_exception('one\\ntwo') }}",
    "long message": "{{ raise_exception('x' * 5000) }}",
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", sorted(HARMFUL))
def test_harmful_template(name: str) -> None:
    ours = ChatTemplate({"default": HARMFUL[name]}, limits=Limits(passes=20_000))
    with pytest.raises(PromptError, match="the chat template") as caught:
        ours.render([USER])
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
    assert caught.value.__cause__ is None


def test_large_but_honest() -> None:
    """The bounds are far from what long conversations need."""
    long = "word " * 50_000
    messages = [
        {"role": ("user", "assistant")[i % 2], "content": long if i == 4 else f"message {i}"}
        for i in range(1000)
    ]
    text = ChatTemplate({"default": CHATML}).render(messages)
    assert text.count("<|im_start|>") == 1002
    replaced = ChatTemplate({"default": "{{ messages[4].content|replace('word', '<word>') }}"})
    assert replaced.render(messages).count("<word>") == 50_000


def test_each_rendering_counts_for_itself() -> None:
    """Three renderings together pass the bound, one alone does not."""
    source = "{% for i in range(600) %}{% endfor %}done"
    ours = ChatTemplate({"default": source}, limits=Limits(passes=1000))
    assert [ours.render([USER]) for _ in range(3)] == ["done"] * 3
    with pytest.raises(PromptError, match="more than 1000 loop passes"):
        ChatTemplate({"default": source * 2}, limits=Limits(passes=1000)).render([USER])


def test_time_is_bounded() -> None:
    ours = ChatTemplate({"default": HARMFUL["nested loops"]}, limits=Limits(seconds=0.05))
    with pytest.raises(PromptError, match=r"longer than 0\.05 seconds"):
        ours.render([USER])


@pytest.mark.parametrize(
    "name",
    [
        "long string",
        "long list",
        "doubling string",
        "doubling string by ~",
        "doubling list",
        "wide format",
        "wide time",
        "replacement",
        "replacement by filter",
        "joining",
        "joining by filter",
        "joining a list",
        "indentation",
        "tabs",
    ],
)
def test_refused_before_it_is_made(name: str) -> None:
    ours = ChatTemplate({"default": HARMFUL[name]}, limits=Limits(length=1 << 18))
    ours_on_nothing = ChatTemplate({"default": "{{ 1 ~ 2 }}"})
    assert ours_on_nothing.render([USER]) == "12"  # what is imported and cached once
    tracemalloc.start()
    try:
        with pytest.raises(PromptError):
            ours.render([USER])
        assert tracemalloc.get_traced_memory()[1] < 12 << 20
    finally:
        tracemalloc.stop()
