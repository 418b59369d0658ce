"""/openapi.json, made from the types that bodies are read into and written from."""

from __future__ import annotations

from typing import Any

import msgspec

from layline import __version__
from layline.serve import requests, responses

REFERENCE = "#/components/schemas/{name}"
BODY_PROBLEMS = (400, 401, 403, 404, 408, 413, 415, 421, 429, 500, 503)
BODIES = (
    requests.ChatRequest,
    requests.CompletionRequest,
    requests.EmbeddingRequest,
    requests.TokenizeRequest,
    requests.DetokenizeRequest,
    responses.ChatCompletion,
    responses.ChatChunk,
    responses.Completion,
    responses.EmbeddingList,
    responses.ModelList,
    responses.Model,
    responses.Tokenized,
    responses.Detokenized,
    responses.Health,
    responses.ProblemBody,
)


def document(model: str) -> dict[str, Any]:
    """The whole document; the only model that requests may name is ``model``."""
    _, schemas = msgspec.json.schema_components(BODIES, ref_template=REFERENCE)
    for body in ("ChatRequest", "CompletionRequest", "EmbeddingRequest"):
        schemas[body]["properties"]["model"]["enum"] = [model]
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Layline",
            "version": __version__,
            "description": "The part of OpenAI's API that this server answers, and its own paths.",
        },
        "security": [{"key": []}, {}],
        "paths": {
            "/v1/chat/completions": _post("ChatRequest", "ChatCompletion", events="ChatChunk"),
            "/v1/completions": _post("CompletionRequest", "Completion", events="Completion"),
            "/v1/embeddings": _post("EmbeddingRequest", "EmbeddingList"),
            "/tokenize": _post("TokenizeRequest", "Tokenized"),
            "/detokenize": _post("DetokenizeRequest", "Detokenized"),
            "/v1/models": _get("ModelList"),
            "/v1/models/{model}": _model(),
            "/health": _health(),
            "/metrics": _get_text("text/plain"),
            "/": _get_text("text/html"),
        },
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _post(body: str, answer: str, events: str | None = None) -> dict[str, Any]:
    content = _content(answer)
    if events is not None:
        # Each event's data is one of these; the last is [DONE].
        content["text/event-stream"] = {
            "schema": {"type": "string", "x-event-schema": _reference(events)}
        }
    return {
        "post": {
            "requestBody": {"required": True, "content": _content(body)},
            "responses": {
                "200": {"description": "the answer", "content": content},
                **_problems(*BODY_PROBLEMS),
            },
        }
    }


def _get(answer: str) -> dict[str, Any]:
    found = {"description": "the answer", "content": _content(answer)}
    return {"get": {"responses": {"200": found, **_problems(401, 421, 500)}}}


def _get_text(media_type: str) -> dict[str, Any]:
    content = {media_type: {"schema": {"type": "string"}}}
    found = {"description": "the answer", "content": content}
    return {"get": {"responses": {"200": found, **_problems(401, 421, 500)}}}


def _model() -> dict[str, Any]:
    parameter = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
    found = _get("Model")
    found["get"]["parameters"] = [parameter]
    found["get"]["responses"].update(_problems(404))
    return found


def _health() -> dict[str, Any]:
    found = _get("Health")["get"]
    found["security"] = []
    bad = {"description": "stopping, or the engine failed", "content": _content("Health")}
    found["responses"]["503"] = bad
    return {"get": found}


def _problems(*statuses: int) -> dict[str, Any]:
    problem = {"description": "an error", "content": _content("ProblemBody")}
    return {str(status): problem for status in statuses}


def _content(name: str) -> dict[str, Any]:
    return {"application/json": {"schema": _reference(name)}}


def _reference(name: str) -> dict[str, str]:
    return {"$ref": REFERENCE.format(name=name)}
