"""A request that fails is an error for its client, a number in the metrics, and nothing else."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from layline import LLM
from layline.text.stop import StopMatcher
from support.poisoned import WORD, save_poisoned
from support.serving import NAME, client_on, events, sdk_on, service_on, wait_for

GOOD = "w2 w6"
BAD = f"w2 {WORD} w6"
BODY = {"model": NAME, "max_tokens": 5, "temperature": 0}
FAILED = 'layline_requests_finished_total{reason="error"}'


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    path: Path = tmp_path_factory.mktemp("poisoned")
    save_poisoned(path, talks=True)
    llm = LLM(str(path), threads=1, max_model_len=256, max_running=8)
    with service_on(llm) as service, client_on(service) as client:
        yield client


def numbers(client: Any) -> dict[str, float]:
    lines = client.get("/metrics").text.splitlines()
    rows = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in rows}


def chat(text: str) -> dict[str, Any]:
    return {**BODY, "messages": [{"role": "user", "content": text}]}


PATHS = {
    "/v1/completions": lambda text: {**BODY, "prompt": text},
    "/v1/chat/completions": chat,
}


@pytest.mark.parametrize("path", PATHS)
def test_an_answer_that_fails(poisoned: Any, path: str) -> None:
    before = numbers(poisoned).get(FAILED, 0)
    wanted = poisoned.post(path, json=PATHS[path](GOOD)).json()["choices"]
    response = poisoned.post(path, json=PATHS[path](BAD))
    assert response.status_code == 500
    error = response.json()["error"]
    assert (error["type"], error["param"], error["code"]) == (
        "server_error",
        None,
        "request_failed",
    )
    assert "no token to sample: its logits hold NaN" in error["message"]
    assert poisoned.post(path, json=PATHS[path](GOOD)).json()["choices"] == wanted
    assert numbers(poisoned)[FAILED] == before + 1
    assert poisoned.get("/health").json() == {"status": "ok"}


@pytest.mark.parametrize("path", PATHS)
def test_a_stream_that_fails(poisoned: Any, path: str) -> None:
    body = {**PATHS[path](BAD), "stream": True, "stream_options": {"include_usage": True}}
    found = events(poisoned.post(path, json=body))
    assert found[-1] != "[DONE]"
    error = found[-1]["error"]
    assert (error["type"], error["code"]) == ("server_error", "request_failed")
    assert all("error" not in event for event in found[:-1])


def test_the_client_raises_its_own_errors(poisoned: Any) -> None:
    client = sdk_on(poisoned)
    with pytest.raises(openai.InternalServerError) as caught:
        client.completions.create(model=NAME, prompt=[GOOD, BAD], max_tokens=4)
    assert caught.value.code == "request_failed"
    with pytest.raises(openai.APIError, match="no token to sample"):
        list(client.completions.create(model=NAME, prompt=BAD, max_tokens=4, stream=True))


def test_others_do_not_notice(poisoned: Any) -> None:
    body = {**BODY, "prompt": GOOD, "max_tokens": 100, "ignore_eos": True}
    wanted = poisoned.post("/v1/completions", json=body).json()["choices"]
    found: dict[int, Any] = {}

    def ask(number: int) -> None:
        prompt = BAD if number % 2 else GOOD
        response = poisoned.post("/v1/completions", json={**body, "prompt": prompt})
        found[number] = response.status_code, response.json().get("choices")

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [found[n] for n in range(0, 8, 2)] == [(200, wanted)] * 4
    assert [found[n] for n in range(1, 8, 2)] == [(500, None)] * 4
    gauges = ("requests_running", "requests_waiting", "kv_blocks_used")
    assert wait_for(lambda: all(numbers(poisoned)[f"layline_{name}"] == 0 for name in gauges))


def test_a_bug_is_told_without_what_was_sent(
    poisoned: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    feed = StopMatcher.feed

    def broken(self: StopMatcher, text: str, *arguments: Any, **keywords: Any) -> Any:
        if self._stops and self._stops[0] == "secret":
            raise KeyError("secret")
        return feed(self, text, *arguments, **keywords)

    monkeypatch.setattr(StopMatcher, "feed", broken)
    with caplog.at_level(logging.DEBUG, logger="layline"):
        body = {**BODY, "prompt": GOOD, "stop": "secret"}
        response = poisoned.post("/v1/completions", json=body)
    assert response.status_code == 500
    message = response.json()["error"]["message"]
    assert message == "the request failed: an internal error (KeyError)"
    assert "in broken" in caplog.text, "the log has the place"
    assert "cmpl-" in caplog.text
    assert "'secret'" not in caplog.text
    assert poisoned.post("/v1/completions", json={**BODY, "prompt": GOOD}).status_code == 200


def test_a_prompt_that_cannot_be_scored(poisoned: Any) -> None:
    body = {**BODY, "prompt": BAD, "echo": True, "logprobs": 1, "max_tokens": 0}
    response = poisoned.post("/v1/completions", json=body)
    assert response.status_code == 500
    assert "hold NaN" in response.json()["error"]["message"]
