"""A cut's wire over torch.distributed: gloo between CPU processes, NCCL between GPUs.

Every cut and direction needs process groups of its own: a link's thread uses them beside the
threads that run collectives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed

from layline.errors import TransferError
from layline.pipeline.link_header import HEADER_BYTES, pack, unpack
from layline.pipeline.payload import Layout, Payload
from layline.pipeline.process_link import LinkEnds

# Headers that may be under way on CUDA, where the host does not wait for each: a header a slot.
HEADERS_UNDER_WAY = 2
# On the CPU so many bytes of a payload come with the header: a decode's, so that one message does.
BESIDE_HEADER = 63 << 10


class TorchWire:
    """Implements process_link.Wire; see there.

    ``control`` is a gloo group of the two processes. With ``device`` a CUDA device, ``data`` is an
    NCCL group of the same two and bytes go through it, headers still through gloo: then the host
    waits for a header alone, which the other host sends without waiting for its GPU. NCCL itself
    has no timeout here; whoever waits for the stream has.
    """

    def __init__(
        self,
        ends: LinkEnds,
        control: Any,
        *,
        device: torch.device | None = None,
        data: Any = None,
        timeout_s: float = 300.0,
    ) -> None:
        self._ends = ends
        self._control = control
        self._data = data
        self._device = device or torch.device("cpu")
        self._timeout_s = timeout_s
        self._beside = BESIDE_HEADER if data is None else 0
        self._headers: deque[tuple[Any, Tensor, str]] = deque()

    def send(self, sequence: int, layout: Layout, memory: Tensor) -> None:
        """See Wire.send."""
        ends = self._ends
        what = ends.sending(sequence)
        first, body = self._letter(pack(ends.cut, sequence, layout), memory[: layout.size])
        self._headers.append((self._start(distributed.isend, first, what), first, what))
        if self._data is None:
            work = None if body is None else self._start(distributed.isend, body, what)
            self._end_headers(0)
            self._end(work, what)
            return
        self._end_headers(HEADERS_UNDER_WAY)
        if body is not None:
            distributed.send(body, ends.peer, group=self._data)

    def receive(self, sequence: int) -> Payload:
        """See Wire.receive."""
        ends = self._ends
        what = ends.receiving(sequence)
        first = torch.empty(HEADER_BYTES + self._beside, dtype=torch.uint8)
        self._end(self._start(distributed.irecv, first, what), what)
        layout = unpack(first[:HEADER_BYTES], ends.cut, sequence)
        if layout.size <= self._beside:
            body = first[HEADER_BYTES:].to(self._device)
        elif self._data is None:
            body = torch.empty(layout.size, dtype=torch.uint8)
            self._end(self._start(distributed.irecv, body, what), what)
        else:
            body = torch.empty(layout.size, dtype=torch.uint8, device=self._device)
            distributed.recv(body, ends.peer, group=self._data)
        return {part.name: part.of(body) for part in layout.parts}

    def _letter(self, header: Tensor, body: Tensor) -> tuple[Tensor, Tensor | None]:
        """The first message, always of one length, and what comes after it."""
        if self._beside == 0:
            return header, body if body.numel() else None
        first = torch.empty(HEADER_BYTES + self._beside, dtype=torch.uint8)
        first[:HEADER_BYTES] = header
        if body.numel() > self._beside:
            return first, body
        first[HEADER_BYTES : HEADER_BYTES + body.numel()] = body
        return first, None

    def _start(self, call: Callable[..., Any], tensor: Tensor, what: str) -> Any:
        try:
            return call(tensor, self._ends.peer, group=self._control)
        except (RuntimeError, ValueError) as error:
            raise self._failed(what, error) from error

    def _end(self, work: Any, what: str) -> None:
        try:
            if work is not None:
                work.wait(timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            raise self._failed(what, error) from error

    def _end_headers(self, most: int) -> None:
        while len(self._headers) > most:
            work, _, what = self._headers.popleft()
            self._end(work, what)

    def _failed(self, what: str, error: Exception) -> TransferError:
        reason = str(error).strip().partition("\n")[0]
        return TransferError(f"{what} in vain (timeout {self._timeout_s:g} s): {reason}")
