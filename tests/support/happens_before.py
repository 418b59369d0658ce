"""A race checker: vector clocks over streams and the host, fed by what streams record.

What the host issues, in which order, decides what happens before what; timing has no part in it.
Two accesses to one buffer, at least one of them a write, must be ordered. Declared accesses count
where they were issued. Beside them, tensors of buffers that were announced are watched while tasks
run, so that an access which nobody declared counts too.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from layline.pipeline.access import Buffer, Operation

HOST = "the host"
Clock = dict[str, int]


@dataclass(frozen=True)
class Access:
    """One access, with the clock of its task: how far it has seen every stream."""

    stream: str
    tick: int
    clock: Clock
    writes: bool
    label: str

    def after(self, other: Access) -> bool:
        return self.clock.get(other.stream, 0) >= other.tick

    def __str__(self) -> str:
        return f"{'write' if self.writes else 'read'} by {self.label!r} on {self.stream}"


class HappensBefore:
    """An AccessRecorder. ``races`` and ``undeclared`` are lines for people; ``check`` raises them.

    With ``watched`` every torch operation in a task is looked at, which is slow.
    """

    def __init__(self, *, watched: bool = True) -> None:
        self.races: list[str] = []
        self.undeclared: list[str] = []
        self.remote_reads: list[str] = []
        self.num_accesses = 0
        self._watched = watched
        self._lock = threading.RLock()
        self._clocks: dict[str, Clock] = {HOST: {}}
        self._records: dict[object, Clock] = {}
        self._of_operation: dict[Operation, tuple[int, Clock]] = {}
        self._accesses: dict[Buffer, dict[tuple[str, int, bool], Access]] = {}
        # The storage keeps its address from being given away again.
        self._memory: dict[int, tuple[Buffer, Any]] = {}

    def check(self) -> None:
        """Raise AssertionError for everything that was found."""
        found = [*self.races, *self.undeclared]
        assert not found, f"{len(found)} found, first of all: {'; '.join(found[:5])}"

    def allocated(self, buffer: Buffer, tensor: Any) -> None:
        with self._lock:
            storage = tensor.untyped_storage()
            self._memory[storage.data_ptr()] = (buffer, storage)

    def issued(self, operation: Operation) -> None:
        with self._lock:
            clock = self._clocks.setdefault(operation.stream, {})
            _join(clock, self._clocks[HOST])
            tick = clock[operation.stream] = clock.get(operation.stream, 0) + 1
            self._of_operation[operation] = (tick, dict(clock))
            for buffer in operation.reads:
                self._add(operation, buffer, writes=False)
            for buffer in operation.writes:
                self._add(operation, buffer, writes=True)
            self.remote_reads += [
                f"{operation.label!r} on {operation.device} reads {buffer.name} on {buffer.device}"
                for buffer in operation.remote_reads
            ]

    def recorded(self, stream: str, event: object) -> None:
        with self._lock:
            clock = self._clocks.setdefault(stream, {})
            _join(clock, self._clocks[HOST])
            self._records[event] = dict(clock)

    def waited(self, stream: str, event: object) -> None:
        with self._lock:
            _join(self._clocks.setdefault(stream, {}), self._records.get(event, {}))

    def host_waited(self, *, stream: str | None = None, event: object | None = None) -> None:
        with self._lock:
            if stream is not None:
                _join(self._clocks[HOST], self._clocks.get(stream, {}))
            if event is not None:
                _join(self._clocks[HOST], self._records.get(event, {}))

    def touched(self, operation: Operation | None, buffer: Buffer) -> None:
        with self._lock:
            self._add(operation, buffer, writes=False)

    def held_up(self, stream: str, event: str, since: float) -> None:
        pass

    @contextlib.contextmanager
    def running(self, operation: Operation) -> Iterator[None]:
        with _Watch(self, operation) if self._watched else contextlib.nullcontext():
            yield

    def watched_access(self, operation: Operation, address: int, *, writes: bool) -> None:
        """A torch operation of a running task reads or writes memory at ``address``."""
        with self._lock:
            if address not in self._memory:
                return
            buffer, _ = self._memory[address]
            declared = operation.writes if writes else (*operation.reads, *operation.writes)
            if buffer not in declared:
                kind = "writes" if writes else "reads"
                line = f"{operation.label!r} {kind} {buffer.name} and does not say so"
                if line not in self.undeclared:
                    self.undeclared.append(line)
                self._add(operation, buffer, writes=writes)

    def _add(self, operation: Operation | None, buffer: Buffer, *, writes: bool) -> None:
        access = self._access(operation, writes)
        self.num_accesses += 1
        others = self._accesses.setdefault(buffer, {})
        for other in others.values():
            # Either may have been noted first: results are read while tasks run.
            ordered = other.stream == access.stream or access.after(other) or other.after(access)
            if (other.writes or writes) and not ordered:
                self.races.append(f"{buffer.name}: {other} and {access} are not ordered")
        others[access.stream, access.tick, writes] = access

    def _access(self, operation: Operation | None, writes: bool) -> Access:
        if operation is None:
            clock = self._clocks[HOST]
            clock[HOST] = clock.get(HOST, 0) + 1
            return Access(HOST, clock[HOST], dict(clock), writes, "the host")
        tick, clock = self._of_operation[operation]
        return Access(operation.stream, tick, clock, writes, operation.label)


class _Watch(TorchDispatchMode):
    """Tells the checker which memory each torch operation of one task touches."""

    def __init__(self, checker: HappensBefore, operation: Operation) -> None:
        super().__init__()
        self._checker = checker
        self._operation = operation

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        names = func._schema.arguments
        for argument, value in [
            *zip(names, args, strict=False),
            *((a, kwargs[a.name]) for a in names if kwargs and a.name in kwargs),
        ]:
            alias = argument.alias_info
            is_view = alias is not None and not alias.is_write
            if isinstance(value, torch.Tensor) and not is_view:
                self._checker.watched_access(
                    self._operation, value.untyped_storage().data_ptr(), writes=alias is not None
                )
        return func(*args, **(kwargs or {}))


def _join(clock: Clock, other: Clock) -> None:
    for stream, tick in other.items():
        if clock.get(stream, 0) < tick:
            clock[stream] = tick
