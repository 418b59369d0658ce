"""uvicorn's HTTP protocol with a limit on how long a request's head may take to arrive."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol


def patient_for(header_timeout_s: float) -> type[H11Protocol]:
    """A protocol that closes a connection whose request line and headers take longer.

    uvicorn itself waits without end for the first request of a connection and for the rest of a
    head that has begun.
    """

    class PatientProtocol(H11Protocol):
        """Closes a connection on which a head is late."""

        _late: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            """Start waiting for the first head."""
            super().connection_made(transport)
            self._await_head()

        def data_received(self, data: bytes) -> None:
            """Wait for the rest of a head, or stop waiting when it is there."""
            self._await_head()
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:
                self._stop_waiting()

        def connection_lost(self, exc: Exception | None) -> None:
            """Nothing will come any more."""
            self._stop_waiting()
            super().connection_lost(exc)

        def on_response_complete(self) -> None:
            """The time between two requests is keep-alive time, which has a limit of its own."""
            super().on_response_complete()
            self._stop_waiting()

        def _await_head(self) -> None:
            if self._late is None and (self.cycle is None or self.cycle.response_complete):
                self._late = self.loop.call_later(header_timeout_s, self._close_late)

        def _stop_waiting(self) -> None:
            if self._late is not None:
                self._late.cancel()
                self._late = None

        def _close_late(self) -> None:
            self._late = None
            if not self.transport.is_closing():
                self.transport.close()

    return PatientProtocol
