"""Answers that take a while: sent as they are made, given up when the client has gone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

Work = Callable[["Reply"], Awaitable[None]]

STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    # Proxies of one kind gather a stream into blocks unless told not to.
    "x-accel-buffering": "no",
}


class Reply:
    """How an endpoint answers: one JSON object, or events that end with ``[DONE]``."""

    def __init__(self, send: Send, write_timeout_s: float) -> None:
        self._send = send
        self._write_timeout_s = write_timeout_s

    async def json(self, value: object) -> None:
        """The whole answer."""
        body = msgspec.json.encode(value)
        headers = {"content-type": "application/json", "content-length": str(len(body))}
        await self._start(headers)
        await self._body(body, more=False)

    async def start_events(self) -> None:
        """Begin a stream; from here on an error is an event."""
        await self._start(STREAM_HEADERS)

    async def event(self, value: object) -> None:
        """One event of the stream."""
        await self._body(b"data: " + msgspec.json.encode(value) + b"\n\n", more=True)

    async def end_events(self, *, done: bool = True) -> None:
        """End the stream."""
        await self._body(b"data: [DONE]\n\n" if done else b"", more=False)

    async def _start(self, headers: dict[str, str]) -> None:
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": 200, "headers": raw})

    async def _body(self, body: bytes, *, more: bool) -> None:
        # A client that does not read must not hold its answer for ever.
        async with asyncio.timeout(self._write_timeout_s):
            await self._send({"type": "http.response.body", "body": body, "more_body": more})


class Exchange(Response):
    """Runs ``work`` to its end, or until the client disconnects, whichever is first."""

    def __init__(self, work: Work, write_timeout_s: float) -> None:
        super().__init__()
        self._work = work
        self._write_timeout_s = write_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        working = asyncio.ensure_future(self._work(Reply(send, self._write_timeout_s)))
        leaving = asyncio.ensure_future(disconnected(receive))
        try:
            await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
        finally:
            await _cancelled(leaving)
            await _cancelled(working)


async def disconnected(receive: Receive) -> None:
    """Return when the client has gone; the body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancelled(task: asyncio.Future[None]) -> None:
    """Cancel a task and wait for its end; a task that is done is left as it is."""
    if task.done():
        return
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
