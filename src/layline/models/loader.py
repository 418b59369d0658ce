"""Build layers straight from a checkpoint, one tensor at a time.

Every tensor that a layer asks for is checked (present, whole shape) before its part is read, and
once the model is built, every tensor of the file must have been asked for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from layline.comm.groups import Group
from layline.errors import TensorError, UsageError
from layline.kernels.native.library import native_kernels
from layline.kernels.native.pack import pack_native
from layline.kernels.native.rows import RowKernels
from layline.kernels.packed_matmul import (
    GROUP,
    ROW_ALIGNMENT,
    Int4Weight,
    pack_int4,
    pack_int8,
    quantise_rows,
)
from layline.kernels.rope import Rotation, rotate_heads_
from layline.kernels.silu_mul import silu_mul, undivided_silu_mul
from layline.layers.arena import WeightArena
from layline.layers.embedding import Embedding
from layline.layers.invariance import RowClaims, RowFunction, rotation_of_rows
from layline.layers.linear import Linear, PackedWeight
from layline.layers.norm import RMSNorm
from layline.layers.parallel import RowParallelLinear
from layline.layers.rope import RotaryTable
from layline.layers.rope_config import RopeConfig
from layline.layers.spans import Phase
from layline.models.stack import LayerRange
from layline.weights.checkpoint import Checkpoint, Region
from layline.weights.quantized import FOUR_BIT, QuantizedTensor, on_blocks, supported_encodings

ROPE_FACTORS = "rope_freqs.weight"
Layer = TypeVar("Layer")
Head = TypeVar("Head", bound=Linear | None)
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
PACK_ROWS = 4096  # Rows expanded at a time while packing, so that temporaries stay small.


@dataclass(frozen=True, kw_only=True)
class LoadTarget:
    """Where and how weights are held. ``packed`` keeps quantised matrices quantised for decode.

    With ``batch_invariant`` each row is computed alike in every batch and phase.
    """

    device: torch.device
    dtype: torch.dtype
    packed: bool
    max_position: int
    batch_invariant: bool = False

    @property
    def residual_dtype(self) -> torch.dtype:
        """FP32 on the CPU, where it saves two conversions at each norm; else the run's dtype."""
        return torch.float32 if self.device.type == "cpu" else self.dtype


@dataclass(frozen=True)
class TiedTable:
    """The token table that a head may share.

    ``embedding`` is None where another pipeline stage has it; ``is_tied`` is None when the
    configuration does not say; then the file decides.
    """

    name: str
    embedding: Embedding | None
    is_tied: bool | None


class ModelLoader:
    """Hands layers their weights. Raises TensorError naming file, tensor, expected and found."""

    def __init__(self, checkpoint: Checkpoint, target: LoadTarget) -> None:
        self._checkpoint = checkpoint
        self._target = target
        self._infos = checkpoint.infos()
        self._makes_weights = checkpoint.kind == "random"
        self._used: set[str] = set()
        self._rows: RowKernels | None = None
        if target.packed:
            kernels = native_kernels()  # Compiles where it must, before threads ask for them.
            if target.batch_invariant and kernels.library is None:
                raise UsageError(
                    "batch_invariant needs the native kernels for quantised matrices, which do not "
                    f"run here: {kernels.reason}; expected a dtype other than auto"
                )
            if kernels.library is not None and not target.batch_invariant:
                self._rows = RowKernels(kernels.library)
        self._claims = RowClaims()
        # Decode streams packed weights only; apart from the others they are dense in memory.
        self._arena = WeightArena(target.device)
        self._packed_arena = WeightArena(target.device)

    @property
    def residual_dtype(self) -> torch.dtype:
        """The dtype of the residual, and of what ranks exchange to change it."""
        return self._target.residual_dtype

    def norm(self, name: str, size: int, eps: float) -> RMSNorm:
        """An RMS norm over ``size`` features."""
        norm = RMSNorm(self._plain(f"{name}.weight", Region((size,))), eps, self._rows)
        self._claims.elementwise(f"norm of {size}", norm, size)
        return norm

    def gated_product(self, size: int) -> RowFunction:
        """``silu(gate) * up`` of [tokens, 2 x size]."""
        if self._rows is not None:
            return self._rows.silu_mul
        if not self._target.batch_invariant:
            return silu_mul
        self._claims.elementwise(f"SwiGLU of {size}", undivided_silu_mul, 2 * size)
        return undivided_silu_mul

    def rotation(self) -> Rotation:
        """What rotates query and key heads in place; see :mod:`layline.kernels.rope`."""
        return rotate_heads_ if self._rows is None else self._rows.rotate_heads_

    def linear(
        self,
        parts: Mapping[str, Region],
        *,
        bias: bool,
        adds_bias: bool = True,
        keeps_accumulator: bool = False,
    ) -> Linear:
        """One linear layer holding a region of each named projection as consecutive rows.

        The regions have equally many columns. With ``bias`` the file has one for each projection;
        ``adds_bias`` says whether this rank's layer adds it.
        """
        sizes = [region.size for region in parts.values()]
        rows, columns = [size[0] for size in sizes], sizes[0][1]
        regions = {f"{name}.weight": region for name, region in parts.items()}
        packed = self._packed(regions, columns)
        weight = None
        if packed is None or not packed.serves_prefill:
            weight = self._arena.empty((sum(rows), columns), self._target.dtype)
            for (name, region), out in zip(regions.items(), torch.split(weight, rows), strict=True):
                self._read_into(name, out, region)
        if packed is not None:
            for name in regions:
                self._checkpoint.release(name)
        merged_bias = self._bias(parts, adds_bias) if bias else None
        keeps = keeps_accumulator or weight is None
        return self._claimed(weight, merged_bias, packed, keeps)

    def row_parallel(
        self,
        name: str,
        region: Region,
        *,
        bias: bool,
        group: Group | None,
        reduce_results: bool = True,
    ) -> Linear | RowParallelLinear:
        """A projection that holds some input columns; a plain linear layer without ``group``.

        Partial sums keep what they were accumulated in and travel in the residual's dtype.
        """
        if group is None:
            return self.linear({name: region}, bias=bias)
        first = group.rank == 0
        linear = self.linear({name: region}, bias=bias, adds_bias=first, keeps_accumulator=True)
        return RowParallelLinear(linear, group, reduce_results, self.residual_dtype)

    def embedding(self, name: str, region: Region, num_rows: int) -> Embedding:
        """The token table's region, padded to ``num_rows``; a quantised one stays as it is."""
        return Embedding(self._table(f"{name}.weight", region, num_rows), self.residual_dtype)

    def head(self, name: str, tied: TiedTable, region: Region, num_rows: int) -> Linear:
        """The output projection: the embedding's table when tied, or when the file has no head."""
        full_name = f"{name}.weight"
        is_tied = tied.is_tied
        if is_tied is None:
            is_tied = full_name not in self._infos and not self._makes_weights
        if is_tied:
            if full_name in self._infos:
                self._check(full_name, region.shape)
                self._used.add(full_name)
            if tied.embedding is not None:
                return self._head_on(tied.embedding.table)
            # The embedding is on another pipeline stage: this one has its own copy of the table.
            full_name = f"{tied.name}.weight"
        head = self._head_on(self._table(full_name, region, num_rows))
        if head.packed is not None:
            self._checkpoint.release(full_name)
        return head

    def rotary(self, rope: RopeConfig, head_dim: int) -> RotaryTable:
        """Rotary tables for every position of the run's context."""
        factors = None
        if ROPE_FACTORS in self._infos:
            factors = torch.empty(head_dim // 2)
            self._read_into(ROPE_FACTORS, factors, Region((head_dim // 2,)))
        self._claims.elementwise(f"rotation of {head_dim}", *rotation_of_rows(3, head_dim))
        return RotaryTable(
            rope,
            head_dim,
            self._target.max_position,
            factors=factors,
            device=self._target.device,
        )

    def head_and_layers(
        self, head: Callable[[], Head], layers: Sequence[Callable[[], Layer]]
    ) -> tuple[Head, list[Layer]]:
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

    def finish(self, part: LayerRange | None = None) -> None:
        """The last call: raise TensorError if the file holds tensors that no layer asked for.

        Those that belong to other stages of a pipeline than ``part`` are theirs to ask for.
        What batch-invariant layers are built on is tried out; see RowClaims.check.
        """
        extra = sorted(
            name
            for name in self._infos
            if name not in self._used
            and not _is_derived(name)
            and not (part is not None and _is_elsewhere(name, part))
        )
        if extra:
            info = self._infos[extra[0]]
            more = f" (and {len(extra) - 1} more)" if len(extra) > 1 else ""
            raise TensorError(
                f"{info.file}: unexpected tensor {extra[0]!r} of shape {list(info.shape)}{more}; "
                "the configuration has no place for it"
            )
        if self._target.batch_invariant:
            self._claims.check(self._target.dtype, self._target.device)

    def _plain(self, name: str, region: Region, num_rows: int | None = None) -> torch.Tensor:
        """The region's values in the run's dtype, with zero rows after them up to ``num_rows``."""
        size = region.size
        rows = size[0] if num_rows is None else num_rows
        out = self._arena.empty((rows, *size[1:]), self._target.dtype)
        self._read_into(name, out[: size[0]], region)
        out[size[0] :].zero_()
        return out

    def _table(self, name: str, region: Region, num_rows: int) -> torch.Tensor | QuantizedTensor:
        """Rows of a vocabulary-sized matrix; a quantised one stays as in the file when packing."""
        self._check(name, region.shape)
        if self._target.packed:
            matrix = self._checkpoint.read(name, region)
            if isinstance(matrix, QuantizedTensor):
                self._used.add(name)
                return matrix.padded(num_rows)
        return self._plain(name, region, num_rows)

    def _bias(self, parts: Mapping[str, Region], adds_bias: bool) -> torch.Tensor | None:
        regions = {
            f"{name}.bias": Region(region.shape[:1], region.rows) for name, region in parts.items()
        }
        if adds_bias:
            return torch.cat([self._plain(name, region) for name, region in regions.items()])
        for name, region in regions.items():
            self._check(name, region.shape)
            self._used.add(name)
        return None

    def _read_into(self, name: str, out: torch.Tensor, region: Region) -> None:
        self._check(name, region.shape)
        self._checkpoint.read_into(name, out, region)
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

    def _packed(self, parts: Mapping[str, Region], columns: int) -> PackedWeight | None:
        """The named regions stacked and packed, or None where they are to stay plain."""
        if not self._target.packed or columns % GROUP:
            return None
        for name, region in parts.items():
            self._check(name, region.shape)
        if not all(self._stays_quantised(name, region) for name, region in parts.items()):
            return None
        matrices = [self._checkpoint.read(name, region) for name, region in parts.items()]
        self._used.update(parts)
        return pack(
            [matrix for matrix in matrices if isinstance(matrix, QuantizedTensor)],
            self._packed_arena,
        )

    def _stays_quantised(self, name: str, region: Region) -> bool:
        """True when the file holds the region in whole blocks."""
        encoding = self._infos[name].encoding
        if encoding not in supported_encodings():
            return False
        return on_blocks(encoding, *(region.columns or (0, region.shape[1])))

    def _head_on(self, table: torch.Tensor | QuantizedTensor) -> Linear:
        if isinstance(table, QuantizedTensor):
            return Linear(None, None, pack([table], self._packed_arena), keeps_accumulator=True)
        return self._claimed(table, None, None, False)

    def _claimed(
        self,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        packed: PackedWeight | None,
        keeps_accumulator: bool,
    ) -> Linear:
        tiled = self._target.batch_invariant and packed is None
        linear = Linear(weight, bias, packed, keeps_accumulator=keeps_accumulator, tiled=tiled)
        if weight is not None and packed is None:
            rows, columns = weight.shape
            name = f"product with a matrix of {rows} x {columns}"
            self._claims.matmul(name, partial(linear, phase=Phase.PREFILL), columns)
        return linear


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


def _is_elsewhere(name: str, part: LayerRange) -> bool:
    """True for a tensor that another pipeline stage holds."""
    layer = _LAYER.match(name)
    if layer is not None:
        number = int(layer[1])
        return number < part.total and number not in range(part.start, part.stop)
    if name.startswith("model.embed_tokens."):
        return not part.is_first
    return name.startswith(("model.norm.", "lm_head.")) and not part.is_last
