"""/v1/embeddings through OpenAI's client, against transformers."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch

from layline import LLM
from support.embedding import END, reference, save_embedder, unit
from support.serving import NAME, Server, client_on, sdk_on, service_on, serving

TEXTS = {"w2 w6": [5, 9, END], "w4": [7, END], "w100 " * 20: [103] * 20 + [END]}


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("embedder")
    return path, save_embedder(path)


@pytest.fixture(scope="module")
def embedding_client(embedder: tuple[Path, Any]) -> Iterator[Any]:
    llm = LLM(str(embedder[0]), threads=1, prefill_tokens=16)
    with service_on(llm, max_waiting=8) as service, client_on(service) as client:
        yield client


@pytest.fixture(scope="module")
def embeddings(embedding_client: Any) -> Any:
    return sdk_on(embedding_client).embeddings


def check(model: Any, found: Any, prompts: list[list[int]], dimensions: int = 48) -> None:
    assert [one.index for one in found.data] == list(range(len(prompts)))
    for one, ids in zip(found.data, prompts, strict=True):
        wanted = unit(reference(model, ids)[:dimensions])
        torch.testing.assert_close(torch.tensor(one.embedding), wanted, atol=2e-5, rtol=1e-4)
    tokens = sum(map(len, prompts))
    assert (found.usage.prompt_tokens, found.usage.total_tokens) == (tokens, tokens)
    assert (found.object, found.model) == ("list", NAME)


@pytest.mark.parametrize("form", [{}, {"encoding_format": "float"}], ids=["base64", "float"])
def test_every_form_of_input(embeddings: Any, embedder: Any, form: dict[str, Any]) -> None:
    texts, ids = list(TEXTS), list(TEXTS.values())
    for asked, prompts in (
        (texts[0], ids[:1]),
        (texts, ids),
        (ids[2], ids[2:]),
        (ids, ids),
        ([[5] * 64], [[5] * 64]),
    ):
        check(embedder[1], embeddings.create(model=NAME, input=asked, **form), prompts)


def test_base64_is_little_endian_floats(embedding_client: Any) -> None:
    body = {"model": NAME, "input": "w2", "encoding_format": "base64"}
    found = embedding_client.post("/v1/embeddings", json=body).json()["data"][0]["embedding"]
    vector = np.frombuffer(base64.b64decode(found), dtype="<f4")
    body["encoding_format"] = "float"
    plain = embedding_client.post("/v1/embeddings", json=body).json()["data"][0]["embedding"]
    assert vector.tolist() == plain


def test_dimensions(embeddings: Any, embedder: Any) -> None:
    found = embeddings.create(model=NAME, input=list(TEXTS), dimensions=10)
    check(embedder[1], found, list(TEXTS.values()), 10)


def test_more_texts_than_may_wait(embeddings: Any, embedder: Any) -> None:
    prompts = [[5 + n, 9] for n in range(50)]
    check(embedder[1], embeddings.create(model=NAME, input=prompts), prompts)


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"input": ""}, "input", None),
        ({"input": ["w1", ""]}, "input", None),
        ({"input": []}, "input", "invalid_type"),
        ({"input": [[]]}, "input", None),
        ({"input": [5, "w1"]}, "input", "invalid_type"),
        ({"input": [5, 9999]}, "input", "invalid_value"),
        ({"input": [5] * 65}, "input", "context_length_exceeded"),
        ({"input": ["w1"] * 2049}, "input", "invalid_value"),
        ({"input": 7}, "input", "invalid_type"),
        ({"dimensions": 0}, "dimensions", "invalid_type"),
        ({"dimensions": 49}, "dimensions", "invalid_value"),
        ({"encoding_format": "hex"}, "encoding_format", "invalid_type"),
        ({"frobnicate": 1}, "frobnicate", "unknown_parameter"),
    ],
)
def test_what_is_wrong_is_named(
    embedding_client: Any, fields: dict[str, Any], param: str, code: str | None
) -> None:
    body = {"model": NAME, "input": "w1", **fields}
    response = embedding_client.post("/v1/embeddings", json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["param"], error["code"]) == (param, code)


def test_such_a_model_generates_nothing(embedding_client: Any) -> None:
    client = sdk_on(embedding_client)
    messages = [{"role": "user", "content": "w1"}]
    for work in (
        lambda: client.chat.completions.create(model=NAME, messages=messages),
        lambda: client.completions.create(model=NAME, prompt="w1"),
        lambda: client.completions.create(model=NAME, prompt="w1", max_tokens=0, echo=True),
    ):
        with pytest.raises(openai.BadRequestError, match="use /v1/embeddings") as caught:
            work()
        assert (caught.value.param, caught.value.code) == ("model", "model_not_supported")
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="text-embedding-3-small", input="x")
    assert [model.id for model in client.models.list()] == [NAME]


def test_the_other_way_round(sdk: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="makes no embeddings") as caught:
        sdk.embeddings.create(model=NAME, input="x")
    assert (caught.value.param, caught.value.code) == ("model", "model_not_supported")


def test_a_served_model_of_two_ranks(embedder: tuple[Path, Any], tmp_path: Path) -> None:
    flags = ("--served-model-name", NAME, "--threads", "1", "--tp", "2")
    with serving(embedder[0], tmp_path, *flags) as server:
        found = asked(server).embeddings.create(model=NAME, input=list(TEXTS))
        check(embedder[1], found, list(TEXTS.values()))
        assert server.stop() == 0


def asked(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)
