"""Requests made from the application's own OpenAPI document: none is a surprise to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from layline import LLM
from layline.serve.app import build_app
from support.embedding import save_embedder
from support.serving import service_on

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
HOSTS = ("testserver", "localhost")
PATHS = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/embeddings"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/v1/models/{model}"),
    ("GET", "/v1/models"),
    ("GET", "/health"),
    ("GET", "/metrics"),
    ("GET", "/"),
]


@pytest.fixture(scope="module")
def schema(checkpoint: tuple[Path, Any]) -> Iterator[Any]:
    # A short context: a document that allows any max_tokens asks for many.
    llm = LLM(str(checkpoint[0]), threads=1, max_model_len=24)
    with service_on(llm, allowed_hosts=HOSTS) as service:
        yield schemathesis.openapi.from_asgi("/openapi.json", build_app(service))


def test_all_of_the_document_is_tried(schema: Any) -> None:
    found = {(each.ok().method.upper(), each.ok().path) for each in schema.get_all_operations()}
    assert found == set(PATHS)


@pytest.mark.parametrize("mode", GenerationMode)
def test_embeddings_of_a_model_that_makes_them(tmp_path: Path, mode: GenerationMode) -> None:
    save_embedder(tmp_path)
    llm = LLM(str(tmp_path), threads=1, max_model_len=24)
    with service_on(llm, allowed_hosts=HOSTS) as service:
        schema = schemathesis.openapi.from_asgi("/openapi.json", build_app(service))
        assert tried(schema["/v1/embeddings"]["POST"], mode, 15)


@pytest.mark.parametrize(
    ("method", "path", "mode"),
    [
        (method, path, mode)
        for method, path in PATHS
        for mode in GenerationMode
        # What has no body has nothing that could be against the document.
        if method == "POST" or mode is GenerationMode.POSITIVE
    ],
)
def test_every_answer_is_a_documented_one(
    schema: Any, method: str, path: str, mode: GenerationMode
) -> None:
    assert tried(schema[path][method], mode, 15 if method == "POST" else 3)


def tried(operation: Any, mode: GenerationMode, times: int) -> set[int]:
    """The statuses of as many requests, whose answers are checked."""
    statuses = set()

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=times,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        derandomize=True,
        database=None,
    )
    def ask(case: Any) -> None:
        response = case.call_and_validate(checks=CHECKS)
        statuses.add(response.status_code)

    ask()
    return statuses
