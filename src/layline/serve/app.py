"""The application: its paths, its errors, and the layers around it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from layline.serve import page
from layline.serve.accounts import Account, Accounts
from layline.serve.bodies import read_json
from layline.serve.chat import ChatAnswer
from layline.serve.completions import CompletionAnswer
from layline.serve.embeddings import EmbeddingAnswer
from layline.serve.exchange import Exchange
from layline.serve.guard import Guarded
from layline.serve.jobs import template_messages
from layline.serve.metrics import CONTENT_TYPE, Metrics
from layline.serve.observe import Observed, surprise
from layline.serve.openapi import document
from layline.serve.problems import ApiError, invalid
from layline.serve.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
)
from layline.serve.responses import Detokenized, Health, Model, ModelList, Tokenized
from layline.serve.service import Service
from layline.serve.sites import Sites

Endpoint = Callable[[Request], Awaitable[Response]]


def build_app(service: Service) -> ASGIApp:
    """The application that answers for one model."""
    endpoints = Endpoints(service)
    routes = endpoints.routes()
    starlette = Starlette(
        routes=routes,
        exception_handlers={
            ApiError: _api_error,
            HTTPException: _http_error,
            Exception: _surprise,
        },
    )
    starlette.router.redirect_slashes = False
    app: ASGIApp = Guarded(starlette, Accounts(service.settings))
    if service.settings.cors_origins:
        app = CORSMiddleware(
            app,
            allow_origins=service.settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type", "x-request-id"],
            expose_headers=["x-request-id", "retry-after"],
        )
    sites = Sites(app, service.settings)
    observed = Observed(sites, frozenset(route.path for route in routes))
    endpoints.metrics = Metrics(service, lambda: observed.requests)
    return observed


class Endpoints:
    """What answers each path."""

    metrics: Metrics

    def __init__(self, service: Service) -> None:
        self._service = service
        self._openapi = msgspec.json.encode(document(service.settings.model_name))

    def routes(self) -> list[Route]:
        """Every path and its endpoint."""
        return [
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/embeddings", self.embeddings, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/v1/models/{model:path}", self.model),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route("/health", self.health),
            Route("/metrics", self.metrics_text),
            Route("/openapi.json", self.openapi),
            Route("/status.json", self.status),
            Route("/plan.json", self.plan),
            *[Route(path, self.page_file) for path in page.FILES],
        ]

    async def chat(self, request: Request) -> Response:
        """Answers to a conversation."""
        body = await read_json(request, ChatRequest, self._service.settings)
        answer = ChatAnswer(self._service, body, account_of(request))
        return Exchange(answer.run, self._service.settings.write_timeout_s)

    async def completions(self, request: Request) -> Response:
        """Continuations of prompts."""
        body = await read_json(request, CompletionRequest, self._service.settings)
        answer = CompletionAnswer(self._service, body, account_of(request))
        return Exchange(answer.run, self._service.settings.write_timeout_s)

    async def embeddings(self, request: Request) -> Response:
        """Vectors of texts."""
        body = await read_json(request, EmbeddingRequest, self._service.settings)
        answer = EmbeddingAnswer(self._service, body, account_of(request))
        return Exchange(answer.run, self._service.settings.write_timeout_s)

    async def models(self, request: Request) -> Response:
        """All models."""
        return json_response(ModelList([self._model()]))

    async def model(self, request: Request) -> Response:
        """One model."""
        self._service.require_model(request.path_params["model"])
        return json_response(self._model())

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a text or a conversation."""
        body = await read_json(request, TokenizeRequest, self._service.settings)
        self._service.require_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise invalid("expected either 'prompt' or 'messages'", "prompt")
        if body.messages is not None:
            ids = await self._service.encode_chat(template_messages(body.messages), {})
        else:
            ids = await self._service.encode(
                body.prompt or "", "prompt", add_special=body.add_special_tokens
            )
        return json_response(Tokenized(ids, len(ids), self._service.max_model_len))

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids."""
        body = await read_json(request, DetokenizeRequest, self._service.settings)
        self._service.require_model(body.model)
        size = self._service.tokenizer.vocab_size
        for number, token_id in enumerate(body.tokens):
            if token_id >= size:
                at = f"tokens[{number}]"
                raise invalid(f"{at} is {token_id}; expected an id below {size}", at)
        text = self._service.tokenizer.decode(body.tokens, skip_special=body.skip_special_tokens)
        return json_response(Detokenized(text))

    async def health(self, request: Request) -> Response:
        """Whether requests are taken."""
        engine = self._service.engine
        if engine.failure is not None:
            return json_response(Health("failed"), 503)
        if engine.is_stopping:
            return json_response(Health("stopping"), 503)
        return json_response(Health("ok"))

    async def metrics_text(self, request: Request) -> Response:
        """Prometheus' text."""
        return Response(self.metrics.text(), headers={"content-type": CONTENT_TYPE})

    async def openapi(self, request: Request) -> Response:
        """The OpenAPI document."""
        return Response(self._openapi, media_type="application/json")

    async def status(self, request: Request) -> Response:
        """The numbers of the status page."""
        return json_response(page.numbers(self._service))

    async def plan(self, request: Request) -> Response:
        """What the status page says and draws of the model."""
        return json_response(page.plan_data(self._service))

    async def page_file(self, request: Request) -> Response:
        """A file of the status page."""
        return page.file_response(request.url.path)

    def _model(self) -> Model:
        service = self._service
        return Model(service.settings.model_name, service.created, service.max_model_len)


def account_of(request: Request) -> Account:
    """Who asks, as the guard found."""
    account: Account = request.state.account
    return account


def json_response(value: object, status: int = 200) -> Response:
    """An answer of one JSON object."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _surprise(request: Request, error: Exception) -> Response:
    """Starlette raises the error again after this, for Observed to log."""
    return surprise(request.state.request_id).response()


async def _http_error(request: Request, error: Exception) -> Response:
    """Starlette's own answers: an unknown path, or a method that a path does not have."""
    assert isinstance(error, HTTPException)
    where = f"{request.method[:20]} {request.url.path[:200]}"
    if error.status_code == 405:
        message, code = f"Not allowed to {where}", "method_not_allowed"
    else:
        message, code = f"Invalid URL ({where})", "unknown_url"
    return ApiError(error.status_code, message, code=code, headers=error.headers).response()
