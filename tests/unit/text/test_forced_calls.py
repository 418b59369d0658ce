"""Grammars of answers that call: which texts they take, in every form of calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_vocabularies import from_directory

from layline import Grammar
from layline.errors import SamplingError
from layline.text.constraint import Constraint, ConstraintCompiler
from layline.text.tokenizer import Tokenizer
from layline.text.tools.forcing import Function, calls_or, forced_calls, strict_calls
from layline.text.tools.formats import FORMATS, PYTHONIC
from support.writer import MISTRAL, save_vocabulary

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "unit": {"enum": ["c", "f"]}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTIONS = [
    Function("get_weather", WEATHER, strict=True),
    Function("now"),
    Function("any", {"type": "object"}),
]
ONE = {
    "hermes": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
    "llama": '{"name": "get_weather", "parameters": {"city": "Paris"}}',
    "mistral": '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}}]',
    "pythonic": '[get_weather(city="Paris")]',
}
TWO = {
    "hermes": ONE["hermes"] + '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "llama": ONE["llama"] + '; {"name": "now", "parameters": {}}',
    "mistral": ONE["mistral"][:-1] + ', {"name": "any", "arguments": {"x": [1]}}]',
    "pythonic": '[get_weather(city="Paris", unit="f"), now(), any(x=1, y="2")]',
}
BAD = {form: text.replace('"Paris"', "5") for form, text in ONE.items()}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("vocabulary")
    save_vocabulary(path, MISTRAL)
    return from_directory(path)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> ConstraintCompiler:
    return ConstraintCompiler(tokenizer)


class Asked:
    """Whether grammars take texts."""

    def __init__(self, tokenizer: Tokenizer, compiler: ConstraintCompiler) -> None:
        self.tokenizer = tokenizer
        self.compiler = compiler

    def terminal(self, marker: str) -> str:
        ids = self.tokenizer.encode(marker, add_special=False)
        special = len(ids) == 1 and ids[0] in self.tokenizer.special_ids
        return f"<[{ids[0]}]>" if special else json.dumps(marker)

    def takes(self, grammar: Grammar, text: str) -> bool:
        return self.follows(self.compiler.compile(grammar), text)

    def follows(self, constraint: Constraint, text: str) -> bool:
        state = constraint.follow()
        for token_id in [*self.tokenizer.encode(text, add_special=False), *self.tokenizer.eos_ids]:
            allowed: Any = state.allowed()
            if token_id >= 8 * len(allowed) or not allowed[token_id >> 3] >> (token_id & 7) & 1:
                return False
            state.consume(token_id)
        return True


@pytest.fixture
def asked(tokenizer: Tokenizer, compiler: ConstraintCompiler) -> Asked:
    return Asked(tokenizer, compiler)


@pytest.mark.parametrize("form", FORMATS)
def test_an_answer_that_must_call(asked: Asked, form: str) -> None:
    several = forced_calls(FORMATS[form], FUNCTIONS, asked.terminal, parallel=True)
    single = forced_calls(FORMATS[form], FUNCTIONS, asked.terminal, parallel=False)
    assert asked.takes(several, ONE[form])
    assert asked.takes(several, TWO[form])
    assert asked.takes(single, ONE[form])
    assert not asked.takes(single, TWO[form])
    for text in (BAD[form], "hello", "", f"x{ONE[form]}", f"{ONE[form]}x"):
        assert not asked.takes(several, text)


@pytest.mark.parametrize("form", FORMATS)
def test_strict_functions_in_any_text(asked: Asked, form: str) -> None:
    grammar = strict_calls(FORMATS[form], FUNCTIONS, asked.terminal, parallel=True)
    for text in (ONE[form], TWO[form], "hello you\n{ [ <tool", "", "a [list]"):
        assert asked.takes(grammar, text), text
    assert not asked.takes(grammar, BAD[form])
    marked = form in ("hermes", "mistral")
    assert asked.takes(grammar, f"hello {ONE[form]}")
    assert asked.takes(grammar, f"hello {BAD[form]}") != marked
    # What is not strict may be called with anything.
    loose = TWO[form].replace("now", "any").replace("{}", '{"a": [1, null]}')
    assert asked.takes(grammar, loose)


@pytest.mark.parametrize("form", ["hermes", "mistral", "pythonic"])
@pytest.mark.parametrize("answer", [Grammar.json_object(), Grammar.json_schema({"type": "array"})])
def test_calls_or_json(asked: Asked, form: str, answer: Grammar) -> None:
    grammar = calls_or(FORMATS[form], FUNCTIONS, asked.terminal, answer, parallel=True)
    assert asked.takes(grammar, ONE[form])
    assert not asked.takes(grammar, BAD[form])
    assert asked.takes(grammar, '{"z": 3}') == (answer.kind == "json_object")
    assert not asked.takes(grammar, "hello")


@pytest.mark.parametrize("schema", ["true", '{"enum": [7]}'])
def test_calls_or_json_of_other_kinds(asked: Asked, schema: str) -> None:
    answer = Grammar.json_schema(schema)
    grammar = calls_or(FORMATS["hermes"], FUNCTIONS, asked.terminal, answer, parallel=True)
    assert asked.takes(grammar, "7")
    assert asked.takes(grammar, "8") == (answer.text == "true")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("[f(b=1)]", True),
        ("[f(a=1, b=2)]", True),
        ("[f(b=1, c=2)]", True),
        ("[f(a=1, b=2, c=3)]", True),
        ("[f(a=1)]", False),
        ("[f(a=1, c=2)]", False),
        ("[f()]", False),
        ("[f(, b=1)]", False),
        ("[f(b=1, )]", False),
        ("[f(b=1, a=2)]", False),
    ],
)
def test_which_arguments_may_miss(asked: Asked, text: str, wanted: bool) -> None:
    integers = {name: {"$ref": "#/$defs/n"} for name in "abc"}
    schema = {"properties": integers, "required": ["b"], "$defs": {"n": {"type": "integer"}}}
    grammar = forced_calls(PYTHONIC, [Function("f", schema)], asked.terminal, parallel=True)
    assert asked.takes(grammar, text) is wanted


@pytest.mark.parametrize(
    ("parameters", "strict", "told"),
    [
        ({"properties": {"a-b": {}}}, False, "'a-b'"),
        ({"properties": 3}, False, "no object"),
        ({"properties": {"a": {}}, "required": "a"}, False, "no list"),
        ({"minProperties": 3}, True, "'minProperties'"),
        ({"type": "string"}, False, "'string'"),
    ],
)
def test_arguments_that_cannot_be_written_as_in_python(
    asked: Asked, parameters: dict[str, Any], strict: bool, told: str
) -> None:
    functions = [Function("f", parameters, strict)]
    with pytest.raises(SamplingError, match=told):
        forced_calls(PYTHONIC, functions, asked.terminal, parallel=True)


def test_names_in_quotes_stay_names(asked: Asked, tmp_path: Path) -> None:
    schema = {"properties": {"ä": {"const": 'x"y'}}, "required": ["ä"]}
    for form in (PYTHONIC, FORMATS["hermes"]):
        grammar = forced_calls(form, [Function("f-1", schema)], asked.terminal, parallel=False)
        assert asked.compiler.compile(grammar)
