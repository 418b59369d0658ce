"""How bytes get from one stage's device into the next one's slot, within one process.

The names are those of placement's transports. A payload goes to another process through
process_link.py.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from layline.errors import TransferError
from layline.pipeline.cuda_driver import CudaCalls, CudaRuntime
from layline.pipeline.device import StageDevice
from layline.pipeline.streams import Stream


class Transport(Protocol):
    """Fills a slot. ``kind`` says how, in words."""

    @property
    def kind(self) -> str:
        """How bytes cross: "local copy" or "peer copy"."""

    def copy(self, target: Tensor, source: Tensor, stream: Stream) -> None:
        """Copy ``source`` into ``target``, of its shape and dtype, in the order of ``stream``.

        Called by a task that runs on ``stream``, the producer's.
        """


class LocalCopy:
    """On one device, or between virtual devices of the CPU (kind "peer copy")."""

    def __init__(self, kind: str = "local copy") -> None:
        self.kind = kind

    def copy(self, target: Tensor, source: Tensor, stream: Stream) -> None:
        """See Transport.copy."""
        target.copy_(source)


class PeerCopy:
    """Between two CUDA devices, asynchronous and ordered by the producer's stream alone.

    Raises TransferError where the devices have no access to each other's memory: a copy by way of
    the host would work and be slow without a word.
    """

    kind = "peer copy"

    def __init__(self, source: int, target: int, calls: CudaCalls) -> None:
        for device, peer in ((source, target), (target, source)):
            if not calls.can_access(device, peer):
                raise TransferError(
                    f"cuda:{device} has no peer access to cuda:{peer}; expected devices that reach "
                    "each other, or a process for each"
                )
        for device, peer in ((source, target), (target, source)):
            calls.enable_access(device, peer)
        self._devices = (source, target)
        self._calls = calls

    def copy(self, target: Tensor, source: Tensor, stream: Stream) -> None:
        """See Transport.copy."""
        here, there = self._devices
        # Made in the producer's order, and freed for that order alone.
        source = source.contiguous()
        if source.nbytes == 0:
            return
        self._calls.copy_peer(
            (target.data_ptr(), there),
            (source.data_ptr(), here),
            source.nbytes,
            stream.native.cuda_stream,  # type: ignore[attr-defined]  # a CudaStream
        )


def choose_transport(
    producer: StageDevice, receiver: StageDevice, calls: CudaCalls | None = None
) -> Transport:
    """The transport of one cut. ``calls`` stands in for the CUDA runtime in tests.

    Raises TransferError for devices of two kinds, and as PeerCopy does.
    """
    if producer.kind != receiver.kind:
        raise TransferError(
            f"nothing goes from {producer} to {receiver}; expected devices of one kind"
        )
    if producer == receiver:
        return LocalCopy()
    if producer.kind == "cpu":
        return LocalCopy("peer copy")
    return PeerCopy(producer.ordinal, receiver.ordinal, calls or CudaRuntime())
