"""Who is let in: every path but /health needs a key where there are keys."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from layline.serve import page
from layline.serve.accounts import Accounts, unauthorized
from layline.serve.problems import ApiError

OPEN = frozenset({"/health"})


class Guarded:
    """Puts the account of a request into its scope, or answers for the application."""

    def __init__(self, app: ASGIApp, accounts: Accounts) -> None:
        self._app = app
        self._accounts = accounts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN:
            await self._app(scope, receive, send)
            return
        account = self._accounts.of(Headers(scope=scope).get("authorization", ""))
        try:
            if account is None:
                raise unauthorized(page=scope["path"] in page.FILES)
            scope["state"]["account"] = account
            if scope["method"] == "POST":
                account.spend_request()
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)
