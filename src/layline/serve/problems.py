"""Errors as OpenAI's clients read them: a status, and message, type, param and code."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response

from layline.errors import (
    LaylineError,
    OverloadedError,
    RequestError,
    SamplingError,
    StoppingError,
    UsageError,
)

INVALID = "invalid_request_error"
SERVER = "server_error"
RETRY_S = "1"
LOG = logging.getLogger("layline.serve")


class ApiError(Exception):
    """An answer that is an error. ``kind`` is the body's ``type``."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The JSON object of the answer."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> Response:
        """The whole answer."""
        return Response(
            msgspec.json.encode(self.body()),
            status_code=self.status,
            headers=self.headers,
            media_type="application/json",
        )


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A request that asks for something it cannot have: status 400."""
    return ApiError(400, message, param=param, code=code)


def as_api_error(
    error: LaylineError, param: str | None = None, log_as: str = "a request"
) -> ApiError:
    """What a caller is told of an error of the engine's; ``param`` is what it is about.

    A request that failed by itself is logged as ``log_as``, with places in the code but without
    anything that was sent.
    """
    message = str(error)
    if isinstance(error, RequestError):
        notes = getattr(error, "__notes__", [])
        LOG.error("%s failed: %s", log_as, "\n".join([message, *notes]))
        return ApiError(500, message, kind=SERVER, code="request_failed")
    if isinstance(error, SamplingError):
        return invalid(message, message.split(" ", 1)[0], "invalid_value")
    if isinstance(error, UsageError):
        return invalid(message, param, "invalid_value")
    headers = {"Retry-After": RETRY_S}
    if isinstance(error, OverloadedError):
        return ApiError(429, message, kind="requests", code="overloaded", headers=headers)
    if isinstance(error, StoppingError):
        return ApiError(503, message, kind=SERVER, code="stopping", headers=headers)
    return ApiError(503, message, kind=SERVER, code="engine_failed")
