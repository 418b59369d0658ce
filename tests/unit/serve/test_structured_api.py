"""response_format and structured_outputs, and what is refused of them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import pytest

from layline import LLM
from support.serving import NAME, client_on, events, service_on
from support.writer import save_writer

MESSAGES = [{"role": "user", "content": "The harbour"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    path = tmp_path_factory.mktemp("writer")
    save_writer(path)
    with service_on(LLM(str(path), threads=1)) as service, client_on(service) as found:
        yield found


def ask(client: Any, **fields: Any) -> Any:
    body = {"model": NAME, "messages": MESSAGES, "seed": 1, "max_tokens": 200, **fields}
    return client.post("/v1/chat/completions", json=body)


def choice(client: Any, **fields: Any) -> Any:
    response = ask(client, **fields)
    assert response.status_code == 200, response.text
    (found,) = response.json()["choices"]
    return found


def of_schema(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **more}}


@pytest.mark.parametrize("strict", [None, False, True])
@pytest.mark.parametrize("temperature", [0, 1])
def test_a_schema_is_followed(client: Any, strict: bool | None, temperature: int) -> None:
    found = choice(
        client, response_format=of_schema(SCHEMA, strict=strict), temperature=temperature
    )
    assert found["finish_reason"] == "stop"
    jsonschema_rs.validate(SCHEMA, json.loads(found["message"]["content"]))


def test_a_stream_has_the_same_text(client: Any) -> None:
    wanted = choice(client, response_format=of_schema(SCHEMA))["message"]["content"]
    streamed = events(ask(client, response_format=of_schema(SCHEMA), stream=True))
    assert streamed.pop() == "[DONE]"
    choices = [event["choices"][0] for event in streamed]
    assert "".join(one["delta"].get("content") or "" for one in choices) == wanted
    assert choices[-1]["finish_reason"] == "stop"


def test_json_objects(client: Any) -> None:
    found = choice(client, response_format={"type": "json_object"}, max_tokens=400, seed=5)
    text = found["message"]["content"]
    assert text.startswith("{")
    if found["finish_reason"] == "stop":
        assert isinstance(json.loads(text), dict)


def test_text_is_no_format(client: Any) -> None:
    free = choice(client, max_tokens=5)
    assert (
        choice(client, max_tokens=5, response_format={"type": "text"})["message"]
        == (free["message"])
    )


def test_the_length_cuts(client: Any) -> None:
    found = choice(client, response_format=of_schema(SCHEMA), max_tokens=3)
    assert found["finish_reason"] == "length"


def test_answers_of_one_request_differ_and_all_follow(client: Any) -> None:
    response = ask(client, response_format=of_schema(SCHEMA), n=4, temperature=1.5)
    texts = [one["message"]["content"] for one in response.json()["choices"]]
    assert len(set(texts)) > 1
    for text in texts:
        jsonschema_rs.validate(SCHEMA, json.loads(text))


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
@pytest.mark.parametrize(
    ("wanted", "pattern"),
    [
        ({"regex": r"\d{3}-[a-c]{2}"}, r"[0-9]{3}-[a-c]{2}"),
        ({"choice": ["rot", "grün", "[b]"]}, r"rot|grün|\[b\]"),
        ({"grammar": 'start: "a" B+\nB: /[xyz]{2}/\n'}, r"a([xyz]{2})+"),
        ({"json": {"enum": ["one", 2]}}, r'"one"|2'),
        ({"json": '{"const": null}'}, r"null"),
    ],
)
def test_this_servers_own_fields(
    client: Any, path: str, wanted: dict[str, Any], pattern: str
) -> None:
    prompt = {"messages": MESSAGES} if "chat" in path else {"prompt": "In 2024"}
    body = {"model": NAME, **prompt, "seed": 2, "structured_outputs": wanted, "max_tokens": 200}
    response = client.post(f"/v1/{path}", json=body)
    assert response.status_code == 200, response.text
    (found,) = response.json()["choices"]
    text = found["message"]["content"] if "chat" in path else found["text"]
    assert re.fullmatch(pattern, text), text
    assert found["finish_reason"] == "stop"


def nested(depth: int) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


FORMAT = "response_format"
BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "type": ({FORMAT: {"type": "yaml"}}, "response_format.type", "invalid_type"),
    "no schema": (
        {FORMAT: {"type": "json_schema"}},
        "response_format.json_schema",
        "missing_required_parameter",
    ),
    "no name": (
        {FORMAT: {"type": "json_schema", "json_schema": {"schema": {}}}},
        "response_format.json_schema.name",
        "missing_required_parameter",
    ),
    "name": (
        {FORMAT: {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}},
        "response_format.json_schema.name",
        "invalid_type",
    ),
    "no inner schema": (
        {FORMAT: {"type": "json_schema", "json_schema": {"name": "a"}}},
        "response_format.json_schema.schema",
        "missing_required_parameter",
    ),
    "schema beside": (
        {FORMAT: {"type": "text", "json_schema": {"name": "a", "schema": {}}}},
        "response_format.json_schema",
        "",
    ),
    "unknown": (
        {FORMAT: of_schema({}, strct=True)},
        "response_format.json_schema.strct",
        "unknown_parameter",
    ),
    "strict keyword": (
        {FORMAT: of_schema({"not": {"type": "string"}}, strict=True)},
        FORMAT,
        "invalid_schema",
    ),
    "not a type": ({FORMAT: of_schema({"type": "zebra"})}, FORMAT, "invalid_schema"),
    "both": (
        {FORMAT: {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        "structured_outputs",
        "",
    ),
    "two": ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", ""),
    "none": ({"structured_outputs": {}}, "structured_outputs", ""),
    "regex": ({"structured_outputs": {"regex": "("}}, "structured_outputs", "invalid_schema"),
    "grammar": (
        {"structured_outputs": {"grammar": "x"}},
        "structured_outputs",
        "invalid_schema",
    ),
    "json text": (
        {"structured_outputs": {"json": "{"}},
        "structured_outputs.json",
        "invalid_schema",
    ),
    "guided": ({"guided_regex": "a"}, "guided_regex", "unknown_parameter"),
    "deep": ({FORMAT: of_schema(nested(80))}, FORMAT, "invalid_schema"),
    "very deep": ({"structured_outputs": {"json": "[" * 100000}}, "structured_outputs.json", ""),
    "many": (
        {FORMAT: of_schema({"enum": [f"value {i}" for i in range(40000)]})},
        FORMAT,
        "invalid_schema",
    ),
    "other document": (
        {FORMAT: of_schema({"$ref": "http://169.254.169.254/latest"})},
        FORMAT,
        "invalid_schema",
    ),
    "cycle": ({FORMAT: of_schema({"$ref": "#"})}, FORMAT, "invalid_schema"),
    "multiple": ({FORMAT: of_schema({"multipleOf": 99999989})}, FORMAT, "invalid_schema"),
    "long expression": (
        {"structured_outputs": {"regex": "(a|b)" * 60000}},
        "structured_outputs.regex",
        "invalid_schema",
    ),
    "brackets": (
        {"structured_outputs": {"regex": "(" * 90000 + ")" * 90000}},
        "structured_outputs",
        "invalid_schema",
    ),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("fields", "param", "code"), BAD.values(), ids=BAD)
def test_what_is_refused(client: Any, fields: dict[str, Any], param: str, code: str) -> None:
    response = ask(client, **fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert not code or error["code"] == code
    assert "\n" not in error["message"]
    assert len(error["message"]) < 700
    assert choice(client, max_tokens=1)["finish_reason"] == "length"


def test_logprobs_are_reported_with_a_grammar(client: Any) -> None:
    found = choice(client, structured_outputs={"choice": ["red"]}, logprobs=True, top_logprobs=2)
    tokens = found["logprobs"]["content"]
    assert "".join(one["token"] for one in tokens) == "red"


def test_the_document_tells_the_types(client: Any) -> None:
    schemas = client.get("/openapi.json").json()["components"]["schemas"]
    assert schemas["JsonSchemaFormat"]["required"] == ["name"]
    assert set(schemas["StructuredOutputs"]["properties"]) == {"json", "regex", "choice", "grammar"}
    assert schemas["FunctionDefinition"]["required"] == ["name"]
