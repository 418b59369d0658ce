"""Details of OpenAI's API that its own client or its users rely on."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import openai
import pytest

from layline import LLM
from layline.serve.service import Service
from support.serving import NAME, client_on, events, sdk_on, service_on

MESSAGES = [{"role": "user", "content": "w2 w6"}]
CHAT = "/v1/chat/completions"


def test_seeds_and_the_fingerprint(sdk: Any, service: Service) -> None:
    options: dict[str, Any] = {"model": NAME, "messages": MESSAGES, "max_completion_tokens": 12}
    first = sdk.chat.completions.create(**options, seed=11, temperature=1.5)
    again = sdk.chat.completions.create(**options, seed=11, temperature=1.5)
    other = sdk.chat.completions.create(**options, seed=12, temperature=1.5)
    assert first.choices[0].message == again.choices[0].message
    assert first.choices[0].message != other.choices[0].message
    assert first.system_fingerprint == again.system_fingerprint == service.fingerprint
    assert service.fingerprint.startswith("fp_")
    stream = sdk.chat.completions.create(**options, stream=True)
    assert {chunk.system_fingerprint for chunk in stream} == {service.fingerprint}
    text = sdk.completions.create(model=NAME, prompt="w1", max_tokens=1)
    assert text.system_fingerprint == service.fingerprint
    settings = replace(service.settings, model_name="other")
    assert replace(service, settings=settings).fingerprint != service.fingerprint
    assert replace(service, about={"mesh": "tp 2"}).fingerprint != service.fingerprint


def test_several_answers_in_a_stream_with_usage(sdk: Any) -> None:
    options: dict[str, Any] = {
        "model": NAME,
        "messages": MESSAGES,
        "n": 3,
        "seed": 5,
        "temperature": 1.2,
        "max_completion_tokens": 9,
    }
    whole = sdk.chat.completions.create(**options)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in whole.choices}) == 3
    stream = sdk.chat.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = list(stream)
    assert (last.choices, last.usage.completion_tokens) == ([], 27)
    assert all(chunk.usage is None and len(chunk.choices) == 1 for chunk in chunks)
    for choice in whole.choices:
        mine = [c.choices[0] for c in chunks if c.choices[0].index == choice.index]
        assert mine[0].delta.role == "assistant"
        assert "".join(c.delta.content or "" for c in mine) == choice.message.content
        assert [c.finish_reason for c in mine if c.finish_reason] == [choice.finish_reason]
        assert mine[-1].finish_reason == choice.finish_reason
    without = sdk.chat.completions.create(**options, stream=True)
    assert all(chunk.usage is None for chunk in without)


def test_lists_of_stop_strings(sdk: Any) -> None:
    options: dict[str, Any] = {"model": NAME, "messages": MESSAGES, "temperature": 0}
    plain = sdk.chat.completions.create(**options, max_completion_tokens=8).choices[0]
    text = plain.message.content
    assert plain.finish_reason == "length"
    for stop in ([text[5:8]], ["never", text[5:8]], text[5:8], ["never", "ever"]):
        found = sdk.chat.completions.create(**options, max_completion_tokens=8, stop=stop)
        choice = found.choices[0]
        if "ever" in stop:
            assert (choice.message.content, choice.finish_reason) == (text, "length")
        else:
            assert choice.message.content == text[: text.index(text[5:8])]
            assert choice.finish_reason == "stop"


def test_best_of_is_refused_unless_it_changes_nothing(sdk: Any) -> None:
    assert sdk.completions.create(model=NAME, prompt="w1", best_of=2, n=2, max_tokens=1)
    with pytest.raises(openai.BadRequestError) as caught:
        sdk.completions.create(model=NAME, prompt="w1", best_of=3, max_tokens=1)
    assert (caught.value.param, caught.value.code) == ("best_of", "unsupported_parameter")


@pytest.mark.parametrize("text", ["w1", "w2 w6 w8", "<unk> w9", "w100 </s> w3"])
def test_ids_and_back(client: Any, text: str) -> None:
    ids = client.post("/tokenize", json={"prompt": text}).json()
    assert ids["count"] == len(ids["tokens"]) == len(text.split())
    back = client.post("/detokenize", json={"tokens": ids["tokens"]}).json()["prompt"]
    again = client.post("/tokenize", json={"prompt": " ".join(text.split())}).json()
    assert (back, again) == (text.replace(" ", ""), ids)


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/v1/completions", CHAT])
@pytest.mark.parametrize("body", [b"\xff\xfe", b'{"prompt": "\xc3"}', b"{} {}", b"[]", b"null"])
def test_bodies_that_are_no_request_of_any_path(client: Any, path: str, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    response = client.post(path, content=body, headers=headers)
    assert response.status_code == 400
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")
READ = ("/v1/models", f"/v1/models/{NAME}", "/health", "/metrics", "/openapi.json", "/")
WRITTEN = ("/v1/completions", CHAT, "/v1/embeddings", "/tokenize", "/detokenize")


@pytest.mark.parametrize("path", [*READ, *WRITTEN])
def test_methods_of_every_path(client: Any, path: str) -> None:
    allowed = {"POST"} if path in WRITTEN else {"GET", "HEAD"}
    for method in METHODS:
        response = client.request(method, path)
        assert response.headers["x-request-id"]
        if method not in allowed:
            assert response.status_code == 405
            assert set(response.headers["allow"].replace(" ", "").split(",")) == allowed
            if method != "HEAD":
                error = response.json()["error"]
                assert (error["type"], error["code"]) == (
                    "invalid_request_error",
                    "method_not_allowed",
                )
        elif method == "HEAD":
            assert (response.status_code, response.content) == (200, b"")
        else:
            assert response.status_code == (415 if method == "POST" else 200)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("path", ["/v1", "/v1/completions/", "/nothing", "/v1/models/nope"])
def test_unknown_paths(client: Any, path: str, method: str) -> None:
    response = client.request(method, path)
    known = path == "/v1/models/nope" and method not in ("GET", "HEAD")
    assert response.status_code == (405 if known else 404)
    if method != "HEAD":
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_a_full_queue_is_429_with_a_time(llm: LLM) -> None:
    with service_on(llm, max_open=1) as busy, client_on(busy) as client:
        with pytest.raises(openai.RateLimitError) as caught:
            sdk_on(client).completions.create(model=NAME, prompt=["w1", "w2"], max_tokens=1)
        assert caught.value.code == "overloaded"
        assert caught.value.response.headers["retry-after"] == "1"
        found = sdk_on(client).completions.create(model=NAME, prompt="w1", max_tokens=1)
        assert found.usage.completion_tokens == 1


def test_requests_larger_than_what_is_free_wait(checkpoint: Any) -> None:
    """The cache holds one of them at a time; one that it could never hold is refused at once."""
    llm = LLM(str(checkpoint[0]), threads=1, max_model_len=64, kv_memory="30K", max_running=8)
    blocks = llm.engine.stats().blocks
    assert blocks == 4
    body = {"model": NAME, "temperature": 0, "ignore_eos": True}
    with service_on(llm) as service, client_on(service) as client:
        many = {**body, "prompt": [[5 + n] * 40 for n in range(8)], "max_tokens": 20}
        found = client.post("/v1/completions", json=many).json()
        assert [choice["finish_reason"] for choice in found["choices"]] == ["length"] * 8
        alone = {**body, "prompt": [6] * 40, "max_tokens": 20}
        choice = client.post("/v1/completions", json=alone).json()["choices"][0]
        assert choice["text"] == found["choices"][1]["text"]
        assert llm.engine.stats().blocks_held == 0
        too_long = client.post("/v1/completions", json={**body, "prompt": [5] * 64})
        assert too_long.status_code == 400
        assert too_long.json()["error"]["code"] == "context_length_exceeded"


def test_every_event_is_one_line_of_json(client: Any) -> None:
    body = {"model": NAME, "messages": MESSAGES, "max_tokens": 3, "stream": True}
    response = client.post(CHAT, json=body)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.text.endswith("data: [DONE]\n\n")
    for line in response.text.splitlines():
        assert line == "" or line.startswith("data: ")
    for event in events(response)[:-1]:
        assert json.loads(json.dumps(event)) == event
        assert event["object"] == "chat.completion.chunk"
