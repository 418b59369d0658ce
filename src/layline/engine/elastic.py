"""Joining a world that torchrun started: rank 0 drives, and every process is one rank.

Control connections are TCP, on loopback unless the world spans machines; address and a random
token pass through torchrun's own store.
"""

from __future__ import annotations

import atexit
import contextlib
import hmac
import os
import secrets
import signal
import socket
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from ipaddress import ip_address
from time import monotonic
from typing import TYPE_CHECKING, Any

from layline.config import (
    LOOPBACK,
    EngineConfig,
    agent_store_environment,
    elastic_environment,
    threads_of_rank,
)
from layline.engine.step_times import StepTimes
from layline.errors import RunError, UsageError
from layline.topology import Topology

if TYPE_CHECKING:
    from layline.engine.remote import RemoteExecutor
    from layline.engine.supervisor import Supervisor
    from layline.engine.wire import Pipeline

JOIN_S = 300.0
"""How long processes of one world may take to come together."""
REACH_S = 15.0
"""How long to wait for a connection to what listens already."""
_GREETING_S = 5.0
_BACKLOG = 64  # Strangers must not keep ranks out.
_KEY = "layline/control"
_VERDICT_S = 2.0
_LAST_WORDS_S = 5.0
_LAST_STEP_S = 2.0


@dataclass(frozen=True)
class World:
    """This process's place among torchrun's."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str = LOOPBACK

    @property
    def leads(self) -> bool:
        """True for the process that drives the run and speaks with the user."""
        return self.rank == 0

    @property
    def spans_machines(self) -> bool:
        """True when some ranks are on another machine."""
        return self.local_size < self.size

    def check(self, topology: Topology) -> None:
        """Raise UsageError when the mesh needs another number of processes."""
        needed = topology.world_size
        if needed == self.size:
            return
        nodes = (
            "--nnodes times --nproc-per-node to be" if self.spans_machines else "--nproc-per-node"
        )
        if topology.pp > 1:
            raise UsageError(
                f"pp_processes {topology.pp} with tp {topology.tp} needs {needed} processes, but "
                f"torchrun started {self.size}; expected {nodes} {needed}"
            )
        raise UsageError(
            f"tp {topology.tp} needs {_processes(needed)}, but torchrun started {self.size}; "
            f"expected tp {self.size}, or {nodes} {needed}"
        )


def joined_world() -> World | None:
    """The world that torchrun started this process in, or None."""
    found = elastic_environment()
    return None if found is None else World(*found)


def meet(world: World) -> Any:
    """The store that all processes of the world share. Raises RunError where it is not found."""
    from torch.distributed.rendezvous import rendezvous

    place = agent_store_environment()
    try:
        if place is not None:
            # It listened before torchrun started us: where it does not any more, torch would wait.
            socket.create_connection(place, timeout=REACH_S).close()
        return next(rendezvous("env://", timeout=timedelta(seconds=JOIN_S)))[0]
    except (RuntimeError, OSError) as error:
        raise RunError(
            f"rank {world.rank} cannot reach torchrun's store at {world.address}: "
            f"{_first_line(error)}; expected a torchrun that still runs on rank 0's machine, and "
            "an address that leads there"
        ) from error


def lead(
    engine: EngineConfig,
    world: World,
    times: StepTimes | None = None,
    pipeline: Pipeline | None = None,
) -> RemoteExecutor:
    """Drive the run from rank 0, whose own part runs in a thread of this process."""
    from layline.engine.ranks import RankLink, rank_title
    from layline.engine.remote import RemoteExecutor
    from layline.engine.remote_stages import stages_of
    from layline.engine.supervisor import Supervisor
    from layline.engine.wire import Start

    topology = engine.topology()
    store = meet(world)
    control = Control(world)
    store.set(_KEY, control.invitation)
    own: list[threading.Thread] = []

    def open_ranks() -> Iterator[RankLink]:
        ours, theirs = socket.socketpair()
        own.append(_serve_in_thread(theirs, store))
        socks = {0: ours, **control.accept()}
        for rank, sock in sorted(socks.items()):
            # torchrun numbers one machine's ranks in a row, and starts all of them itself.
            sibling = 0 < rank < world.local_size
            title = rank_title(topology.at(rank), stages_of(pipeline, topology.at(rank)))
            yield RankLink(rank, title, sock, is_sibling=sibling)

    threads = threads_of_rank(engine.threads, world.local_size)
    supervisor = Supervisor(open_ranks)
    _speak_when_terminated(supervisor)
    atexit.register(_end_before_exit, supervisor, own)
    executor = RemoteExecutor(supervisor, topology, times)
    executor.start(
        [
            Start(
                engine=asdict(engine),
                rank=rank,
                host=control.host,
                meeting="",
                threads=threads,
                device=rank % world.local_size,
                local_ranks=world.local_size,
                pipeline=pipeline,
            )
            for rank in range(world.size)
        ]
    )
    return executor


def follow(world: World) -> int:
    """Be one of the other ranks until rank 0 is done. Returns the exit status it gave."""
    from layline.comm.world import close_world
    from layline.engine.wire import Connection, Hello
    from layline.engine.worker import LOST, say, serve

    store = meet(world)
    try:
        host, port, token = store.get(_KEY).decode().split()
    except (RuntimeError, OSError) as error:
        raise RunError(
            f"rank {world.rank} waited in vain for rank 0 at {world.address}, which drives the "
            f"run: {_first_line(error)}"
        ) from error
    try:
        sock = socket.create_connection((host, int(port)), timeout=REACH_S)
    except OSError as error:
        raise RunError(f"rank {world.rank} cannot reach rank 0 at {host}:{port}: {error}") from None
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    _notice_silence(sock)
    sock.sendall(f"{token} {world.rank:8}".encode())
    # On rank 0's machine it speaks for all; elsewhere one rank of each machine does.
    words = ""
    if world.local_rank == 0:
        words = (
            f"rank {world.rank} is done: rank 0 at {host}, which drives the run, has ended it or "
            "cannot be reached"
        )
    status = serve(
        Connection(sock),
        Hello(world.rank, os.getpid()),
        owns_process=True,
        store=store,
        last_words=words,
    )
    if status == LOST:
        say(words)
    close_world()
    return status


def _notice_silence(sock: socket.socket) -> None:
    """Let a connection end when the other machine no longer takes the heartbeats it is sent."""
    from layline.engine.ranks import Limits

    option = getattr(socket, "TCP_USER_TIMEOUT", None)
    if option is not None:
        sock.setsockopt(socket.IPPROTO_TCP, option, int(Limits().silence * 1000))


class Control:
    """Rank 0's listening socket, and who may connect to it.

    Raises UsageError where MASTER_ADDR is no address at which other machines could reach it.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._token = secrets.token_hex(16)
        self._listener = _listen(world)
        self.host, port = self._listener.getsockname()[:2]
        self.invitation = f"{self.host} {port} {self._token}"

    def accept(self) -> dict[int, socket.socket]:
        """The connections of all other ranks, by rank. Raises RunError when one does not come."""
        found: dict[int, socket.socket] = {}
        deadline = monotonic() + JOIN_S
        with self._listener:
            while len(found) < self._world.size - 1:
                left = deadline - monotonic()
                self._listener.settimeout(max(left, 0.01))
                try:
                    sock = self._listener.accept()[0]
                except TimeoutError:
                    missing = sorted(set(range(1, self._world.size)) - set(found))
                    raise RunError(f"ranks {missing} did not join within {JOIN_S:g} s") from None
                rank = self._greeting(sock)
                if rank is None or rank in found:
                    sock.close()
                    continue
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                found[rank] = sock
        return found

    def _greeting(self, sock: socket.socket) -> int | None:
        """The rank of whoever connected, or None for a stranger."""
        expected = len(self._token) + 9
        sock.settimeout(_GREETING_S)
        data = b""
        with contextlib.suppress(OSError):
            while len(data) < expected:
                more = sock.recv(expected - len(data))
                if not more:
                    break
                data += more
        token, _, rank = data.decode("ascii", errors="replace").partition(" ")
        known = hmac.compare_digest(token.encode(), self._token.encode())
        if not known or not rank.strip().isdecimal() or not 0 < int(rank) < self._world.size:
            return None
        return int(rank)


def _listen(world: World) -> socket.socket:
    name = world.address if world.spans_machines else LOOPBACK
    expected = "expected an address of rank 0's machine on the network, as torchrun --master-addr"
    try:
        family, _, _, _, place = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)[0]
        address = str(place[0])
        # A number is the same to all, so they are on one machine; a name can mean different ones.
        if name not in (address, "localhost") and ip_address(address).is_loopback:
            raise UsageError(f"MASTER_ADDR {name!r} is {address} on its own machine; {expected}")
        return socket.create_server((address, 0), family=family, backlog=_BACKLOG + world.size)
    except OSError as error:
        raise UsageError(
            f"rank 0 cannot listen at MASTER_ADDR {name!r}: {error.strerror}; {expected}"
        ) from None


def _speak_when_terminated(supervisor: Supervisor) -> None:
    """Let SIGTERM raise the run's failure in the main thread, where there is one.

    As soon as one rank ends, torchrun terminates all: before this process could name the rank.
    Without a failure, and to a program that has a handler of its own, the signal is what it was.
    """

    def handle(*_: object) -> None:
        # torchrun sends it once, and then waits long.
        timer = threading.Timer(_VERDICT_S + _LAST_WORDS_S, os._exit, (RunError.exit_status,))
        timer.daemon = True
        timer.start()
        if not supervisor.await_failure(_VERDICT_S):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTERM)

    main = threading.current_thread() is threading.main_thread()
    if main and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, handle)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _end_before_exit(supervisor: Supervisor, own: list[threading.Thread]) -> None:
    """Wait for this process's own rank: what comes out of torch during the exit aborts it."""
    supervisor.close()
    for thread in own:
        thread.join(_LAST_STEP_S)


def _processes(count: int) -> str:
    return f"{count} process{'' if count == 1 else 'es'}"


def _serve_in_thread(sock: socket.socket, store: Any) -> threading.Thread:
    from layline.comm.world import close_world
    from layline.engine.wire import Connection, Hello
    from layline.engine.worker import serve

    def run() -> None:
        with sock:
            serve(Connection(sock), Hello(0), owns_process=False, store=store)
            close_world()

    thread = threading.Thread(target=run, name="layline-rank-0", daemon=True)
    thread.start()
    return thread
