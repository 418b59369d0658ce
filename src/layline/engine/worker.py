"""The process of one rank: it loads its part of the model, and answers what it is sent.

As a process, ``python -m layline.engine.worker RANK DESCRIPTOR PARENT``; under torchrun inside a
process that is there already. Imports of torch happen after the heartbeat has begun.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import sys
import threading
import traceback
from typing import TYPE_CHECKING, Any

from layline.engine.replies import Replies
from layline.engine.wire import Beat, Connection, Failed, Hello, Loaded, Start, Stop, WireError

if TYPE_CHECKING:
    from layline.engine.rank import Rank

BEAT_S = 1.0
LOST = 3
"""Exit status of a rank whose driver is gone, or that cannot go on."""
_PR_SET_PDEATHSIG = 1
_HANGUP = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR


class Heart(threading.Thread):
    """Sends heartbeats, and ends the process when its driver is gone.

    A step may be stuck in a collective then, so nothing but the end of the process helps;
    ``owns_process`` False leaves that to whoever runs the rank inside a process of their own.
    ``last_words`` are said before.
    """

    def __init__(self, connection: Connection, *, owns_process: bool, last_words: str = "") -> None:
        super().__init__(name="layline-heart", daemon=True)
        self._connection = connection
        self._owns_process = owns_process
        self._last_words = last_words
        self._over = threading.Event()

    def run(self) -> None:
        """Beat until the driver is gone or :meth:`stop` is called."""
        poll = select.poll()
        poll.register(self._connection.socket, _HANGUP)
        while not self._over.is_set():
            try:
                self._connection.send(Beat())
                gone = bool(poll.poll(BEAT_S * 1000))
            except (OSError, ValueError):
                gone = True
            if gone:
                # What was sent before the end is still read: a stop carries the exit status.
                if not self._over.wait(BEAT_S) and self._owns_process:
                    say(self._last_words)
                    os._exit(LOST)
                return

    def stop(self) -> None:
        """No heartbeat any more."""
        self._over.set()


def serve(
    connection: Connection,
    hello: Hello,
    *,
    owns_process: bool,
    store: Any = None,
    last_words: str = "",
) -> int:
    """Be a rank until told to stop. Returns the exit status.

    ``last_words`` are said where the process has to end for want of its driver.
    """
    heart = Heart(connection, owns_process=owns_process, last_words=last_words)
    heart.start()
    try:
        # The driver allows it more time than a step.
        from layline.engine.rank_load import load_rank

        connection.send(hello)
        start = connection.receive()
        if start is None:
            return LOST
        if not isinstance(start, Start):
            raise WireError(f"{type(start).__name__} came first; expected Start")
        rank = load_rank(start, store)
        connection.send(Loaded(rank.model.fitting_blocks(), rank.model.weight_bytes))
        status = obey(connection, rank)
        rank.model.close()
        return status
    except Exception as error:
        report(connection, error)
        return LOST
    finally:
        heart.stop()


def obey(connection: Connection, rank: Rank) -> int:
    """Carry out messages until one says stop, or none can come any more."""
    # Where steps are only queued, the next one is queued too before the first is waited for.
    with Replies(connection, queues=rank.model.answers_later) as replies:
        while True:
            message = connection.receive()
            if message is None:
                return LOST
            if isinstance(message, Stop):
                return message.status
            reply = rank.answer(message)
            if reply is not None:
                replies.put(reply)


def report(connection: Connection, error: Exception) -> None:
    """Tell the driver why this rank cannot go on, and wait: the driver ends all of them."""
    try:
        text = "".join(traceback.format_exception(error))
        connection.send(Failed(type(error).__name__, str(error), text))
        while not isinstance(connection.receive(), Stop | None):
            pass
    except (OSError, WireError):
        return


def say(words: str) -> None:
    """A line on stderr, where there is something to say and somebody to read it."""
    if words:
        with contextlib.suppress(OSError):
            os.write(2, f"layline: {words}\n".encode())


def die_with(parent: int) -> None:
    """Have the system kill this process when its driver ends, however it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(LOST)


def main(arguments: list[str]) -> None:
    """Entry of a rank's own process."""
    rank, descriptor, parent = map(int, arguments)
    die_with(parent)
    connection = Connection(socket.socket(fileno=descriptor))
    status = serve(connection, Hello(rank), owns_process=True)
    # Without the interpreter's slow end: nothing here is worth more than the caller's time.
    os._exit(status)


if __name__ == "__main__":
    main(sys.argv[1:])
