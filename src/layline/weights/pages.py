"""What the kernel is told about memory: mapped pages to drop, weights to keep on huge pages.

A page of a mapped file counts as this process's memory once it was read. Readers therefore copy a
piece at a time and give the pages of each piece back; the kernel still caches the file.
"""

from __future__ import annotations

import ctypes
import mmap
import sys

import torch

# Large enough that a copy runs at memory speed, small next to any model.
_PIECE_BYTES = 16 << 20


def copy_mapped(source: torch.Tensor, out: torch.Tensor) -> None:
    """Copy ``source`` into ``out`` (same shape, any dtype or device), piece by piece."""
    if source.dim() == 0:
        out.copy_(source)
        return
    row_bytes = max(1, source.stride(0) * source.element_size())
    step = max(1, _PIECE_BYTES // row_bytes)
    for start in range(0, source.shape[0], step):
        piece = source[start : start + step]
        out[start : start + step].copy_(piece)
        release_pages(piece)


def release_pages(view: torch.Tensor) -> None:
    """Tell the kernel that the whole pages under a mapped tensor are not needed in memory now.

    The data stays valid: it is read from the file again when touched. Only for tensors that view
    a mapped file; on other memory the contents would be lost. Of a part of a matrix, what lies
    between its first and last value is meant. Does nothing outside Linux.
    """
    if sys.platform == "linux":
        _advise(view, mmap.MADV_DONTNEED)


def ask_huge_pages(memory: torch.Tensor) -> None:
    """Ask the kernel to back ``memory`` with huge pages; a refusal leaves ordinary ones."""
    if sys.platform == "linux":
        _advise(memory, mmap.MADV_HUGEPAGE)


def _advise(view: torch.Tensor, advice: int) -> None:
    if view.device.type != "cpu" or not view.numel():
        return
    page = mmap.PAGESIZE
    reach = sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True))
    first = -(-view.data_ptr() // page) * page
    last = (view.data_ptr() + (reach + 1) * view.element_size()) // page * page
    if last > first:
        libc = ctypes.CDLL(None)
        libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), advice)
