"""Whatever is sent, the answer is an error in OpenAI's form with the right status."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from support.serving import NAME, client_on, service_on

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "w2"}]
GOOD = {"model": NAME, "messages": MESSAGES, "max_tokens": 1}
JSON = {"content-type": "application/json"}


def problem(response: Any, status: int) -> dict[str, Any]:
    """The error of an answer, whose form is checked."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    found: dict[str, Any] = body["error"]
    return found


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (json.dumps(GOOD).encode() + b" x", "invalid_json"),
        (b'{"model": "\xff"}', "invalid_json"),
        (b'{"model": "\\ud800"}', "invalid_json"),
        (b'{"model": "tiny", "temperature": NaN}', "invalid_json"),
        (b'{"model": "tiny", "temperature": Infinity}', "invalid_json"),
        (b'{"model": "tiny", "temperature": 1e999}', "invalid_type"),
        (b'{"metadata": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001, "invalid_json"),
        (b"[" * 100_000 + b"]" * 100_000, "invalid_type"),
        (b'"text"', "invalid_type"),
        (b"{}", "missing_required_parameter"),
    ],
)
def test_a_body_that_is_no_request(client: Any, body: bytes, code: str) -> None:
    assert problem(client.post(CHAT, content=body, headers=JSON), 400)["code"] == code


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"temperature": 3}, "temperature", "invalid_type"),
        ({"temperature": "hot"}, "temperature", "invalid_type"),
        ({"n": 0}, "n", "invalid_type"),
        ({"n": 129}, "n", "invalid_type"),
        ({"n": True}, "n", "invalid_type"),
        ({"max_tokens": -1}, "max_tokens", "invalid_type"),
        ({"max_tokens": 1 << 70}, "max_tokens", "invalid_type"),
        ({"seed": 1 << 63}, "seed", "invalid_type"),
        ({"stop": [""]}, "stop[0]", "invalid_type"),
        ({"stop": ["a"] * 17}, "stop", "invalid_type"),
        ({"logit_bias": {"5": 101}}, "logit_bias[...]", "invalid_type"),
        ({"logit_bias": {"5000": 1}}, "logit_bias", "invalid_value"),
        ({"presence_penalty": -2.5}, "presence_penalty", "invalid_type"),
        ({"messages": []}, "messages", "invalid_type"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "missing_required_parameter"),
        ({"messages": [{"role": "boss", "content": "x"}]}, "messages[0].role", "invalid_type"),
        ({"messages": [{"role": "user", "text": "x"}]}, "messages[0].text", "unknown_parameter"),
        ({"frobnicate": 1}, "frobnicate", "unknown_parameter"),
        ({"stream_options": {"x": 1}, "stream": True}, "stream_options.x", "unknown_parameter"),
    ],
)
def test_a_field_that_is_wrong_is_named(
    client: Any, fields: dict[str, Any], param: str, code: str
) -> None:
    found = problem(client.post(CHAT, json={**GOOD, **fields}), 400)
    assert (found["param"], found["code"]) == (param, code), found
    assert param.split("[", maxsplit=1)[0].rsplit(".", maxsplit=1)[-1] in found["message"]


def test_another_model_is_not_found(client: Any) -> None:
    found = problem(client.post(CHAT, json={**GOOD, "model": "gpt-4"}), 404)
    assert (found["code"], found["param"]) == ("model_not_found", "model")
    assert NAME in found["message"]
    assert problem(client.get("/v1/models/gpt-4"), 404)["code"] == "model_not_found"
    assert client.get(f"/v1/models/{NAME}").json()["id"] == NAME


def test_paths_and_methods(client: Any) -> None:
    assert problem(client.get("/v1/nothing"), 404)["code"] == "unknown_url"
    assert problem(client.get("/v1/models/"), 404)
    refused = client.get(CHAT)
    assert problem(refused, 405)["code"] == "method_not_allowed"
    assert "POST" in refused.headers["allow"]


@pytest.mark.parametrize(
    "kind", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"]
)
def test_other_content_types_are_refused(client: Any, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    response = client.post(CHAT, content=json.dumps(GOOD).encode(), headers=headers)
    assert problem(response, 415)["code"] == "unsupported_media_type"


def test_charsets(client: Any) -> None:
    body = json.dumps(GOOD).encode()
    for charset, status in (("UTF-8", 200), ('"utf-8"', 200), ("latin-1", 415)):
        headers = {"content-type": f"application/json; charset={charset}"}
        assert client.post(CHAT, content=body, headers=headers).status_code == status


def test_a_body_above_the_limit(llm: Any) -> None:
    with service_on(llm, max_body=1000) as small, client_on(small) as client:
        large = {**GOOD, "user": "x" * 1000}
        assert problem(client.post(CHAT, json=large), 413)["code"] == "request_too_large"
        pieces = iter([json.dumps(large).encode()])
        # Without a length, it is noticed while it arrives.
        assert problem(client.post(CHAT, content=pieces, headers=JSON), 413)
        assert client.post(CHAT, json=GOOD).status_code == 200


def test_embeddings_are_refused_in_words(client: Any) -> None:
    found = problem(client.post("/v1/embeddings", json={"model": NAME, "input": "x"}), 400)
    assert (found["param"], found["code"]) == ("model", "model_not_supported")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 2}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, "w1"]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [5, 9999]}, "prompt"),
        ({"prompt": [5] * 512}, "prompt"),
        ({"prompt": ["w1"] * 129}, "prompt"),
        ({"logprobs": 21}, "logprobs"),
    ],
)
def test_completions_refuse_by_name(client: Any, fields: dict[str, Any], param: str) -> None:
    body = {"model": NAME, "prompt": "w1", "max_tokens": 1, **fields}
    assert problem(client.post("/v1/completions", json=body), 400)["param"] == param


def test_too_long_has_the_code_that_clients_look_for(client: Any) -> None:
    body = {"model": NAME, "prompt": [5] * 512}
    found = problem(client.post("/v1/completions", json=body), 400)
    assert found["code"] == "context_length_exceeded"
    assert "512" in found["message"]


def test_a_full_queue_is_told_to_try_again(llm: Any) -> None:
    with service_on(llm, max_open=2) as busy, client_on(busy) as client:
        response = client.post("/v1/completions", json={"model": NAME, "prompt": "w1", "n": 3})
        assert problem(response, 429)["code"] == "overloaded"
        assert response.headers["retry-after"]
        assert client.post(CHAT, json=GOOD).status_code == 200


def test_a_surprise_is_an_answer_and_tells_nothing(
    service: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    secret = "-".join(("what", "was", "asked"))

    def broken(*_: Any, **__: Any) -> Any:
        raise KeyError(secret)

    monkeypatch.setattr(service.tokenizer, "apply_chat", broken)
    with client_on(service) as client, caplog.at_level(logging.DEBUG, logger="layline"):
        response = client.post(CHAT, json=GOOD)
    assert problem(response, 500)["type"] == "server_error"
    assert response.headers["x-request-id"] in response.text
    assert "KeyError" in caplog.text
    assert secret not in caplog.text + response.text


def test_no_prompt_is_in_the_log(client: Any, caplog: pytest.LogCaptureFixture) -> None:
    secret = [{"role": "user", "content": "w17 tell-nobody"}]
    with caplog.at_level(logging.DEBUG, logger="layline"):
        assert client.post(CHAT, json={**GOOD, "messages": secret}).status_code == 200
        client.post(CHAT, json={**GOOD, "tell-nobody": 1})
    assert "POST /v1/chat/completions 200" in caplog.text
    assert "tell-nobody" not in caplog.text


def test_request_ids(client: Any) -> None:
    mine = client.get("/health", headers={"x-request-id": "abc-123"})
    assert mine.headers["x-request-id"] == "abc-123"
    other = client.get("/health", headers={"x-request-id": "a b\tc"})
    assert other.headers["x-request-id"].startswith("req_")
    assert client.get("/nope").headers["x-request-id"].startswith("req_")
