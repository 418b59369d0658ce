"""How torch.distributed carries each collective, by backend. Inputs are checked and contiguous.

NCCL has all of them. gloo has no reduce-scatter in some versions of torch, and between more than
two ranks its all-reduce and all-gather of few rows take several turns where one would do: about
twice as long. Those are built on one all-to-all: every rank receives all parts, and adds them in
group order in the tensors' dtype. Simulated ranks add in the same way, so such sums, and any sum of
two, are equal to theirs bit by bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, distributed

# Received bytes up to which one exchange of whole inputs beats gloo's own turns.
DIRECT_BYTES = 256 * 1024

# torch 2.13 renamed both and warns about the old names.
_all_gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
_reduce_scatter = (
    getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor
)


class Wire(Protocol):
    """One process group's collectives on contiguous [rows, columns] tensors of its device."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over ranks; may use up ``x``."""

    def all_gather(self, x: Tensor) -> Tensor:
        """Rows of all ranks in group order."""

    def reduce_scatter(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """This rank's ``counts[rank]`` rows of the sum; the counts may differ and may be 0."""


class NcclWire:
    """Through NCCL, on the current CUDA stream."""

    def __init__(self, process_group: distributed.ProcessGroup) -> None:
        self._group = process_group

    def all_reduce(self, x: Tensor) -> Tensor:
        """See Wire."""
        distributed.all_reduce(x, group=self._group)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """See Wire."""
        # As bytes: NCCL has no name for int16, nor on older GPUs for float8.
        sent = x.view(torch.uint8)
        result = sent.new_empty(self._group.size() * sent.shape[0], sent.shape[1])
        _all_gather(result, sent, group=self._group)
        return result.view(x.dtype)

    def reduce_scatter(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """See Wire. Counts that differ run as one group of reductions, one to each rank."""
        result = x.new_empty(counts[self._group.rank()], x.shape[1])
        if len(set(counts)) == 1:
            _reduce_scatter(result, x, group=self._group)
        else:
            distributed.reduce_scatter(
                result, list(torch.split(x, list(counts))), group=self._group
            )
        return result


class GlooWire:
    """Through gloo, on the CPU."""

    def __init__(self, process_group: distributed.ProcessGroup) -> None:
        self._group = process_group

    def all_reduce(self, x: Tensor) -> Tensor:
        """See Wire."""
        if self._is_direct(x):
            return add_in_order(torch.chunk(self._exchange_copies(x), self._group.size()))
        distributed.all_reduce(x, group=self._group)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """See Wire."""
        # As bytes: gloo has no name for float8 and int16.
        sent = x.view(torch.uint8)
        if self._is_direct(x):
            return self._exchange_copies(sent).view(x.dtype)
        result = sent.new_empty(self._group.size() * sent.shape[0], sent.shape[1])
        _all_gather(result, sent, group=self._group)
        return result.view(x.dtype)

    def reduce_scatter(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """See Wire."""
        size, rows = self._group.size(), counts[self._group.rank()]
        received = x.new_empty(size * rows, x.shape[1])
        distributed.all_to_all_single(received, x, [rows] * size, list(counts), group=self._group)
        return add_in_order([received[rows * rank : rows * (rank + 1)] for rank in range(size)])

    def _is_direct(self, x: Tensor) -> bool:
        others = self._group.size() - 1
        return others > 1 and others * x.nbytes <= DIRECT_BYTES

    def _exchange_copies(self, x: Tensor) -> Tensor:
        """All ranks' rows, as each rank sends all of its own to every other."""
        sent = x.repeat(self._group.size(), 1)
        received = torch.empty_like(sent)
        distributed.all_to_all_single(received, sent, group=self._group)
        return received


def add_in_order(parts: Sequence[Tensor]) -> Tensor:
    """The sum, added from the first part to the last and rounded to their dtype each time."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total
