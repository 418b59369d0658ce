"""Build layers straight from a checkpoint, one tensor at a time.

Every tensor that a layer asks for is checked (present, shape) before it is read, and once the model
is built, every tensor of the file must have been asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from layline.errors import TensorError
from layline.kernels.native.library import native_kernels
from layline.kernels.native.pack import pack_native
from layline.kernels.packed_matmul import (
    GROUP,
    ROW_ALIGNMENT,
    Int4Weight,
    pack_int4,
    pack_int8,
    quantise_rows,
)
from layline.layers.arena import WeightArena
from layline.layers.embedding import Embedding
from layline.layers.linear import Linear, PackedWeight
from layline.layers.norm import RMSNorm
from layline.layers.rope import RotaryTable
from layline.layers.rope_config import RopeConfig
from layline.weights.checkpoint import Checkpoint
from layline.weights.quantized import FOUR_BIT, QuantizedTensor

ROPE_FACTORS = "rope_freqs.weight"
Layer = TypeVar("Layer")
PACK_ROWS = 4096  # Rows expanded at a time while packing, so that temporaries stay small.


@dataclass(frozen=True, kw_only=True)
class LoadTarget:
    """Where and how weights are held. ``packed`` keeps quantised matrices quantised for decode."""

    device: torch.device
    dtype: torch.dtype
    packed: bool
    max_position: int

    @property
    def residual_dtype(self) -> torch.dtype:
        """FP32 on the CPU, where it saves two conversions at each norm; else the run's dtype."""
        return torch.float32 if self.device.type == "cpu" else self.dtype


class ModelLoader:
    """Hands layers their weights. Raises TensorError naming file, tensor, expected and found."""

    def __init__(self, checkpoint: Checkpoint, target: LoadTarget) -> None:
        self._checkpoint = checkpoint
        self._target = target
        self._infos = checkpoint.infos()
        self._makes_weights = checkpoint.kind == "random"
        self._used: set[str] = set()
        if target.packed:
            native_kernels()  # Compiles where it must, before threads ask for them.
        # Decode streams packed weights only; apart from the others they are dense in memory.
        self._arena = WeightArena(target.device)
        self._packed_arena = WeightArena(target.device)

    def norm(self, name: str, size: int, eps: float) -> RMSNorm:
        """An RMS norm over ``size`` features."""
        return RMSNorm(self._plain(f"{name}.weight", (size,)), eps)

    def linear(
        self, names: Sequence[str], sizes: Sequence[int], in_features: int, *, bias: bool
    ) -> Linear:
        """One linear layer holding the named projections as consecutive rows."""
        shapes = {
            f"{name}.weight": (size, in_features) for name, size in zip(names, sizes, strict=True)
        }
        packed = self._packed(shapes)
        weight = None
        if packed is None or not packed.serves_prefill:
            weight = self._arena.empty((sum(sizes), in_features), self._target.dtype)
            for name, rows in zip(shapes, torch.split(weight, list(sizes)), strict=True):
                self._read_into(name, rows)
        else:
            for name in shapes:
                self._checkpoint.release(name)
        merged_bias = None
        if bias:
            pairs = zip(names, sizes, strict=True)
            merged_bias = torch.cat([self._plain(f"{name}.bias", (size,)) for name, size in pairs])
        return Linear(weight, merged_bias, packed, keeps_accumulator=weight is None)

    def embedding(self, name: str, vocab_size: int, hidden_size: int) -> Embedding:
        """The token table; a quantised one stays as it is in the file when packing."""
        full_name = f"{name}.weight"
        self._check(full_name, (vocab_size, hidden_size))
        if self._target.packed:
            table = self._checkpoint.read(full_name)
            if isinstance(table, QuantizedTensor):
                self._used.add(full_name)
                return Embedding(table, self._target.residual_dtype)
        table = self._plain(full_name, (vocab_size, hidden_size))
        return Embedding(table, self._target.residual_dtype)

    def head(
        self,
        name: str,
        embedding: Embedding,
        shape: tuple[int, int],
        tied: bool | None,
    ) -> Linear:
        """The output projection: the embedding's table when tied, or when the file has no head.

        ``tied`` is None when the configuration does not say; then the file decides.
        """
        full_name = f"{name}.weight"
        if tied is None:
            tied = full_name not in self._infos and not self._makes_weights
        if tied:
            if full_name in self._infos:
                self._check(full_name, shape)
                self._used.add(full_name)
            return self._head_on(embedding.table)
        self._check(full_name, shape)
        if self._target.packed:
            matrix = self._checkpoint.read(full_name)
            if isinstance(matrix, QuantizedTensor):
                self._used.add(full_name)
                head = self._head_on(matrix)
                self._checkpoint.release(full_name)
                return head
        return Linear(self._plain(full_name, shape))

    def rotary(self, rope: RopeConfig, head_dim: int) -> RotaryTable:
        """Rotary tables for every position of the run's context."""
        factors = None
        if ROPE_FACTORS in self._infos:
            factors = torch.empty(head_dim // 2)
            self._read_into(ROPE_FACTORS, factors)
        return RotaryTable(
            rope,
            head_dim,
            self._target.max_position,
            factors=factors,
            device=self._target.device,
        )

    def head_and_layers(
        self, head: Callable[[], Linear], layers: Sequence[Callable[[], Layer]]
    ) -> tuple[Linear, list[Layer]]:
        """Build the head and every layer, on as many threads as torch would use.

        Each thread keeps to one core: one layer's conversions are too small to be worth dividing.
        """
        threads = torch.get_num_threads()

        def alone(build: Callable[[], Any]) -> Any:
            torch.set_num_threads(1)
            with torch.inference_mode():
                return build()

        try:
            with ThreadPoolExecutor(threads) as pool:
                built_head = pool.submit(alone, head)
                built_layers = list(pool.map(alone, layers))
            return built_head.result(), built_layers
        finally:
            # New threads take over the count that was set last, in whichever thread.
            torch.set_num_threads(threads)

    def finish(self) -> None:
        """Raise TensorError if the file holds tensors that no layer asked for."""
        extra = sorted(
            name for name in self._infos if name not in self._used and not _is_derived(name)
        )
        if extra:
            info = self._infos[extra[0]]
            more = f" (and {len(extra) - 1} more)" if len(extra) > 1 else ""
            raise TensorError(
                f"{info.file}: unexpected tensor {extra[0]!r} of shape {list(info.shape)}{more}; "
                "the configuration has no place for it"
            )

    def _plain(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        out = self._arena.empty(shape, self._target.dtype)
        self._read_into(name, out)
        return out

    def _read_into(self, name: str, out: torch.Tensor) -> None:
        self._check(name, tuple(out.shape))
        self._checkpoint.read_into(name, out)
        self._used.add(name)

    def _check(self, name: str, expected: tuple[int, ...]) -> None:
        if self._makes_weights:
            return
        info = self._infos.get(name)
        if info is None:
            raise TensorError(
                f"{self._checkpoint.path}: tensor {name!r} is missing; expected shape "
                f"{list(expected)}"
            )
        if tuple(info.shape) != expected:
            raise TensorError(
                f"{info.file}: tensor {name!r} has shape {list(info.shape)}; expected "
                f"{list(expected)}"
            )

    def _packed(self, shapes: Mapping[str, tuple[int, int]]) -> PackedWeight | None:
        """The named matrices stacked and packed, or None where they are to stay plain."""
        columns = next(iter(shapes.values()))[1]
        if not self._target.packed or columns % GROUP:
            return None
        for name, shape in shapes.items():
            self._check(name, shape)
        matrices = [self._checkpoint.read(name) for name in shapes]
        quantised = [part for part in matrices if isinstance(part, QuantizedTensor)]
        if len(quantised) != len(matrices):
            return None
        self._used.update(shapes)
        return pack(quantised, self._packed_arena)

    def _head_on(self, table: torch.Tensor | QuantizedTensor) -> Linear:
        if isinstance(table, QuantizedTensor):
            return Linear(None, None, pack([table], self._packed_arena), keeps_accumulator=True)
        return Linear(table)


def pack(matrices: Sequence[QuantizedTensor], arena: WeightArena) -> PackedWeight:
    """Pack quantised matrices [*, in features], stacked by rows.

    4-bit blocks keep their values as int4. The native kernels, where they run, keep Q8_0 too and
    take the rest as int8 with a scale for each 32 values; torch's take int8 with one for each row.
    """
    library = native_kernels().library
    if library is not None:
        return pack_native(library, matrices, arena.empty)
    rows = sum(matrix.shape[0] for matrix in matrices)
    aligned = rows % ROW_ALIGNMENT == 0
    if aligned and all(matrix.encoding in FOUR_BIT for matrix in matrices):
        parts = [matrix.q4_parts() for matrix in matrices]
        nibbles, scale, minimum = (torch.cat(column) for column in zip(*parts, strict=True))
        packed = pack_int4(nibbles, scale, minimum)
        return Int4Weight(arena.keep(packed.tiles), arena.keep(packed.scales_and_zeros))
    values = torch.empty(rows, matrices[0].shape[1], dtype=torch.int8)
    scales: list[torch.Tensor] = []
    row = 0
    for matrix in matrices:
        for first in range(0, matrix.shape[0], PACK_ROWS):
            chunk = matrix.rows(slice(first, first + PACK_ROWS)).dequantize(torch.float32)
            scales.append(quantise_rows(chunk, values[row : row + chunk.shape[0]]))
            row += chunk.shape[0]
    return pack_int8(values, torch.cat(scales))


def _is_derived(name: str) -> bool:
    """Buffers that older checkpoints saved although they follow from the configuration."""
    return name.endswith("rotary_emb.inv_freq")
