"""A rank without a model, run by path: ``fake_rank.py BEHAVIOUR RANK DESCRIPTOR PARENT``.

Answers every row of a step with the step's number, and does what BEHAVIOUR says once it is told to
run a step (or, for ``load:...``, to load; for ``early:...``, before its first word): die, stop, be
quiet for a while, talk nonsense, hang, or fail with the name of an error; to refuse is to have
no token for the first row.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time

from layline.engine import wire
from layline.engine.worker import Heart, die_with


def misbehave(connection: wire.Connection, behaviour: str) -> None:
    name, _, argument = behaviour.partition(":")
    if name == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    elif name == "exit":
        print("last words of the rank", flush=True)
        os._exit(int(argument))
    elif name == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif name == "quiet":
        time.sleep(float(argument))
    elif name == "garbage":
        connection.socket.sendall(b"GET / HTTP/1.1\r\n\r\n")
    elif name == "hang":
        time.sleep(600)
    elif name == "raise":
        connection.send(wire.Failed(argument, f"what {argument} says", "traceback"))
        time.sleep(600)


def main() -> None:
    behaviour, rank, descriptor, parent = sys.argv[1], *map(int, sys.argv[2:])
    die_with(parent)
    connection = wire.Connection(socket.socket(fileno=descriptor))
    if behaviour.startswith("early:"):
        misbehave(connection, behaviour.removeprefix("early:"))
    Heart(connection, owns_process=True).start()
    connection.send(wire.Hello(rank))
    while True:
        message = connection.receive()
        if message is None or isinstance(message, wire.Stop):
            os._exit(0 if message is None else message.status)
        if isinstance(message, wire.Start):
            if behaviour.startswith("load:"):
                misbehave(connection, behaviour.removeprefix("load:"))
            connection.send(wire.Loaded(40 + rank, 1000))
        elif isinstance(message, wire.Bind):
            connection.send(wire.Bound(message.num_blocks * 10))
        elif isinstance(message, wire.Ask):
            connection.send(wire.Memory(100 + rank))
        elif isinstance(message, wire.Step):
            if behaviour == "slow":
                time.sleep(0.3)
            misbehave(connection, behaviour)
            ids = [message.number for part in message.rows for _ in part]
            failed = [(0, "no token", "a place")] if behaviour == "refuse" else []
            connection.send(wire.Tokens(message.number, ids, [None] * len(ids), failed=failed))


if __name__ == "__main__":
    main()
