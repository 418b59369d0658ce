"""A cut's wire over torch.distributed: gloo between CPU processes, NCCL between GPUs.

Every cut and direction needs process groups of its own: a link's thread uses them beside the
threads that run collectives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed

from layline.errors import TransferError
from layline.pipeline.link_header import HEADER_BYTES, pack, unpack
from layline.pipeline.payload import Layout, Payload

# Headers that may be under way on CUDA, where the host does not wait for each: a header a slot.
HEADERS_UNDER_WAY = 2


@dataclass(frozen=True)
class LinkEnds:
    """Who speaks: the cut's name, the stages, and the global rank of the other process."""

    cut: str
    from_stage: int
    to_stage: int
    peer: int


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
        self._headers: deque[tuple[Any, Tensor, str]] = deque()

    def send(self, sequence: int, layout: Layout, memory: Tensor) -> None:
        """See Wire.send."""
        ends = self._ends
        what = (
            f"stage {ends.from_stage} waited for stage {ends.to_stage} (rank {ends.peer}) to take "
            f"#{sequence} of {ends.cut}"
        )
        header, body = pack(ends.cut, sequence, layout), memory[: layout.size]
        self._headers.append((self._start(distributed.isend, header, what), header, what))
        if self._data is None:
            work = self._start(distributed.isend, body, what) if layout.size else None
            self._end_headers(0)
            self._end(work, what)
            return
        self._end_headers(HEADERS_UNDER_WAY)
        if layout.size:
            distributed.send(body, ends.peer, group=self._data)

    def receive(self, sequence: int) -> Payload:
        """See Wire.receive."""
        ends = self._ends
        what = (
            f"stage {ends.to_stage} waited for #{sequence} of {ends.cut} from stage "
            f"{ends.from_stage} (rank {ends.peer})"
        )
        header = torch.empty(HEADER_BYTES, dtype=torch.uint8)
        self._end(self._start(distributed.irecv, header, what), what)
        layout = unpack(header, ends.cut, sequence)
        body = torch.empty(layout.size, dtype=torch.uint8, device=self._device)
        if layout.size and self._data is None:
            self._end(self._start(distributed.irecv, body, what), what)
        elif layout.size:
            distributed.recv(body, ends.peer, group=self._data)
        return {part.name: part.of(body) for part in layout.parts}

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
