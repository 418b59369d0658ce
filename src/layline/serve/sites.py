"""Which hosts the server answers as, which web sites may post to it, and what browsers are told.

A web site can point a name of its own at 127.0.0.1 and then read, as that name, whatever answers
there. The browser's Host header still tells the name. What a page of another site posts carries
that site's Origin.
"""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from layline.serve.hosts import ANY, host_of, is_address, is_loopback
from layline.serve.problems import ApiError
from layline.serve.settings import ServeSettings

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
HEADERS = {
    b"x-content-type-options": b"nosniff",
    b"content-security-policy": b"default-src 'none'; frame-ancestors 'none'",
    b"x-frame-options": b"DENY",
    b"referrer-policy": b"no-referrer",
    b"cross-origin-resource-policy": b"same-origin",
    b"cache-control": b"no-store",
}
"""What every answer has, unless it has another value of its own."""
_SHOWN = 100


class Sites:
    """Answers for the application where a request's host or origin is a stranger's."""

    def __init__(self, app: ASGIApp, settings: ServeSettings) -> None:
        self._app = app
        self._is_local = settings.is_local
        self._hosts = frozenset(settings.allowed_hosts)
        self._origins = frozenset(settings.cors_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                there = {name.lower() for name, _ in message["headers"]}
                missing = [pair for pair in HEADERS.items() if pair[0] not in there]
                message["headers"] = [*message["headers"], *missing]
            await send(message)

        try:
            self._check(scope)
        except ApiError as error:
            await error.response()(scope, receive, with_headers)
            return
        await self._app(scope, receive, with_headers)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        given = headers.getlist("host")
        # Every browser sends one; what is older than the header may go without.
        if not all(self._is_ours(host) for host in given):
            raise ApiError(
                421,
                f"This server is not '{shown(given[0])}'; expected a name or address of its own "
                "machine, or one of --allowed-host",
                code="host_not_allowed",
            )
        origin = headers.get("origin")
        if origin is None or scope["method"] in SAFE_METHODS:
            return
        if not self._may_post(origin, headers.get("host", "")):
            raise ApiError(
                403,
                f"Pages of '{shown(origin)}' may not use this server; expected its own, or those "
                "of --cors-origin",
                code="origin_not_allowed",
            )

    def _is_ours(self, given: str) -> bool:
        if ANY in self._hosts or not (self._is_local or self._hosts):
            return True
        host = host_of(given)
        if host is None:
            return False
        if host in self._hosts or is_loopback(host):
            return True
        # A name can be pointed anywhere, an address cannot; but nobody calls a server that only
        # its own machine reaches by another address.
        return not self._is_local and is_address(host)

    def _may_post(self, origin: str, host: str) -> bool:
        origin = origin.lower()
        if ANY in self._origins or origin in self._origins:
            return True
        scheme, separator, authority = origin.partition("://")
        return separator != "" and scheme in ("http", "https") and authority == host.lower()


def shown(value: str) -> str:
    """What a client sent, as far as a message repeats it."""
    return value[:_SHOWN].encode("unicode_escape").decode()
