"""One place for a model's weights in memory, on huge pages where the system grants them.

A decode step streams every weight once. With 4 KiB pages the address translation of some ten
thousand pages costs as much as a tenth of the step; 2 MiB pages need five hundred times fewer.
"""

from __future__ import annotations

import threading
from math import prod

import torch

from layline.weights.pages import ask_huge_pages

HUGE_PAGE = 2 << 20
CHUNK = 16 << 20  # Requested at a time; the unused end of the last one is never touched.
ALIGNMENT = 64


class WeightArena:
    """Hands out uninitialised tensors from large chunks; safe to use from several threads.

    On devices other than the CPU every tensor is torch's own.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised contiguous tensor."""
        if self._device.type != "cpu":
            return torch.empty(shape, dtype=dtype, device=self._device)
        num_bytes = prod(shape) * dtype.itemsize
        with self._lock:
            start = -(-self._used // ALIGNMENT) * ALIGNMENT
            if start + num_bytes > self._chunk.numel():
                self._chunk = _huge_chunk(max(CHUNK, num_bytes))
                start = 0
            self._used = start + num_bytes
            flat = self._chunk[start : self._used]
        return flat.view(dtype).view(shape)

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of ``tensor`` in the arena."""
        copy = self.empty(tuple(tensor.shape), tensor.dtype)
        return copy.copy_(tensor)


def _huge_chunk(num_bytes: int) -> torch.Tensor:
    """uint8 memory that starts on a huge page's boundary and is asked to be made of them."""
    raw = torch.empty(num_bytes + HUGE_PAGE, dtype=torch.uint8)
    start = -raw.data_ptr() % HUGE_PAGE
    chunk = raw[start : start + num_bytes]
    ask_huge_pages(chunk)
    return chunk
