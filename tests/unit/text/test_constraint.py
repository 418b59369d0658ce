"""Grammars on small vocabularies: what is written follows them, and hostile ones are refused."""

from __future__ import annotations

import json
import random
import re
import socket
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
from tiny_vocabularies import from_directory, sentencepiece_backend

from layline import Grammar
from layline.errors import SamplingError
from layline.text.constraint import Constraint, ConstraintCompiler, check_readable
from layline.text.tokenizer import Tokenizer
from support.tiny import tiny_tokenizer
from support.writer import HERMES, MISTRAL, save_vocabulary

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["ä", "b c", '"']}, "maxItems": 2},
        "home": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/place"}]},
    },
    "required": ["name", "age", "home"],
    "additionalProperties": False,
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["zip"],
            "additionalProperties": False,
        }
    },
}


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("byte_level")
    save_vocabulary(path, MISTRAL)
    return from_directory(path)


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("sentencepiece")
    sentencepiece_backend().save(str(path / "tokenizer.json"))
    return from_directory(path, config={"eos_token_id": 2})


@pytest.fixture(params=["byte_level", "sentencepiece"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    found: Tokenizer = request.getfixturevalue(request.param)
    return found


def ids_of(packed: Any) -> list[int]:
    found: list[int] = np.flatnonzero(np.unpackbits(packed, bitorder="little")).tolist()
    return found


def write(tokenizer: Tokenizer, constraint: Constraint, seed: int, most: int = 400) -> str:
    """A random text that the constraint lets end."""
    state, choose, ids = constraint.follow(), random.Random(seed), []
    while len(ids) < most:
        allowed = ids_of(state.allowed())
        ends = [i for i in allowed if i in tokenizer.eos_ids]
        if ends and (len(ends) == len(allowed) or choose.random() < 0.3):
            return b"".join(tokenizer.pieces[i] for i in ids).decode()
        ids.append(choose.choice([i for i in allowed if i not in ends]))
        state.consume(ids[-1])
    raise AssertionError(f"no end: {ids}")


@pytest.mark.parametrize("seed", range(6))
def test_what_is_written_is_what_the_schema_accepts(tokenizer: Tokenizer, seed: int) -> None:
    constraint = ConstraintCompiler(tokenizer).compile(Grammar.json_schema(PERSON))
    text = write(tokenizer, constraint, seed)
    jsonschema_rs.validate(PERSON, json.loads(text))


@pytest.mark.parametrize(
    "pattern",
    [r"\d{3}-\d{2}", r"(a|bc)+d?", r"[^a-z]{2,5}", r"ä*ö\n?", r"yes|no|maybe", "a/b", r".{0,4}"],
)
def test_what_is_written_matches_the_expression(tokenizer: Tokenizer, pattern: str) -> None:
    constraint = ConstraintCompiler(tokenizer).compile(Grammar.regex(pattern))
    for seed in range(8):
        text = write(tokenizer, constraint, seed)
        assert re.fullmatch(pattern, text, re.ASCII), text


def test_choices_are_taken_as_they_are(tokenizer: Tokenizer) -> None:
    texts = ['a.*"/\\', "line\nbreak", "[ä]{2}", "^$|(?:x)", "~&-#", "", "</s>a", "<|im_end|>b"]
    constraint = ConstraintCompiler(tokenizer).compile(Grammar.choice(texts))
    assert {write(tokenizer, constraint, seed) for seed in range(80)} == set(texts)


def test_json_objects_and_any_json(tokenizer: Tokenizer) -> None:
    compiler = ConstraintCompiler(tokenizer)
    state = compiler.compile(Grammar.json_object()).follow()
    starts = {tokenizer.pieces[i][:1] for i in ids_of(state.allowed())}
    assert starts == {b"{"}
    anything = compiler.compile(Grammar.json_schema("true"))
    assert len({tokenizer.pieces[i][:1] for i in ids_of(anything.follow().allowed())}) > 5


def test_lark(tokenizer: Tokenizer) -> None:
    text = 'start: greeting (", " name)+ "!"\ngreeting: "hi" | "ho"\nname: /[A-C][a-c]{1,2}/'
    constraint = ConstraintCompiler(tokenizer).compile(Grammar.lark(text))
    for seed in range(5):
        assert re.fullmatch(r"h[io](, [A-C][a-c]{1,2})+!", write(tokenizer, constraint, seed))


def test_the_end_is_allowed_exactly_where_the_text_is_complete(tokenizer: Tokenizer) -> None:
    constraint = ConstraintCompiler(tokenizer).compile(Grammar.regex("x{2,3}"))
    state = constraint.follow()
    x = next(i for i in range(tokenizer.vocab_size) if tokenizer.pieces[i] == b"x")
    seen = []
    for _ in range(4):
        allowed = set(ids_of(state.allowed()))
        seen.append((tokenizer.eos_ids & allowed == tokenizer.eos_ids, allowed > tokenizer.eos_ids))
        assert bool(tokenizer.eos_ids & allowed) == (len(seen) > 2)
        state.consume(x)
    assert seen == [(False, False), (False, False), (True, True), (True, False)]


def test_special_tokens_are_no_text(byte_level: Tokenizer) -> None:
    state = ConstraintCompiler(byte_level).compile(Grammar.regex("(?s:.*)")).follow()
    allowed = set(ids_of(state.allowed()))
    assert allowed & byte_level.special_ids == byte_level.eos_ids
    words = {i for i in range(byte_level.vocab_size) if byte_level.pieces[i].isascii()}
    assert words - byte_level.special_ids <= allowed


def test_special_stop_ids_end_a_complete_text(byte_level: Tokenizer) -> None:
    (call,) = byte_level.encode("[TOOL_CALLS]", add_special=False)
    constraint = ConstraintCompiler(byte_level).compile(Grammar.regex("x?"))
    plain = next(i for i in range(300) if byte_level.pieces[i] == b"q")
    assert call in ids_of(constraint.follow([call, plain, 10**6]).allowed())
    assert call not in ids_of(constraint.follow().allowed())
    assert plain not in ids_of(constraint.follow([plain]).allowed())


def test_answers_do_not_disturb_each_other(tokenizer: Tokenizer) -> None:
    constraint = ConstraintCompiler(tokenizer).compile(Grammar.regex("ab|cd"))
    first, second = constraint.follow(), constraint.follow()
    before = first.allowed().copy()
    second.consume(ids_of(second.allowed())[0])
    assert (first.allowed() == before).all()
    assert (second.allowed() != before).any()


def test_a_decoder_that_adds_to_its_tokens_is_refused(tmp_path: Path) -> None:
    tiny_tokenizer(tmp_path)
    with pytest.raises(SamplingError, match="byte-level or SentencePiece"):
        ConstraintCompiler(from_directory(tmp_path)).compile(Grammar.regex("w1"))


def test_models_without_an_end_or_a_vocabulary(tmp_path: Path) -> None:
    from layline.text.tokenizer import AbsentTokenizer

    sentencepiece_backend().save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(SamplingError, match="no end-of-sequence id"):
        ConstraintCompiler(from_directory(tmp_path)).compile(Grammar.json_object())
    absent = AbsentTokenizer(tmp_path, {"vocab_size": 9, "eos_token_id": 2}, {})
    with pytest.raises(SamplingError, match="has no tokenizer files"):
        ConstraintCompiler(absent).compile(Grammar.json_object())


def nested(depth: int) -> str:
    return '{"items":' * depth + "{}" + "}" * depth


HUGE = "'" + "x" * (1 << 18)
# What must be refused when it is made, and what when it is compiled.
AT_ONCE: dict[str, tuple[Any, str]] = {
    "long": (lambda: Grammar.regex(HUGE), "too long"),
    "long schema": (lambda: Grammar.json_schema({"enum": [f"v{i}" for i in range(50000)]}), "long"),
    "no JSON": (lambda: Grammar.json_schema("{"), "no JSON schema"),
    "list": (lambda: Grammar.json_schema("[]"), "list"),
    "nan": (lambda: Grammar.json_schema('{"minimum": NaN}'), "NaN"),
    "nan value": (lambda: Grammar.json_schema({"minimum": float("nan")}), "no JSON schema"),
    "digits": (lambda: Grammar.json_schema(f'{{"minimum": {"9" * 5000}}}'), "no JSON schema"),
    "object": (lambda: Grammar.json_schema({"enum": [object()]}), "no JSON schema"),
    "deep": (lambda: Grammar.json_schema(nested(65)), "64"),
    "very deep": (lambda: Grammar.json_schema(nested(20000)), "nest"),
    "deep in lark": (lambda: Grammar.lark(f"start: %json {nested(100)}"), "64"),
    "very deep in lark": (lambda: Grammar.lark(f"start: %json {nested(15000)}"), "nested"),
    "other document": (lambda: Grammar.json_schema({"$ref": "http://a/b.json"}), "http://a/b.json"),
    "file": (lambda: Grammar.json_schema({"$ref": "file:///etc/passwd"}), "file:///etc/passwd"),
    "relative": (lambda: Grammar.json_schema({"$id": "http://a/", "$ref": "b"}), "'b'"),
    "in lark": (lambda: Grammar.lark('start: %json {"$ref": "x.json"}'), "x.json"),
    "multiple": (lambda: Grammar.json_schema({"multipleOf": 99999989}), "multipleOf 99999989"),
    "multiples": (
        lambda: Grammar.json_schema({"allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}),
        "99400891",
    ),
    "decimals": (lambda: Grammar.json_schema({"multipleOf": 0.1234567}), "1234567"),
    "tiny": (lambda: Grammar.json_schema('{"multipleOf": 1e-400}'), "multipleOf 1E-400"),
    "escaped in lark": (
        lambda: Grammar.lark('start: %json {"multiple\\u004ff": 99999989}'),
        "multipleOf 99999989",
    ),
    "surrogate": (lambda: Grammar.regex("\ud800"), "surrogate"),
    "kind": (lambda: Grammar("json"), "json_object"),
    "no text": (lambda: Grammar("regex", 3), "int"),  # type: ignore[arg-type]
    "no choices": (lambda: Grammar.choice([]), "choice"),
    "choices": (lambda: Grammar.choice(["x"] * 5000), "4096"),
}
COMPILED = {
    "unclosed": Grammar.regex("["),
    "look-ahead": Grammar.regex("(?=a)b"),
    "reference": Grammar.regex(r"(a)\1"),
    "brackets": Grammar.regex("(" * 50000 + "a" + ")" * 50000),
    "no schema": Grammar.json_schema({"type": "zebra"}),
    "not": Grammar.json_schema({"not": {"type": "string"}}),
    "oneOf": Grammar.json_schema({"oneOf": [{"type": "string"}, {"minLength": 2}]}),
    "nothing": Grammar.json_schema("false"),
    "nothing there": Grammar.json_schema({"$ref": "#/$defs/a"}),
    "itself": Grammar.json_schema({"$ref": "#"}),
    "each other": Grammar.json_schema(
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
    ),
    "product": Grammar.json_schema(
        {
            "allOf": [
                {"anyOf": [{"properties": {f"p{i}_{j}": {"type": "string"}}} for j in range(10)]}
                for i in range(10)
            ]
        }
    ),
    "patterns": Grammar.json_schema(
        {"type": "string", "allOf": [{"pattern": f"{c}.{{20}}x"} for c in "abcdef"]}
    ),
    "parentheses": Grammar.lark("start: " + "(" * 50000 + '"a"' + ")" * 50000),
    "no start": Grammar.lark('a: "x"'),
    "import": Grammar.lark('%import "/etc/passwd"\nstart: "a"'),
    "envelope": Grammar.lark('{"grammars": [{"json_schema": {"multipleOf": 99999989}}]}'),
}  # fmt: skip
HARMLESS = {
    "(a+)+b": Grammar.regex("(a+)+b"),
    "power of powers": Grammar.regex("((a{0,200}){0,200}){0,200}b"),
    "long alternatives": Grammar.regex("|".join(f"word{i}" for i in range(20000))),
    "large enum": Grammar.json_schema({"enum": [f"v{i}" for i in range(15000)]}),
    "long string": Grammar.json_schema({"type": "string", "minLength": 1000000}),
    "long list": Grammar.json_schema({"type": "array", "minItems": 1000000}),
    "doubling": Grammar.json_schema(
        {
            "$ref": "#/$defs/d0",
            "$defs": {
                **{f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(30)},
                "d30": {"type": "string"},
            },
        }
    ),
    "endless": Grammar.json_schema(
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
    ),
    "many multiples": Grammar.json_schema(
        {"type": "integer", "allOf": [{"multipleOf": n} for n in (11, 13, 17, 19)]}
    ),
    "optional": Grammar.lark("start: " + " ".join(["a?"] * 5000) + '\na: "x"'),
    "intersection": Grammar.lark("start: A\nA: /[ab]*a[ab]{18}/ & /[ab]*b[ab]{19}/ & ~/.*aa.*/"),
    "emoji": Grammar.json_schema({"enum": ["👋🏽", "\u0000", "\u2028", "é"]}),
}


@pytest.mark.parametrize(("make", "told"), AT_ONCE.values(), ids=AT_ONCE)
def test_refused_when_it_is_made(make: Any, told: str) -> None:
    with pytest.raises(SamplingError) as found:
        make()
    message = str(found.value)
    assert message.startswith(("grammar ", "choice "))
    assert told in message
    assert "\n" not in message
    assert len(message) < 500


@pytest.mark.timeout(30)
@pytest.mark.parametrize("grammar", COMPILED.values(), ids=COMPILED)
def test_refused_when_it_is_compiled(byte_level: Tokenizer, grammar: Grammar) -> None:
    with pytest.raises(SamplingError) as found:
        ConstraintCompiler(byte_level).compile(grammar)
    message = str(found.value)
    assert message.startswith("grammar ")
    assert "\n" not in message
    assert len(message) < 500


@pytest.mark.timeout(30)
@pytest.mark.parametrize("grammar", HARMLESS.values(), ids=HARMLESS)
def test_large_but_harmless(byte_level: Tokenizer, grammar: Grammar) -> None:
    state = ConstraintCompiler(byte_level).compile(grammar).follow()
    check_readable(grammar)
    for _ in range(20):
        allowed = [i for i in ids_of(state.allowed()) if i not in byte_level.eos_ids]
        if not allowed:
            break
        state.consume(allowed[0])


def test_lenient_schemas_ignore_what_cannot_be_enforced(byte_level: Tokenizer) -> None:
    schema = {"type": "integer", "minimum": 1, "maximum": 3, "not": {"const": 2}, "format": "zz"}
    with pytest.raises(SamplingError, match="not"):
        ConstraintCompiler(byte_level).compile(Grammar.json_schema(schema))
    constraint = ConstraintCompiler(byte_level).compile(Grammar.json_schema(schema, lenient=True))
    assert write(byte_level, constraint, 0) in ("1", "2", "3")


@pytest.mark.timeout(30)
def test_a_grammar_that_becomes_too_complex_allows_nothing(byte_level: Tokenizer) -> None:
    state = ConstraintCompiler(byte_level).compile(Grammar.regex("a{1000000000}")).follow()
    a = next(i for i in range(300) if byte_level.pieces[i] == b"a")
    for _ in range(50):
        state.consume(a)
        if not ids_of(state.allowed()):
            break
    assert ids_of(state.allowed()) == []
    state.consume(a)
    assert ids_of(state.allowed()) == []


def test_no_schema_makes_anybody_connect(byte_level: Tokenizer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.5)
        at = f"http://127.0.0.1:{server.getsockname()[1]}"
        for schema in (
            {"$schema": f"{at}/s", "$id": f"{at}/i", "type": "string"},
            {"$id": f"{at}/i", "$ref": "#/$defs/a", "$defs": {"a": {"$id": f"{at}/j"}}},
        ):
            try:
                ConstraintCompiler(byte_level).compile(Grammar.json_schema(schema))
            except SamplingError as error:
                assert str(error).startswith("grammar ")  # noqa: PT017 - either will do
        with pytest.raises(TimeoutError):
            server.accept()


def test_templates_have_their_own_vocabulary(tmp_path: Path) -> None:
    save_vocabulary(tmp_path, HERMES)
    tokenizer = from_directory(tmp_path)
    assert len(tokenizer.encode("<tool_call>", add_special=False)) >= 1
    assert tokenizer.chat_template is not None
    assert tokenizer.chat_template.takes_tools
