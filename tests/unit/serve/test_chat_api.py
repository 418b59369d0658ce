"""/v1/chat/completions on a tiny model."""

from __future__ import annotations

from typing import Any

import pytest

from support.serving import NAME, events

MESSAGES = [{"role": "user", "content": "w2 w6"}]


def ask(client: Any, **fields: Any) -> Any:
    body = {"model": NAME, "messages": MESSAGES, "temperature": 0, "max_tokens": 6, **fields}
    return client.post("/v1/chat/completions", json=body)


def answer(client: Any, **fields: Any) -> Any:
    response = ask(client, **fields)
    assert response.status_code == 200, response.text
    return response.json()


def completed(client: Any, prompt: Any, count: int = 6) -> str:
    body = {"model": NAME, "prompt": prompt, "temperature": 0, "max_tokens": count}
    text: str = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
    return text


def test_the_template_makes_the_prompt(client: Any) -> None:
    found = answer(client)
    # "user" is no word of the vocabulary.
    prompt = "w3 <unk> w2 w6 w4"
    assert found["choices"][0]["message"] == {
        "content": completed(client, prompt),
        "role": "assistant",
        "refusal": None,
    }
    assert found["usage"]["prompt_tokens"] == 5
    ids = client.post("/tokenize", json={"messages": MESSAGES}).json()["tokens"]
    assert ids == client.post("/tokenize", json={"prompt": prompt}).json()["tokens"]


def test_content_parts_names_and_old_answers_are_read(client: Any) -> None:
    parts = [{"type": "text", "text": "w2 "}, {"type": "text", "text": "w6"}]
    assert answer(client, messages=[{"role": "user", "content": parts}]) | {"id": 0} == answer(
        client
    ) | {"id": 0}
    history = [
        {"role": "developer", "content": "w9"},
        *MESSAGES,
        {
            "role": "assistant",
            "content": "w5",
            "refusal": None,
            "annotations": [],
            "tool_calls": None,
        },
        {"role": "user", "content": "w7", "name": "ann"},
    ]
    assert answer(client, messages=history)["usage"]["prompt_tokens"] == 14


def test_a_stream_begins_with_the_role_and_ends_with_the_reason(client: Any) -> None:
    whole = answer(client)
    streamed = events(ask(client, stream=True, stream_options={"include_usage": True}))
    assert streamed.pop() == "[DONE]"
    usage = streamed.pop()
    assert (usage["choices"], usage["usage"]) == ([], whole["usage"])
    choices = [event["choices"][0] for event in streamed]
    assert all(event["object"] == "chat.completion.chunk" for event in streamed)
    assert choices[0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert choices[-1] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}
    text = "".join(choice["delta"]["content"] for choice in choices[:-1])
    assert text == whole["choices"][0]["message"]["content"]
    assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)


def test_logprobs_have_bytes_in_both_forms(client: Any) -> None:
    whole = answer(client, logprobs=True, top_logprobs=2)["choices"][0]
    entries = whole["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries) == whole["message"]["content"]
    for entry in entries:
        assert bytes(entry["bytes"]).decode() == entry["token"]
        assert len(entry["top_logprobs"]) == 2
        # Greedy: the first of the likeliest is the one that was taken.
        best = {name: entry[name] for name in ("token", "logprob", "bytes")}
        assert entry["top_logprobs"][0] == best
    streamed = events(ask(client, logprobs=True, top_logprobs=2, stream=True))[:-1]
    pieces = [event["choices"][0]["logprobs"] for event in streamed]
    assert [entry for piece in pieces if piece for entry in piece["content"]] == entries
    without = answer(client, logprobs=True)["choices"][0]["logprobs"]["content"]
    assert all(entry["top_logprobs"] == [] for entry in without)


def test_without_a_limit_an_answer_fills_the_context(client: Any) -> None:
    found = answer(client, max_tokens=None)
    assert found["usage"]["total_tokens"] == 512
    assert found["choices"][0]["finish_reason"] == "length"
    assert (
        answer(client, max_tokens=None, max_completion_tokens=3)["usage"]["completion_tokens"] == 3
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {}}},
            "response_format.json_schema.name",
        ),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"max_completion_tokens": 4}, "max_completion_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0]",
        ),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "user", "content": "w1 " * 600}]}, "messages"),
        ({"best_of": 2}, "best_of"),
        ({"stop_token_ids": [5000]}, "stop_token_ids"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"min_tokens": 7}, "min_tokens"),
    ],
)
def test_what_is_not_there_is_refused_by_name(
    client: Any, fields: dict[str, Any], param: str
) -> None:
    response = ask(client, **fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert error["message"]
    assert "\n" not in error["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "text"}},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"},
        {"tool_choice": "none", "parallel_tool_calls": False},
        {"metadata": {"a": "b"}, "store": False, "user": "me", "service_tier": "auto"},
        {"modalities": ["text"], "safety_identifier": "x", "prompt_cache_key": "y"},
        {"stream": None, "n": None, "stop": None, "seed": None, "logit_bias": None},
        {"priority": 3, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.0},
    ],
)
def test_what_changes_nothing_is_taken(client: Any, fields: dict[str, Any]) -> None:
    assert (
        answer(client, **fields)["choices"][0]["message"] == answer(client)["choices"][0]["message"]
    )
