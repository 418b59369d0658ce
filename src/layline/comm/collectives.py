"""Groups over torch.distributed: gloo between CPU processes, NCCL between GPUs.

gloo delivers a short message into a longer buffer without a word and can end the process on the
opposite. So a verified group first lets its ranks compare what each of them brings.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, distributed

from layline.comm.calls import Call, make_call
from layline.comm.groups import CollectiveKind
from layline.comm.wires import GlooWire, NcclWire, Wire
from layline.errors import CollectiveError
from layline.topology import GroupName

KINDS = tuple(CollectiveKind)
NAMES = tuple(GroupName)
DTYPES = (
    *("float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "float8_e5m2"),
    *("int64", "int32", "int16", "int8", "uint8", "bool"),
)


@dataclass
class Channel:
    """A process group, shared by all names of the topology that stand for the same ranks.

    Attributes:
        process_group: What torch.distributed knows it by.
        ranks: Global ranks in group order.
        device: Where tensors must be.
        timeout_s: How long a gloo peer may take to answer. NCCL reports on its own thread.
        calls: Collectives begun so far: the sequence number of the next one.
    """

    process_group: distributed.ProcessGroup
    ranks: tuple[int, ...]
    device: torch.device
    timeout_s: float
    calls: int = 0

    @property
    def rank(self) -> int:
        """This rank's position in the group."""
        return self.process_group.rank()


class TorchGroup:
    """Implements comm.groups.Group. See there for what each collective returns and raises.

    ``verified`` makes every collective start with an exchange of a few integers: group, kind,
    shape, dtype, counts and sequence number. A mismatch then raises CollectiveError on every rank
    and names what each brought. Without it a mismatch on gloo gives wrong values or ends a process,
    and on NCCL hangs. The exchange about doubles the time of a small collective, so
    ``verified_calls`` ends it after that many calls of the process group, all its names together:
    ranks agree on the sequence number until then, and so end it at the same call.

    When all ranks bring zero rows nothing is sent but the agreement. A rank that raises for its
    own input alone (shape, dtype, device, counts) leaves the others to their timeout.
    """

    __slots__ = ("_channel", "_verified_calls", "_wire", "name", "rank", "ranks")

    def __init__(
        self,
        name: GroupName,
        channel: Channel,
        *,
        verified: bool,
        verified_calls: int | None = None,
    ) -> None:
        self.name = name
        self.ranks = channel.ranks
        self.rank = channel.rank
        self._channel = channel
        calls = math.inf if verified_calls is None else verified_calls
        self._verified_calls = calls if verified else 0
        wire = NcclWire if channel.device.type == "cuda" else GlooWire
        self._wire: Wire = wire(channel.process_group)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def all_reduce(self, x: Tensor, /) -> Tensor:
        """See Group.all_reduce."""
        return self._run(CollectiveKind.ALL_REDUCE, x)

    def all_gather(self, x: Tensor, /) -> Tensor:
        """See Group.all_gather."""
        return self._run(CollectiveKind.ALL_GATHER, x)

    def reduce_scatter(self, x: Tensor, /) -> Tensor:
        """See Group.reduce_scatter."""
        return self._run(CollectiveKind.REDUCE_SCATTER, x)

    def reduce_scatter_v(self, x: Tensor, counts: Sequence[int], /) -> Tensor:
        """See Group.reduce_scatter_v."""
        return self._run(CollectiveKind.REDUCE_SCATTER_V, x, counts)

    def _run(self, kind: CollectiveKind, x: Tensor, counts: Sequence[int] | None = None) -> Tensor:
        call = make_call(kind, x, (self.name, self.size), counts)
        self._check_device(call, x)
        sequence = self._channel.calls
        self._channel.calls += 1
        try:
            if sequence < self._verified_calls:
                self._agree(call, sequence)
            if call.is_empty:
                return x.new_empty(self._result_rows(call), call.columns)
            return self._send(call, x.detach().contiguous())
        except (CollectiveError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:
            # gloo begins with the place in its own source.
            reason = re.sub(r"^\[[^]]*\] ", "", str(error).strip().partition("\n")[0])
            raise CollectiveError(
                f"{self._at(call, sequence)}: ranks {list(self.ranks)} did not finish it together "
                f"(timeout {self._channel.timeout_s:g} s): {reason}"
            ) from error

    def _send(self, call: Call, x: Tensor) -> Tensor:
        if call.kind is CollectiveKind.ALL_REDUCE:
            return self._wire.all_reduce(x)
        if call.kind is CollectiveKind.ALL_GATHER:
            return self._wire.all_gather(x)
        shares = call.counts or (call.rows // self.size,) * self.size
        return self._wire.reduce_scatter(x, shares)

    def _result_rows(self, call: Call) -> int:
        if call.kind is CollectiveKind.ALL_GATHER:
            return call.rows * self.size
        if call.kind is CollectiveKind.REDUCE_SCATTER:
            return call.rows // self.size
        return call.rows if call.counts is None else call.counts[self.rank]

    def _check_device(self, call: Call, x: Tensor) -> None:
        if x.device != self._channel.device:
            raise CollectiveError(
                f"{call.kind.value} on {self.name.value}: a tensor on {x.device}; "
                f"expected {self._channel.device}"
            )
        if call.dtype not in DTYPES:
            raise CollectiveError(
                f"{call.kind.value} on {self.name.value}: dtype {call.dtype} is not sent; "
                f"expected one of {', '.join(DTYPES)}"
            )

    def _agree(self, call: Call, sequence: int) -> None:
        """Show every rank what the others bring; raises CollectiveError where that differs."""
        facts = [
            NAMES.index(self.name),
            KINDS.index(call.kind),
            DTYPES.index(call.dtype),
            call.rows,
            call.columns,
            sequence,
            *(call.counts or (-1,) * self.size),
        ]
        sent = torch.tensor([facts] * self.size, device=self._channel.device)
        received = torch.empty_like(sent)
        # gloo's all-to-all takes one turn where its all-gather takes one for each rank.
        distributed.all_to_all_single(received, sent, group=self._channel.process_group)
        brought = received.tolist()
        if any(other != facts for other in brought):
            words = [
                f"rank {rank} brings {_described(other)}"
                for rank, other in zip(self.ranks, brought, strict=True)
            ]
            raise CollectiveError(
                f"{self._at(call, sequence)}: the ranks disagree: {'; '.join(words)}"
            )

    def _at(self, call: Call, sequence: int) -> str:
        here = self.ranks[self.rank]
        return f"{call.kind.value} #{sequence} on {self.name.value}, rank {here}"


def _described(facts: Sequence[int]) -> str:
    name, kind, dtype, rows, columns, sequence, *shares = facts
    counts = None if shares[0] < 0 else tuple(shares)
    call = Call(KINDS[kind], rows, columns, DTYPES[dtype], counts)
    return f"#{sequence} {NAMES[name].value} {call}"
