"""The driver's watch over the ranks: messages out and in, heartbeats, and the end of the run.

One thread owns every control connection. It starts the ranks, so that the system ends them should
this process die, and it alone decides that a rank has failed; callers wait for messages or for
that verdict, and so never for a rank that will not answer.
"""

from __future__ import annotations

import queue
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from time import monotonic
from typing import Any

from layline.cores import CoreKeeper
from layline.engine.ranks import Limits, RankLink, Sign
from layline.engine.wire import Beat, Failed, Hello, Stop, ToRank, WireError, frame
from layline.errors import CollectiveError, LaylineError, RunError, TransferError

_CHUNK = 1 << 18
_TICK_S = 0.25
_GRACE_S = 0.3  # For what else a failure shows: an exit status, other ranks' reports.
_PAUSE_S = 2.0  # A turn that takes longer: this process itself was stopped.


NEIGHBOURS_TOO = (CollectiveError, TransferError)
"""Errors that a rank may have because another one is gone."""


class Supervisor:
    """Ranks that run elsewhere, from their start to their end.

    ``open_ranks`` makes the links, in the watching thread. That thread and those that wait for
    ranks are placed by ``keeper``, as :meth:`collect` says.
    """

    def __init__(
        self,
        open_ranks: Callable[[], Iterable[RankLink]],
        limits: Limits | None = None,
        keeper: CoreKeeper | None = None,
    ) -> None:
        self._open_ranks = open_ranks
        self._keeper = keeper
        self._kept = False
        self._limits = limits or Limits()
        self._links: list[RankLink] = []
        self._inbox: queue.SimpleQueue[tuple[int, Any] | None] = queue.SimpleQueue()
        self._outbox: deque[tuple[int | None, bytes]] = deque()
        # By step, what ranks have answered: of those that are asked for, and of later ones.
        self._steps: dict[int, dict[int, Any]] = {}
        self._awaited_step: int | None = None
        self._failure: LaylineError | None = None
        self._is_told = False
        self._stop: Stop | None = None
        self._patience_s = 0.0
        self._noted_at = 0.0
        self._decide_at: float | None = None
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="layline-supervisor", daemon=True)
        self._thread.start()

    def post(self, message: ToRank, rank: int | None = None) -> None:
        """Send to one rank or to all. Raises the run's failure; never waits."""
        self._check()
        self._outbox.append((rank, frame(message)))
        self._wake()

    def collect(
        self,
        kinds: tuple[type, ...],
        ranks: Sequence[int],
        number: int = -1,
        *,
        kept: bool = False,
    ) -> list[Any]:
        """One message of ``kinds`` from each of ``ranks``, in that order; waits for them.

        With ``number``, those of that step; what comes of later steps is kept, also when the wait
        is interrupted, and what came of earlier ones is dropped. Raises the run's failure.

        ``kept`` has this thread wait on the keeper's own cores, where it will go on first.
        """
        self._kept = kept
        if self._keeper is None or not kept:
            return self._collect(kinds, ranks, number)
        self._keeper.keep(True)
        try:
            return self._collect(kinds, ranks, number)
        finally:
            self._keeper.keep(False)

    def _collect(self, kinds: tuple[type, ...], ranks: Sequence[int], number: int) -> list[Any]:
        found: dict[int, Any] = {}
        if number >= 0:
            self._steps = {step: kept for step, kept in self._steps.items() if step >= number}
            found = self._steps.setdefault(number, found)
        # Kept where the wait fails: the verdict tells it.
        self._awaited_step = number if number >= 0 else None
        while not all(rank in found for rank in ranks):
            item = None if self._failure is not None else self._inbox.get()
            if item is None:
                self._check()
                raise RunError("the engine is closed")
            rank, message = item
            step = getattr(message, "number", -1)
            if step >= 0:
                self._steps.setdefault(step, {})[rank] = message
            elif rank in ranks and isinstance(message, kinds):
                found[rank] = message
        self._awaited_step = None
        return [found[rank] for rank in ranks]

    @property
    def failure(self) -> LaylineError | None:
        """What the run failed with, or None."""
        return self._failure

    @property
    def is_running(self) -> bool:
        """True until the run is closed or has failed."""
        return self._failure is None and self._stop is None

    def await_failure(self, seconds: float) -> bool:
        """Give the run ``seconds`` to end; True when it has failed and a caller knows already.

        Raises the failure when none does.
        """
        self._thread.join(seconds)
        if self._failure is None:
            return False
        if not self._is_told:
            self._check()
        return True

    def close(self, status: int = 0, patience_s: float | None = None) -> None:
        """Let every rank end with ``status``, then kill those that have not; a second call waits.

        ``patience_s`` replaces the limit for ending by themselves.
        """
        if self._stop is None:
            self._patience_s = self._limits.stopping if patience_s is None else patience_s
            self._stop = Stop(status)
            self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _check(self) -> None:
        if self._failure is not None:
            if threading.current_thread() is not self._thread:
                self._thread.join()  # It ends the ranks, and has nothing to wait for.
                self._is_told = True
            # A new object: one that is raised twice collects both tracebacks.
            raise type(self._failure)(*self._failure.args) from self._failure
        if self._stop is not None:
            raise RunError("the engine is closed")

    def _wake(self) -> None:
        try:
            self._wake_writer.send(b"x")
        except OSError:
            # Full, so the thread will look; or closed, so there is none.
            return

    def _run(self) -> None:
        try:
            self._open()
            with selectors.DefaultSelector() as selector:
                selector.register(self._wake_reader, selectors.EVENT_READ)
                for link in self._links:
                    link.sock.setblocking(False)
                    selector.register(link.sock, selectors.EVENT_READ, link)
                self._watch(selector)
                self._end(selector)
        except LaylineError as error:
            self._failure = error
        except Exception as error:  # Whoever waits must learn of it, whatever it is.
            self._failure = RunError(f"the watch over the ranks failed: {error}")
            self._failure.__cause__ = error
        finally:
            for link in self._links:
                link.kill(others=self._failure is not None)
            self._wake_reader.close()
            self._wake_writer.close()
            self._inbox.put(None)

    def _open(self) -> None:
        try:
            for link in self._open_ranks():
                self._links.append(link)
        except OSError as error:
            raise RunError(f"cannot start a rank: {error}") from error

    def _watch(self, selector: selectors.BaseSelector) -> None:
        """Carry messages until the run is stopped or has failed."""
        before = monotonic()
        for link in self._links:
            link.heard_at = before
        while self._stop is None:
            if self._keeper is not None:
                self._keeper.keep(self._kept)
            self._turn(selector, _TICK_S)
            now = monotonic()
            # While this process itself was stopped, nobody could be heard.
            turn, before = now - before, now
            unheard = turn - 2 * _TICK_S if turn > _PAUSE_S else 0.0
            self._noted_at = min(now, self._noted_at + unheard)
            for link in self._links:
                link.heard_at = min(now, link.heard_at + unheard)
                if link.sign is None and link.is_silent(now, self._limits):
                    link.sign = Sign.SILENT
                    link.signed_at = self._decide_at = now
            if self._decide_at is not None and now >= self._decide_at:
                self._failure = self._verdict()
                if self._failure is not None:
                    return
                self._decide_at = now + _TICK_S

    def _turn(self, selector: selectors.BaseSelector, timeout: float) -> None:
        """Wait for something to do, then send and receive what there is."""
        for key, events in selector.select(timeout):
            link = key.data
            if link is None:
                self._drain()
                self._hand_out(selector)
            elif events & selectors.EVENT_WRITE:
                self._flush(selector, link)
            if link is not None and events & selectors.EVENT_READ:
                self._read(selector, link)

    def _drain(self) -> None:
        try:
            while self._wake_reader.recv(4096):
                pass
        except BlockingIOError:
            return

    def _hand_out(self, selector: selectors.BaseSelector) -> None:
        while self._outbox:
            rank, data = self._outbox.popleft()
            for link in self._links if rank is None else [self._links[rank]]:
                link.outgoing += data
        for link in self._links:
            self._flush(selector, link)

    def _flush(self, selector: selectors.BaseSelector, link: RankLink) -> None:
        if link.closed or not link.outgoing:
            return
        try:
            sent = link.sock.send(link.outgoing)
            del link.outgoing[:sent]
        except BlockingIOError:
            pass
        except OSError:
            link.outgoing.clear()  # Reading will tell that the rank is gone.
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.outgoing else 0)
        selector.modify(link.sock, wanted, link)

    def _read(self, selector: selectors.BaseSelector, link: RankLink) -> None:
        try:
            data = link.sock.recv(_CHUNK)
            messages = link.reader.feed(data)
        except BlockingIOError:
            return
        except OSError:
            data, messages = b"", []
        except WireError as error:
            self._note(link, Sign.GARBLED, str(error))
            selector.unregister(link.sock)
            link.closed = True
            return
        link.heard_at = monotonic()
        for message in messages:
            self._take(link, message)
        if not data:
            selector.unregister(link.sock)
            link.closed = True
            self._note(link, Sign.ENDED)

    def _take(self, link: RankLink, message: Any) -> None:
        if isinstance(message, Beat):
            return
        if isinstance(message, Hello):
            link.greeted = True
            link.pid = message.pid or link.pid
        elif isinstance(message, Failed):
            link.report = message
            self._note(link, Sign.REPORTED)
        else:
            self._inbox.put((link.rank, message))

    def _note(self, link: RankLink, sign: Sign, detail: str = "") -> None:
        if link.sign is None or link.sign is Sign.SILENT:
            link.sign = sign
            link.detail = detail
            link.signed_at = monotonic()
        if self._decide_at is None:
            self._noted_at = monotonic()
            self._decide_at = self._noted_at + _GRACE_S

    def _verdict(self) -> LaylineError | None:
        """The error to end with, or None to wait.

        What ranks do together also fails because another rank is gone, so an error of that kind
        counts once every other rank has been heard again.
        """
        signs: dict[Sign, list[RankLink]] = {}
        # One that ends can bring others down, so the first is the cause.
        for link in sorted(self._links, key=lambda link: link.signed_at):
            if link.sign is not None:
                signs.setdefault(link.sign, []).append(link)
        reports = [(link, link.reported()) for link in signs.get(Sign.REPORTED, [])]
        for _, error in reports:
            if isinstance(error, LaylineError) and not isinstance(error, NEIGHBOURS_TOO):
                return error
        for sign in (Sign.SILENT, Sign.GARBLED, Sign.ENDED):
            for link in signs.get(sign, []):
                return link.gone(self._awaited_step)
        if any(link.sign is None and link.heard_at <= self._noted_at for link in self._links):
            return None
        link, error = reports[0]
        failure = RunError(f"{link.title} failed: {error}")
        failure.__cause__ = error
        return failure

    def _end(self, selector: selectors.BaseSelector) -> None:
        """After a stop: wait for the ranks to end by themselves, within the limit."""
        if self._failure is not None or self._stop is None:
            return
        self._outbox.append((None, frame(self._stop)))
        self._hand_out(selector)
        deadline = monotonic() + self._patience_s
        while monotonic() < deadline and not all(link.ended() for link in self._links):
            self._turn(selector, 0.02)
