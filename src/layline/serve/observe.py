"""Around every request: its id, a line in the log without its content, counts, and a last net."""

from __future__ import annotations

import logging
import re
import secrets
import traceback
from collections import Counter
from time import perf_counter
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from layline.serve.problems import SERVER, ApiError

LOG = logging.getLogger("layline.serve")
CLOSED_BY_CLIENT = 499
"""What the log and the counts say of a request whose client left before an answer."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_METHODS = frozenset({"GET", "HEAD", "POST", "OPTIONS", "PUT", "PATCH", "DELETE"})
QUIET = frozenset({"/health", "/metrics", "/status.json"})
"""What is asked for again and again: logged at debug only."""
_SHOWN = 100


class Observed:
    """The outermost layer of the application. ``paths`` are the known ones, for bounded counts."""

    def __init__(self, app: ASGIApp, paths: frozenset[str]) -> None:
        self._app = app
        self._paths = paths
        self.requests: Counter[tuple[str, str, int]] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        status = 0
        begin = perf_counter()

        async def observed_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        scope.setdefault("state", {})["request_id"] = request_id
        try:
            await self._app(scope, receive, observed_send)
        except Exception as error:
            _log_failure(error, request_id)
            if status == 0:
                await surprise(request_id).response()(scope, receive, observed_send)
        finally:
            self._note(scope, status or CLOSED_BY_CLIENT, request_id, perf_counter() - begin)

    def _note(self, scope: Scope, status: int, request_id: str, seconds: float) -> None:
        method = scope["method"] if scope["method"] in _METHODS else "other"
        path = scope["path"] if scope["path"] in self._paths else "other"
        self.requests[method, path, status] += 1
        account = scope["state"].get("account")
        level = logging.DEBUG if path in QUIET else logging.INFO
        shown = scope["path"][:_SHOWN].encode("unicode_escape").decode()
        LOG.log(
            level,
            "%s %s %d in %.0f ms",
            method,
            shown,
            status,
            seconds * 1000,
            extra={
                "fields": {
                    "request_id": request_id,
                    "key": account.name if account else None,
                    "method": method,
                    "path": shown,
                    "status": status,
                    "ms": round(seconds * 1000, 1),
                }
            },
        )


def surprise(request_id: str) -> ApiError:
    """The answer to a failure that nobody expected; the log has more under the same id."""
    return ApiError(500, f"internal error; request {request_id}", kind=SERVER)


def _request_id(scope: Scope) -> str:
    headers: Any = scope["headers"]
    for name, value in headers:
        if name == b"x-request-id":
            given = value.decode("latin-1")
            if _REQUEST_ID.fullmatch(given):
                return str(given)
    return f"req_{secrets.token_hex(12)}"


def _log_failure(error: Exception, request_id: str) -> None:
    """Where it failed, without the error's text, which can hold what a client sent."""
    places = "".join(traceback.format_tb(error.__traceback__))
    LOG.error(
        "request %s failed: %s\n%s",
        request_id,
        type(error).__name__,
        places,
        extra={"fields": {"request_id": request_id, "error": type(error).__name__}},
    )
