"""One layer's paged cache of keys and values: plain, or rounded to 8 bits with scales.

Shape suffixes: T token rows, S cache slots, K key/value heads, D head size, C columns of a stored
row. A slot holds one token's keys, then its values.
"""

from __future__ import annotations

from typing import Protocol

import torch

from layline.kernels.kv_rounding import LARGEST, SCALE_DTYPE, restore_heads, round_heads

Slots = torch.Tensor | slice
"""Numbers of slots, int64 [tokens], or a slice where they are consecutive."""


class KVCache(Protocol):
    """Where a layer's attention writes and reads keys and values, [tokens, 2, K, D] each time.

    A slot that was never written reads as zeros. What a write rounds, :meth:`rounded` rounds alike.
    """

    @property
    def dtype(self) -> torch.dtype:
        """The type of what is read."""

    @property
    def num_slots(self) -> int:
        """Slots, the null block's included."""

    @property
    def nbytes(self) -> int:
        """Memory of all slots."""

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Everything that is stored, each with a row for a slot."""

    def write(self, slots: Slots, kv_T2KD: torch.Tensor) -> None:
        """Keep rows of any float type."""

    def read(self, slots: Slots) -> torch.Tensor:
        """Rows in ``dtype``; those of a slice may be the cache's own memory."""

    def rounded(self, kv_T2KD: torch.Tensor) -> torch.Tensor:
        """``kv_T2KD`` as a read gives it back once it is written."""

    def stored(self, kv_T2KD: torch.Tensor | None) -> torch.Tensor:
        """Rows as they are stored, [tokens, C] of one type, to send them; None stands for none."""

    def write_stored(self, slots: Slots, rows_TC: torch.Tensor) -> None:
        """Keep rows that :meth:`stored` gave, here or on another rank."""


class PlainCache:
    """Keys and values in a float type: one tensor [S, 2, K, D], given zeroed."""

    __slots__ = ("_rows",)

    def __init__(self, rows_S2KD: torch.Tensor) -> None:
        self._rows = rows_S2KD

    @property
    def dtype(self) -> torch.dtype:
        """See KVCache."""
        return self._rows.dtype

    @property
    def num_slots(self) -> int:
        """See KVCache."""
        return self._rows.shape[0]

    @property
    def nbytes(self) -> int:
        """See KVCache."""
        return self._rows.nbytes

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The one tensor."""
        return (self._rows,)

    def write(self, slots: Slots, kv_T2KD: torch.Tensor) -> None:
        """See KVCache."""
        if isinstance(slots, slice):
            self._rows[slots].copy_(kv_T2KD)
        else:
            self._rows.index_copy_(0, slots, kv_T2KD.to(self._rows.dtype))

    def read(self, slots: Slots) -> torch.Tensor:
        """See KVCache; a slice is not copied."""
        return self._rows[slots] if isinstance(slots, slice) else self._rows.index_select(0, slots)

    def rounded(self, kv_T2KD: torch.Tensor) -> torch.Tensor:
        """See KVCache."""
        return kv_T2KD.to(self._rows.dtype)

    def stored(self, kv_T2KD: torch.Tensor | None) -> torch.Tensor:
        """See KVCache: keys, then values of all heads."""
        rows = self._rows[:0] if kv_T2KD is None else kv_T2KD.to(self._rows.dtype)
        return rows.flatten(1)

    def write_stored(self, slots: Slots, rows_TC: torch.Tensor) -> None:
        """See KVCache."""
        self.write(slots, rows_TC.view(-1, *self._rows.shape[1:]))


class QuantisedCache:
    """Keys and values in 8 bits, [S, 2, K, D], beside a scale for each token and head, [S, 2, K].

    ``values`` are int8 or float8_e4m3fn, ``scales`` bfloat16; both are given zeroed. ``dtype`` is
    what reads give. A stored row is the bytes of all values, then those of the scales.
    """

    __slots__ = ("_bytes", "_dtype", "_scales", "_values")

    def __init__(
        self, values_S2KD: torch.Tensor, scales_S2K: torch.Tensor, dtype: torch.dtype
    ) -> None:
        assert values_S2KD.dtype in LARGEST
        assert scales_S2K.dtype is SCALE_DTYPE
        self._values, self._scales, self._dtype = values_S2KD, scales_S2K, dtype
        # Not every operation on rows knows 8-bit floats, and moving rows is moving bytes.
        self._bytes = values_S2KD.view(torch.uint8)

    @property
    def dtype(self) -> torch.dtype:
        """See KVCache."""
        return self._dtype

    @property
    def num_slots(self) -> int:
        """See KVCache."""
        return self._values.shape[0]

    @property
    def nbytes(self) -> int:
        """See KVCache; scales included."""
        return self._values.nbytes + self._scales.nbytes

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Values and scales."""
        return (self._values, self._scales)

    def write(self, slots: Slots, kv_T2KD: torch.Tensor) -> None:
        """See KVCache."""
        values, scales = round_heads(kv_T2KD, self._values.dtype)
        self._keep(slots, values.view(torch.uint8), scales)

    def read(self, slots: Slots) -> torch.Tensor:
        """See KVCache."""
        if isinstance(slots, slice):
            return restore_heads(self._values[slots], self._scales[slots], self._dtype)
        values = self._bytes.index_select(0, slots).view(self._values.dtype)
        return restore_heads(values, self._scales.index_select(0, slots), self._dtype)

    def rounded(self, kv_T2KD: torch.Tensor) -> torch.Tensor:
        """See KVCache."""
        return restore_heads(*round_heads(kv_T2KD, self._values.dtype), self._dtype)

    def stored(self, kv_T2KD: torch.Tensor | None) -> torch.Tensor:
        """See KVCache; bytes."""
        if kv_T2KD is None:
            values, scales = self._values[:0], self._scales[:0]
        else:
            values, scales = round_heads(kv_T2KD, self._values.dtype)
        return torch.cat(
            (values.flatten(1).view(torch.uint8), scales.flatten(1).view(torch.uint8)), dim=1
        )

    def write_stored(self, slots: Slots, rows_TC: torch.Tensor) -> None:
        """See KVCache."""
        shape = self._values.shape[1:]
        values, scales = rows_TC[:, : shape.numel()], rows_TC[:, shape.numel() :].contiguous()
        self._keep(slots, values.reshape(-1, *shape), scales.view(SCALE_DTYPE).view(-1, *shape[:2]))

    def _keep(self, slots: Slots, values_T2KD: torch.Tensor, scales_T2K: torch.Tensor) -> None:
        """Store bytes and scales."""
        if isinstance(slots, slice):
            self._bytes[slots].copy_(values_T2KD)
            self._scales[slots].copy_(scales_T2K)
        else:
            self._bytes.index_copy_(0, slots, values_T2KD)
            self._scales.index_copy_(0, slots, scales_T2K)
