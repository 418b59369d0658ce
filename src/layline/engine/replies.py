"""What a rank answers, in order, while it goes on with the next message. No torch here."""

from __future__ import annotations

import queue
import threading
import traceback
from collections.abc import Callable
from typing import Any

from layline.engine.wire import Connection, Failed


class Replies:
    """Sends replies, some of which are only known once the device is done.

    With ``queues`` a thread waits for them, so that who puts one need not; without, it is sent at
    once. A wait that fails tells the driver, which ends the rank. A context manager.
    """

    def __init__(self, connection: Connection, *, queues: bool) -> None:
        self._connection = connection
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        if queues:
            self._thread = threading.Thread(target=self._run, name="layline-replies", daemon=True)

    def __enter__(self) -> Replies:
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        # What is still queued has nobody to read it; the thread ends with the process.
        self._queue.put(None)

    def put(self, reply: Any | Callable[[], Any]) -> None:
        """Send a message, or what a function returns, after those that were put before.

        A function that returns None has nothing to say: it only waits, for an error.
        """
        if self._thread is None:
            self._send(reply)
        else:
            self._queue.put(reply)

    def _run(self) -> None:
        try:
            for reply in iter(self._queue.get, None):
                self._send(reply)
        except OSError:
            return  # The driver is gone, and the rank learns of it where it reads.
        except Exception as error:
            text = "".join(traceback.format_exception(error))
            self._connection.send(Failed(type(error).__name__, str(error), text))

    def _send(self, reply: Any) -> None:
        message = reply() if callable(reply) else reply
        if message is not None:
            self._connection.send(message)
