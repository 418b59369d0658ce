"""The server's process: its socket, its signals, and how it ends.

One signal drains: nothing new is accepted, what runs may finish. A second ends at once. When the
engine fails, open answers get the error, /health says so for a few seconds, and the status is 3.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn
from starlette.types import ASGIApp

from layline.engine.async_engine import AsyncEngine
from layline.errors import LaylineError, UsageError
from layline.serve.logs import tell_notes
from layline.serve.protocol import patient_for
from layline.serve.settings import ServeSettings

LOG = logging.getLogger("layline.serve")
SIGNALS = (signal.SIGTERM, signal.SIGINT)
HEAD_LIMIT = 32 << 10
KEEP_ALIVE_S = 75
GRACE_S = 5
BACKLOG = 2048


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address, not yet listening. Raises UsageError with what to do."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise _no_address(host, error) from None
    family, kind, protocol, _, address = found[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise _cannot_listen(host, port, error) from None
    return sock


def listen(sock: socket.socket, host: str, port: int) -> None:
    """Begin to accept. Raises UsageError when somebody else does by now."""
    try:
        sock.listen(BACKLOG)
    except OSError as error:
        raise _cannot_listen(host, port, error) from None


def url_of(sock: socket.socket) -> str:
    """Where a client finds the server."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _no_address(host: str, error: OSError) -> UsageError:
    return UsageError(
        f"--host {host!r} is no address of this machine ({error.strerror or error}); expected one "
        "such as 127.0.0.1"
    )


def _cannot_listen(host: str, port: int, error: OSError) -> UsageError:
    if error.errno == errno.EADDRNOTAVAIL:
        return _no_address(host, error)
    return UsageError(
        f"--port {port} on {host} cannot be listened on: {(error.strerror or str(error)).lower()}; "
        f"expected a free port{' from 1024' if error.errno == errno.EACCES else ''}, or 0 for any"
    )


class Server(uvicorn.Server):
    """uvicorn's server without its signal handlers, saying when it accepts."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to Serving."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept, then say so."""
        await super().startup(sockets)
        if self.started:
            self._on_ready()


class Serving:
    """One run of the server."""

    def __init__(self, app: ASGIApp, settings: ServeSettings, on_ready: Callable[[], None]) -> None:
        config = uvicorn.Config(
            app,
            http=patient_for(settings.header_timeout_s),
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=int(settings.drain_timeout_s) + GRACE_S,
            h11_max_incomplete_event_size=HEAD_LIMIT,
        )
        self._server = Server(config, on_ready)
        self._settings = settings
        self._status = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._engine: AsyncEngine | None = None

    def run(self, engine: AsyncEngine, sock: socket.socket) -> int:
        """Serve until told to stop; the exit status."""
        self._engine = engine
        return asyncio.run(self._run(sock))

    def engine_failed(self, error: LaylineError) -> None:
        """Say so for a while and end; from any thread."""
        LOG.error("the engine failed: %s", error)
        tell_notes(error)
        self._status = 3
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._start, self._linger())

    async def _run(self, sock: socket.socket) -> int:
        assert self._engine is not None
        self._loop = asyncio.get_running_loop()
        for number in SIGNALS:
            self._loop.add_signal_handler(number, self._stop, number)
        if self._engine.failure is not None:
            self._start(self._linger())
        await self._server.serve([sock])
        return self._status

    def _stop(self, number: signal.Signals) -> None:
        if self._server.should_exit:
            # The ranks end with this process, whose death they are told of by the system.
            os._exit(128 + number)
        LOG.info(
            "%s: stopping; open requests have %g s", number.name, self._settings.drain_timeout_s
        )
        self._server.should_exit = True
        self._start(self._drain())

    async def _drain(self) -> None:
        assert self._engine is not None
        if not await self._engine.drain(self._settings.drain_timeout_s):
            LOG.warning("some answers were ended unfinished")

    async def _linger(self) -> None:
        await asyncio.sleep(self._settings.linger_s)
        self._server.should_exit = True

    def _start(self, work: object) -> None:
        task = asyncio.ensure_future(work)  # type: ignore[call-overload]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
