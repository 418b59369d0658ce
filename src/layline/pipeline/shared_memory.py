"""Memory that two processes of one machine share, with the waits of both ends.

Each end has a count that it alone writes. The counts are ordered with what they speak of by the
processor: x86-64 keeps the order of stores and that of loads. Elsewhere there is no such memory.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import sys
import time
import weakref
from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor

from layline.errors import TransferError
from layline.pipeline.handovers import Note, unnoted

SPIN_S = 0.02
"""How long a wait keeps its core, giving way to whoever else wants it; then it sleeps in between.

Waking a thread takes a tenth of a millisecond on a virtual machine, and a step crosses often.
"""
TOKEN_BYTES = 16
_PAGE = 4096
# Places in the first page, in words of 8 bytes; the counts are in cache lines of their own.
_PUT, _TAKEN, _SLOTS = 0, 8, 16
_TOKEN_AT = 4000
_MACHINES = ("x86_64", "AMD64")
# Through ctypes, which lets other threads have the interpreter meanwhile.
_yield_core = ctypes.CDLL(None).sched_yield if sys.platform == "linux" else None


def is_supported() -> bool:
    """Whether this machine's processes can share such memory."""
    return sys.platform == "linux" and platform.machine() in _MACHINES


class SharedMemory:
    """One end. Both map the same file, which has no name and goes with the last of them."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        # Not when it is closed: a task may still grow it. At exit the system does it.
        weakref.finalize(self, os.close, descriptor).atexit = False
        self.note: Note = unnoted
        self.waited_s = 0.0
        self.closed = False
        self._map()
        self._words = memoryview(self._mapped)[:_PAGE].cast("Q")

    @classmethod
    def create(cls, name: str, token: bytes) -> Self:
        """New memory of one page; ``token`` [TOKEN_BYTES] tells it from others."""
        descriptor = os.memfd_create(name)
        os.ftruncate(descriptor, _PAGE)
        os.pwrite(descriptor, token, _TOKEN_AT)
        return cls(descriptor)

    @classmethod
    def open(cls, process: int, descriptor: int, token: bytes) -> Self | None:
        """What ``process`` made under ``descriptor``, None where it is not to be had."""
        try:
            found = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR)
        except OSError:
            return None
        # Another process of that number may have anything there, and not all can be mapped.
        try:
            is_that = os.pread(found, TOKEN_BYTES, _TOKEN_AT) == token
        except OSError:
            is_that = False
        if is_that:
            return cls(found)
        os.close(found)
        return None

    def close(self) -> None:
        """Let waits fail. The memory goes with whoever still has tensors of it."""
        self.closed = True

    def _grow(self, size: int) -> tuple[int, int]:
        """Whole pages for ``size`` bytes behind all there is: where they begin, and their bytes."""
        start, whole = os.fstat(self.descriptor).st_size, -(-size // _PAGE) * _PAGE
        os.ftruncate(self.descriptor, start + whole)
        return start, whole

    def _at(self, start: int, size: int) -> Tensor:
        if start + size > self._memory.numel():
            self._map()
        return self._memory[start : start + size]

    def _map(self) -> None:
        # An earlier mapping lives as long as tensors and words of it do.
        self._mapped = mmap.mmap(self.descriptor, os.fstat(self.descriptor).st_size)
        self._memory: Tensor = torch.frombuffer(self._mapped, dtype=torch.uint8)

    def _wait(self, ready: Callable[[], bool], what: str, timeout_s: float) -> None:
        if ready():
            return
        assert _yield_core is not None, "such memory is not to be had here"
        begin = now = time.perf_counter()
        while not ready():
            _yield_core()
            now = time.perf_counter()
            if self.closed or now - begin > timeout_s:
                why = "closed meanwhile" if self.closed else f"timeout {timeout_s:g} s"
                raise TransferError(f"{what} in vain ({why})")
            if now - begin > SPIN_S:
                time.sleep(min(1e-3, (now - begin) / 100))
        self.waited_s += now - begin
        self.note("wait", begin, now)


class SharedSlots(SharedMemory):
    """Two slots, used in turn: payload n is put once n - 1 were taken.

    One that is too small gets new memory, and what is in it may be laid out anew: then its version
    is another, which whoever takes compares.
    """

    def await_room(self, number: int, what: str, timeout_s: float) -> None:
        """Wait until nobody reads the slot of payload ``number`` any more."""
        words = self._words
        self._wait(lambda: number - words[_TAKEN] < 2, what, timeout_s)

    def renew(self, number: int, size: int) -> Tensor:
        """The free slot of payload ``number`` (uint8 [size]), to be laid out anew."""
        words, place = self._words, _SLOTS + 3 * (number % 2)
        if words[place + 1] < size:
            words[place], words[place + 1] = self._grow(size)
        words[place + 2] += 1
        return self._at(words[place], size)

    def put(self, number: int) -> None:
        """Payload ``number`` is in its slot."""
        self._words[_PUT] = number + 1

    def arrived(self, number: int, what: str, timeout_s: float) -> int:
        """Wait for payload ``number``; the version of its slot."""
        words = self._words
        self._wait(lambda: words[_PUT] > number, what, timeout_s)
        return words[_SLOTS + 3 * (number % 2) + 2]

    def slot(self, number: int) -> Tensor:
        """The whole slot of payload ``number``, uint8."""
        place = _SLOTS + 3 * (number % 2)
        return self._at(self._words[place], self._words[place + 1])

    def taken(self, number: int) -> None:
        """Nothing of payload ``number`` is read any more."""
        self._words[_TAKEN] = number + 1


class SharedBoard(SharedMemory):
    """The latest ids that were posted, by number: nobody waits for a reader.

    ``depth`` of them are kept; who reads an older one gets an error.
    """

    def lay_out(self, depth: int, most_ids: int) -> None:
        """Make room; the end that posts does, before the other one opens."""
        slots, width = depth + 1, 1 + most_ids  # One is being written while others are read.
        start, _ = self._grow(slots * width * 8)
        for place, value in enumerate((start, slots, width), start=_SLOTS):
            self._words[place] = value

    def post(self, number: int, ids: Tensor) -> None:
        """Post ``ids`` int64 [at most most_ids] as ``number``; numbers come in order."""
        slot = self._slot(number)
        slot[1 : 1 + len(ids)] = ids
        slot[0] = len(ids)
        self._words[_PUT] = number + 1

    def read(self, number: int, what: str, timeout_s: float) -> Tensor:
        """The ids of ``number``, once they have been posted. Raises TransferError for old ones."""
        words = self._words
        self._wait(lambda: words[_PUT] > number, what, timeout_s)
        slot = self._slot(number)
        width = len(slot)
        found = slot[1 : 1 + min(int(slot[0]), width - 1)].clone()
        # The one that overwrites it may have been under way meanwhile.
        posted, slots = words[_PUT], words[_SLOTS + 1]
        if posted - number >= slots:
            kept = slots - 1
            raise TransferError(f"{what} too late: #{posted - 1} was posted, and {kept} are kept")
        return found

    def _slot(self, number: int) -> Tensor:
        start, slots, width = self._words[_SLOTS : _SLOTS + 3]
        place = start + number % slots * width * 8
        return self._at(place, width * 8).view(torch.int64)
