"""Replies that are known late: in order, without holding up who puts them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from layline.engine import wire
from layline.engine.replies import Replies
from layline.engine.wire import Connection


@pytest.fixture
def ends() -> Iterator[tuple[Connection, socket.socket]]:
    ours, theirs = socket.socketpair()
    theirs.settimeout(20)
    with ours, theirs:
        yield Connection(ours), theirs


def received(sock: socket.socket, count: int) -> list[Any]:
    reader, found = wire.from_rank_reader(), []
    while len(found) < count:
        found += reader.feed(sock.recv(1 << 16))
    return found


def test_the_next_message_is_taken_while_a_reply_is_waited_for(ends: Any) -> None:
    connection, driver = ends
    done = threading.Event()

    def late() -> wire.Tokens:
        assert done.wait(20)
        return wire.Tokens(1, [5], [None])

    with Replies(connection, queues=True) as replies:
        replies.put(late)
        replies.put(lambda: wire.Tokens(2, [6], [None]))
        replies.put(wire.Memory(7))
        driver.settimeout(0.2)
        with pytest.raises(TimeoutError):
            driver.recv(1)
        driver.settimeout(20)
        done.set()
        assert received(driver, 3) == [
            wire.Tokens(1, [5], [None]),
            wire.Tokens(2, [6], [None]),
            wire.Memory(7),
        ]


def test_without_a_queue_a_reply_is_sent_at_once(ends: Any) -> None:
    connection, driver = ends
    threads = threading.active_count()
    with Replies(connection, queues=False) as replies:
        replies.put(lambda: wire.Tokens(1, [5], [None]))
        assert received(driver, 1) == [wire.Tokens(1, [5], [None])]
        replies.put(wire.Memory(7))
        assert received(driver, 1) == [wire.Memory(7)]
        assert threading.active_count() == threads
        with pytest.raises(ZeroDivisionError):
            replies.put(lambda: 1 // 0)


def test_a_wait_that_fails_is_told(ends: Any) -> None:
    connection, driver = ends

    def broken() -> None:
        raise ValueError("planted")

    with Replies(connection, queues=True) as replies:
        replies.put(wire.Memory(7))
        replies.put(broken)
        memory, failed = received(driver, 2)
    assert memory == wire.Memory(7)
    assert (failed.error, failed.message) == ("ValueError", "planted")
    assert "broken" in failed.traceback


def test_a_driver_that_is_gone_ends_the_thread() -> None:
    ours, theirs = socket.socketpair()
    with Replies(Connection(ours), queues=True) as replies:
        theirs.close()
        for _ in range(3):
            replies.put(wire.Memory(7))
        assert replies._thread is not None
        replies._thread.join(20)
        assert not replies._thread.is_alive()
    ours.close()
