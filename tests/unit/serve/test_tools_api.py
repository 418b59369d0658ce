"""Functions that the model may or must call, in every form of calls, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jsonschema_rs
import openai
import pytest

from layline import LLM
from layline.serve.called import AnswerCalls
from layline.serve.forms import CalledFunction, PastCall
from layline.serve.service import Service
from layline.serve.tool_use import ToolUse, past_calls
from layline.text.tools.formats import FORMATS
from support.serving import NAME, client_on, events, save_talker, service_on, serving
from support.writer import TEMPLATES, save_writer

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 5},
        "days": {"type": "integer", "minimum": 0, "maximum": 9},
        "unit": {"enum": ["c", "f"]},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}


def tool(name: str, parameters: Any = None, **more: Any) -> dict[str, Any]:
    function = {"name": name, "description": f"does {name}", "parameters": parameters, **more}
    return {"type": "function", "function": function}


TOOLS = [tool("get_weather", WEATHER), tool("now")]
MESSAGES = [{"role": "user", "content": "The harbour"}]
NAMED = {"type": "function", "function": {"name": "get_weather"}}


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Service]]:
    with ExitStack() as stack:
        found = {}
        for form, template in TEMPLATES.items():
            path = tmp_path_factory.mktemp(form)
            save_writer(path, template)
            found[form] = stack.enter_context(service_on(LLM(str(path), threads=1)))
        yield found


@pytest.fixture(scope="module")
def clients(services: dict[str, Service]) -> Iterator[dict[str, Any]]:
    with ExitStack() as stack:
        yield {form: stack.enter_context(client_on(one)) for form, one in services.items()}


@pytest.fixture
def client(clients: dict[str, Any]) -> Any:
    return clients["hermes"]


def ask(client: Any, **fields: Any) -> Any:
    body = {"model": NAME, "messages": MESSAGES, "seed": 1, "max_tokens": 400, **fields}
    return client.post("/v1/chat/completions", json={"tools": TOOLS, **body})


def choice(client: Any, **fields: Any) -> Any:
    response = ask(client, **fields)
    assert response.status_code == 200, response.text
    (found,) = response.json()["choices"]
    return found


def check(call: dict[str, Any]) -> None:
    arguments = json.loads(call["function"]["arguments"])
    if call["function"]["name"] == "get_weather":
        jsonschema_rs.validate(WEATHER, arguments)
    else:
        assert (call["function"]["name"], arguments) == ("now", {})


def accumulated(response: Any) -> tuple[str, list[dict[str, Any]], str]:
    """Content, calls and reason of a stream, put together as OpenAI's guide does."""
    streamed = events(response)
    assert streamed.pop() == "[DONE]"
    content, calls, reason = "", [], ""
    for event in streamed:
        (one,) = event["choices"]
        content += one["delta"].get("content") or ""
        for piece in one["delta"].get("tool_calls", []):
            if "id" in piece:
                assert piece["index"] == len(calls)
                assert piece["type"] == "function"
                calls.append(
                    {"id": piece["id"], "function": {"arguments": "", **piece["function"]}}
                )
            else:
                assert "name" not in piece["function"]
                calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
        reason = one["finish_reason"] or reason
    return content, calls, reason


@pytest.mark.parametrize("form", TEMPLATES)
@pytest.mark.parametrize("wanted", ["required", NAMED], ids=["required", "named"])
def test_a_call_that_is_asked_for_comes(clients: dict[str, Any], form: str, wanted: Any) -> None:
    found = choice(clients[form], tool_choice=wanted, parallel_tool_calls=False)
    assert found["finish_reason"] == "tool_calls"
    assert found["message"]["content"] is None
    (call,) = found["message"]["tool_calls"]
    check(call)
    assert call["type"] == "function"
    assert wanted == "required" or call["function"]["name"] == "get_weather"
    letters = 9 if form == "mistral" else len("call_") + 24
    assert len(call["id"]) == letters


@pytest.mark.parametrize("form", TEMPLATES)
def test_a_stream_tells_the_same(clients: dict[str, Any], form: str) -> None:
    for seed in (1, 2, 3):
        fields = {"tool_choice": "required", "seed": seed, "max_tokens": 150}
        whole = choice(clients[form], **fields)
        content, calls, reason = accumulated(ask(clients[form], stream=True, **fields))
        assert content == (whole["message"]["content"] or "")
        assert reason == whole["finish_reason"]
        listed = whole["message"].get("tool_calls", [])
        assert [one["function"] for one in calls] == [one["function"] for one in listed]
        assert len({one["id"] for one in calls}) == len(calls)


@pytest.mark.parametrize("form", TEMPLATES)
def test_several_calls(clients: dict[str, Any], form: str) -> None:
    counts = []
    for seed in range(6):
        found = choice(clients[form], tool_choice="required", seed=seed)
        calls = found["message"].get("tool_calls", [])
        counts.append(len(calls))
        if found["finish_reason"] == "tool_calls":
            for call in calls:
                check(call)
    assert max(counts) > 1


@pytest.mark.parametrize("form", TEMPLATES)
@pytest.mark.parametrize("most", [1, 6, 14, 25])
def test_the_length_cuts_a_call(clients: dict[str, Any], form: str, most: int) -> None:
    fields = {"tool_choice": NAMED, "max_tokens": most, "temperature": 0}
    whole = choice(clients[form], **fields)
    full = choice(clients[form], **{**fields, "max_tokens": 400})
    content, calls, reason = accumulated(ask(clients[form], stream=True, **fields))
    assert reason == whole["finish_reason"] == "length"
    # Neither a piece of a marker nor one of a call's head is content.
    assert content == "" == (whole["message"]["content"] or "")
    (wanted,) = full["message"]["tool_calls"]
    for call in whole["message"].get("tool_calls", []):
        assert wanted["function"]["arguments"].startswith(call["function"]["arguments"])
    assert [one["function"] for one in calls] == [
        one["function"] for one in whole["message"].get("tool_calls", [])
    ]


@pytest.mark.parametrize("form", TEMPLATES)
def test_a_random_model_left_to_itself_writes_text(clients: dict[str, Any], form: str) -> None:
    fields = {"tool_choice": "auto", "max_tokens": 30}
    found = choice(clients[form], **fields)
    assert found["finish_reason"] in ("stop", "length")
    assert "tool_calls" not in found["message"]
    content, calls, reason = accumulated(ask(clients[form], stream=True, **fields))
    assert (content, calls, reason) == (found["message"]["content"], [], found["finish_reason"])


@pytest.mark.parametrize("form", ["hermes", "mistral", "pythonic"])
def test_json_or_a_call(clients: dict[str, Any], form: str) -> None:
    schema = {**WEATHER, "required": ["days"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    reasons = set()
    for seed in range(8):
        found = choice(clients[form], response_format=wanted, seed=seed, temperature=2)
        reasons.add(found["finish_reason"])
        if found["finish_reason"] == "stop":
            jsonschema_rs.validate(schema, json.loads(found["message"]["content"]))
        for call in found["message"].get("tool_calls", []):
            if found["finish_reason"] == "tool_calls":
                check(call)
    assert len(reasons) > 1


def test_json_or_a_call_that_look_alike(clients: dict[str, Any]) -> None:
    error = ask(clients["llama"], response_format={"type": "json_object"}).json()["error"]
    assert (error["param"], error["code"]) == ("tools", "invalid_schema")


def use(form: str, *, parallel: bool = True, forced: bool = False) -> ToolUse:
    return ToolUse(
        form=FORMATS[form],
        names=frozenset({"get_weather", "now"}),
        parallel=parallel,
        forced=forced,
        template_tools=[],
        grammar=None,
        shown_ids=frozenset(),
    )


CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "reason", "wanted"),
    [
        ("Hello.", "stop", ("Hello.", 0, "stop")),
        ("Hello.", "length", ("Hello.", 0, "length")),
        (CALL, "stop", (None, 1, "tool_calls")),
        (CALL, "length", (None, 1, "length")),
        (f"Hello.\n{CALL}", "stop", ("Hello.", 1, "tool_calls")),
        (CALL[:-14], "stop", (CALL[:-14], 0, "stop")),
        (CALL[:25], "length", ("", 0, "length")),
        (CALL.replace("{}", '{"a": 1'), "stop", (CALL.replace("{}", '{"a": 1'), 0, "stop")),
        ("", "stop", ("", 0, "stop")),
    ],
)
def test_reasons(text: str, reason: str, wanted: tuple[Any, int, str]) -> None:
    calls = AnswerCalls(use("hermes"))
    content, found = calls.whole(text, reason)
    assert (content, len(found), calls.reason(reason)) == wanted


def test_a_stream_cannot_take_back_what_breaks_later() -> None:
    text = '<tool_call>{"name": "now", "arguments": {"a": tru}}</tool_call>'
    calls = AnswerCalls(use("hermes"))
    deltas = [delta for each in text for delta in calls.take(each, None)]
    deltas += calls.take("", "stop")
    assert calls.reason("stop") == "tool_calls"
    sent = "".join(delta.tool_calls[0].function.arguments for delta in deltas if delta.tool_calls)
    assert sent == '{"a": tru'


def test_only_the_first_call_without_parallel_ones() -> None:
    calls = AnswerCalls(use("hermes", parallel=False))
    content, found = calls.whole(f"{CALL}\n{CALL}", "stop")
    assert (content, len(found)) == (None, 1)


def test_strict_functions_are_followed_where_the_model_calls(client: Any) -> None:
    strict = [tool("get_weather", WEATHER, strict=True), tool("now")]
    marker = client.post("/tokenize", json={"prompt": "<tool_call>"}).json()["tokens"]
    called = 0
    for seed in range(12):
        found = choice(
            client,
            tools=strict,
            seed=seed,
            logit_bias={str(token): 30 for token in marker},
            max_tokens=300,
        )
        for call in found["message"].get("tool_calls", []):
            called += 1
            if found["finish_reason"] == "tool_calls" and call["function"]["name"] != "now":
                check(call)
    assert called > 0


def rendered(client: Any, messages: list[Any], **fields: Any) -> int:
    response = ask(client, messages=messages, max_tokens=1, **fields)
    assert response.status_code == 200, response.text
    tokens: int = response.json()["usage"]["prompt_tokens"]
    return tokens


def test_tools_and_calls_are_in_the_prompt(client: Any) -> None:
    plain = rendered(client, MESSAGES, tools=None)
    assert rendered(client, MESSAGES) > plain + 50
    assert rendered(client, MESSAGES, tool_choice="none") == plain
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "Paris", "days": 3}'},
    }
    history = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]
    assert rendered(client, history) > rendered(client, MESSAGES) + 20
    # What a call's arguments are is told as JSON, and not as a text that holds it.
    again = json.loads(json.dumps(history))
    again[1]["tool_calls"][0]["function"]["arguments"] = '{"city":"Paris","days":3}'
    assert rendered(client, again) == rendered(client, history)


def test_arguments_of_earlier_calls_are_objects() -> None:
    def given(text: str) -> Any:
        call = PastCall(id="a", function=CalledFunction(name="f", arguments=text))
        return past_calls([call])[0]["function"]["arguments"]

    assert given('{"a": [1]}') == {"a": [1]}
    assert given("") == {}
    for text in ("[1]", "{", "[" * 100000, "3"):
        assert given(text) == text


DEEP: Any = {"type": "object"}
for _ in range(70):
    DEEP = {"type": "object", "properties": {"a": DEEP}}
BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "no name": ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", ""),
    "type": ({"tools": [{"type": "custom", "function": {"name": "f"}}]}, "tools[0].type", ""),
    "name": ({"tools": [tool("a b")]}, "tools[0].function.name", "invalid_type"),
    "twice": ({"tools": [tool("a"), tool("a")]}, "tools", "invalid_value"),
    "many": ({"tools": [tool(f"f{i}") for i in range(200)]}, "tools", "invalid_type"),
    "choice": ({"tool_choice": "always"}, "tool_choice", "invalid_type"),
    "unknown choice": (
        {"tool_choice": {"type": "function", "function": {"name": "x"}}},
        "tool_choice",
        "invalid_value",
    ),
    "choice alone": ({"tools": None, "tool_choice": "required"}, "tool_choice", ""),
    "parameters": (
        {"tools": [tool("f", {"type": "array"})], "tool_choice": "required"},
        "tools",
        "invalid_schema",
    ),
    "schema": (
        {"tools": [tool("f", {"type": "object", "properties": 3})], "tool_choice": "required"},
        "tools",
        "invalid_schema",
    ),
    "strict": (
        {"tools": [tool("f", {"type": "object", "not": {}}, strict=True)]},
        "tools",
        "invalid_schema",
    ),
    "deep": ({"tools": [tool("f", DEEP)], "tool_choice": "required"}, "tools", "invalid_schema"),
    "other document": (
        {
            "tools": [tool("f", {"type": "object", "properties": {"a": {"$ref": "http://x/"}}})],
            "tool_choice": "required",
        },
        "tools",
        "invalid_schema",
    ),
    "long": (
        {
            "tools": [tool("f", {"type": "object", "properties": {"a": {"enum": ["x" * 300000]}}})],
            "tool_choice": "required",
        },
        "tools",
        "invalid_schema",
    ),
    "functions": ({"functions": [{"name": "f"}]}, "functions", "unsupported_parameter"),
    "function_call": ({"function_call": {"name": "f"}}, "function_call", "unsupported_parameter"),
    "no id": (
        {"messages": [*MESSAGES, {"role": "tool", "content": "x"}]},
        "messages[1].tool_call_id",
        "missing_required_parameter",
    ),
    "expression": (
        {"structured_outputs": {"regex": "a"}},
        "structured_outputs",
        "",
    ),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("form", TEMPLATES)
@pytest.mark.parametrize(("fields", "param", "code"), BAD.values(), ids=BAD)
def test_what_is_refused(
    clients: dict[str, Any], form: str, fields: dict[str, Any], param: str, code: str
) -> None:
    response = ask(clients[form], **fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert not code or error["code"] == code
    assert len(error["message"]) < 700


def test_a_template_without_tools(tmp_path: Path) -> None:
    save_talker(tmp_path)
    with service_on(LLM(str(tmp_path), threads=1)) as service, client_on(service) as client:
        error = ask(client, max_tokens=3).json()["error"]
        assert (error["param"], error["code"]) == ("tools", "unsupported_parameter")
        assert "takes no tools" in error["message"]
        assert ask(client, tool_choice="none", max_tokens=3).status_code == 200


def test_a_form_that_is_not_known_or_given(tmp_path: Path) -> None:
    save_writer(tmp_path, TEMPLATES["hermes"].replace("tool_call>", "x>"))
    llm = LLM(str(tmp_path), threads=1)
    with service_on(llm) as service, client_on(service) as client:
        assert "--tool-parser hermes, llama" in ask(client).json()["error"]["message"]
    with service_on(llm, tool_parser="none") as service, client_on(service) as client:
        assert "--tool-parser none" in ask(client).json()["error"]["message"]
    with service_on(llm, tool_parser="llama") as service, client_on(service) as client:
        assert choice(client, tool_choice="required")["finish_reason"] in ("tool_calls", "length")


def test_logprobs_of_an_answer_that_calls(client: Any) -> None:
    fields = {"tool_choice": NAMED, "logprobs": True, "temperature": 0}
    whole = choice(client, **fields)["logprobs"]["content"]
    streamed = events(ask(client, stream=True, **fields))[:-1]
    pieces = [event["choices"][0]["logprobs"] for event in streamed]
    listed = [one for piece in pieces if piece for one in piece["content"]]
    assert listed == whole
    assert "".join(one["token"] for one in whole).startswith("<tool_call>")


def test_the_official_client(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save_writer(folder)
    flags = ("--served-model-name", NAME, "--threads", "1", "--tool-parser", "hermes")
    with serving(folder, tmp_path, *flags) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        asked: dict[str, Any] = {
            "model": NAME,
            "messages": MESSAGES,
            "tools": TOOLS,
            "tool_choice": "required",
            "seed": 3,
            "max_tokens": 300,
        }
        answer = client.chat.completions.create(**asked, parallel_tool_calls=False)
        message = answer.choices[0].message
        assert answer.choices[0].finish_reason == "tool_calls"
        assert message.tool_calls
        # As it came it goes back, with what the function said.
        follow = client.chat.completions.create(
            model=NAME,
            messages=[
                *MESSAGES,
                message.model_dump(exclude_none=True),
                {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"},
            ],
            tools=TOOLS,
            tool_choice="none",
            max_tokens=4,
        )
        assert follow.usage is not None
        assert follow.usage.prompt_tokens > 20
        with client.chat.completions.stream(**asked) as stream:
            for _ in stream:
                pass
            final = stream.get_final_completion()
        assert final.choices[0].finish_reason == "tool_calls"
        for call in final.choices[0].message.tool_calls or []:
            check({"function": {"name": call.function.name, "arguments": call.function.arguments}})
        parsed = client.chat.completions.create(
            model=NAME,
            messages=MESSAGES,
            seed=1,
            max_tokens=300,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "w", "schema": WEATHER, "strict": True},
            },
        )
        jsonschema_rs.validate(WEATHER, json.loads(parsed.choices[0].message.content or ""))
        with pytest.raises(openai.BadRequestError) as bad:
            client.chat.completions.create(
                model=NAME, messages=MESSAGES, extra_body={"structured_outputs": {"regex": "["}}
            )
        assert (bad.value.param, bad.value.code) == ("structured_outputs", "invalid_schema")
