"""Weights kept in GGUF's block encodings, and their values.

A block encoding stores a row as fixed-size blocks of 32 (or 256) values: a few scales followed by
packed integers. Layouts follow ggml's block structs; the arithmetic follows its reference
dequantiser step by step in float32, so that values agree with it bit for bit.

Shape suffixes: ``R`` rows, ``B`` blocks in a row, ``C`` columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.nn.functional as F

from layline.errors import TensorError, UnsupportedFormatError

# Values per pass on the CPU. The float32 scratch of a pass has to stay in cache: several operations
# run over it, and from memory they would cost a multiple. Small matrices go in pieces below the
# size from which torch spreads an operation over threads: starting its threads some thousand times
# gains a tenth of a second on idle cores, and on busy ones each start waits for a time slice.
_SERIAL_CHUNK = 1 << 15
_THREADED_CHUNK = 1 << 18
_SERIAL_LIMIT = 1 << 22
_DEVICE_CHUNK = 1 << 24


FOUR_BIT = ("Q4_0", "Q4_1", "Q4_K")
"""Encodings whose every 32 values are a 4-bit integer each, one scale and one minimum."""


@dataclass(frozen=True)
class BlockLayout:
    """How many values and bytes one block of an encoding has."""

    values: int
    bytes: int
    expand: Callable[[torch.Tensor, torch.Tensor], None]


@dataclass(frozen=True)
class QuantizedTensor:
    """A matrix in a GGUF block encoding, not yet expanded.

    Attributes:
        encoding: One of ``supported_encodings()``, such as ``"Q4_1"``.
        blocks: uint8 [rows, bytes per row], usually a read-only view of the mapped file.
        shape: ``(rows, columns)`` in values. A vector is one row.
    """

    encoding: str
    blocks: torch.Tensor
    shape: tuple[int, int]

    def __post_init__(self) -> None:
        layout = block_layout(self.encoding)
        rows, columns = self.shape
        if columns % layout.values:
            raise TensorError(
                f"{self.encoding} rows hold a multiple of {layout.values} values, not {columns}"
            )
        expected = (rows, columns // layout.values * layout.bytes)
        if self.blocks.dtype != torch.uint8 or tuple(self.blocks.shape) != expected:
            raise TensorError(
                f"{self.encoding} blocks for a {rows} x {columns} matrix are uint8 {expected}, "
                f"not {self.blocks.dtype} {tuple(self.blocks.shape)}"
            )

    @property
    def nbytes(self) -> int:
        """Bytes the blocks take."""
        return self.blocks.numel()

    def rows(self, index: torch.Tensor | slice) -> QuantizedTensor:
        """The chosen rows, still quantised: a view for a slice, a copy for an int64 index [n]."""
        if isinstance(index, slice):
            chosen = self.blocks[index]
        else:
            chosen = self.blocks.index_select(0, index.to(self.blocks.device))
        return QuantizedTensor(self.encoding, chosen, (chosen.shape[0], self.shape[1]))

    def padded(self, num_rows: int) -> QuantizedTensor:
        """The same rows with zero rows after them, a copy unless there are as many already."""
        missing = num_rows - self.shape[0]
        if missing == 0:
            return self
        blocks = F.pad(self.blocks, (0, 0, 0, missing))
        return QuantizedTensor(self.encoding, blocks, (num_rows, self.shape[1]))

    def covering(self, first: int, stop: int) -> QuantizedTensor:
        """The blocks that hold columns ``first`` .. ``stop - 1``, a view; see ``on_blocks``."""
        layout = block_layout(self.encoding)
        begin, end = first // layout.values, -(-stop // layout.values)
        chosen = self.blocks[:, begin * layout.bytes : end * layout.bytes]
        shape = (self.shape[0], (end - begin) * layout.values)
        return QuantizedTensor(self.encoding, chosen, shape)

    def expand_columns(self, first: int, out: torch.Tensor) -> torch.Tensor:
        """Fill ``out`` [rows, n] with columns of the matrix that ``covering`` was given.

        They are ``first`` .. ``first + n - 1`` of it, computed and rounded as in ``dequantize``.
        """
        skipped = first % block_layout(self.encoding).values
        if tuple(out.shape) == self.shape:
            return self.dequantize(out.dtype, out=out)
        step = max(1, _SERIAL_CHUNK // max(self.shape[1], 1))
        for row in range(0, self.shape[0], step):
            rows = self.rows(slice(row, row + step)).to(out.device)
            expanded = rows.dequantize(torch.float32)
            out[row : row + step].copy_(expanded[:, skipped : skipped + out.shape[1]])
        return out

    def to(self, device: torch.device | str) -> QuantizedTensor:
        """The same blocks on ``device``."""
        return QuantizedTensor(self.encoding, self.blocks.to(device), self.shape)

    def dequantize(self, dtype: torch.dtype, out: torch.Tensor | None = None) -> torch.Tensor:
        """The values, [rows, columns] in ``dtype``, computed in float32 and rounded once.

        ``out`` may be any strided tensor of that shape and dtype, on any device; scratch memory
        is one chunk of rows whatever the size of the matrix.

        Raises:
            TensorError: ``out`` has another shape or dtype.
        """
        if out is None:
            out = torch.empty(self.shape, dtype=dtype, device=self.blocks.device)
        elif tuple(out.shape) != self.shape or out.dtype != dtype:
            raise TensorError(
                f"dequantize needs out of shape {self.shape} and {dtype}, "
                f"not {tuple(out.shape)} and {out.dtype}"
            )
        layout = block_layout(self.encoding)
        num_rows, columns = self.shape
        num_blocks = columns // layout.values
        step = max(1, _chunk_values(out) // max(columns, 1))
        scratch: torch.Tensor | None = None
        for start in range(0, num_rows, step):
            stop = min(start + step, num_rows)
            blocks = self.blocks[start:stop].to(out.device)
            blocks_RBx = _unflatten(_aligned(blocks), 1, (num_blocks, layout.bytes))
            target = out[start:stop]
            if dtype == torch.float32 and target.is_contiguous():
                layout.expand(blocks_RBx, target.view(stop - start, num_blocks, layout.values))
                continue
            if scratch is None:
                size = (min(step, num_rows), num_blocks, layout.values)
                scratch = torch.empty(size, dtype=torch.float32, device=out.device)
            values = scratch[: stop - start]
            layout.expand(blocks_RBx, values)
            target.copy_(values.flatten(1))
        return out

    def q4_parts(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Nibbles, scale and minimum of a matrix in one of ``FOUR_BIT``.

        Returns ``(nibbles, scale, minimum)``: uint8 [rows, columns] with values 0 to 15 in column
        order, and float32 [rows, columns / 32] twice; a weight is ``nibble * scale + minimum``.
        For Q4_0 the minimum is -8 times the scale. Scratch is the size of the nibbles; take
        ``rows(slice)`` first to work in pieces.

        Raises:
            UnsupportedFormatError: for any other encoding.
        """
        if self.encoding not in FOUR_BIT:
            raise UnsupportedFormatError(
                f"4-bit parts exist for {', '.join(FOUR_BIT)} tensors, not for {self.encoding}"
            )
        rows, columns = self.shape
        layout = block_layout(self.encoding)
        sizes = (columns // layout.values, layout.bytes)
        blocks_RBx = _unflatten(_aligned(self.blocks), 1, sizes)
        if self.encoding == "Q4_K":
            nibbles = _nibbles(_unflatten(blocks_RBx[..., 16:], -1, (4, 32)))
            scale, negative = _k_scales(blocks_RBx)
            return nibbles.view(rows, columns), scale.flatten(1), negative.neg_().flatten(1)
        scale = _halves(blocks_RBx, 0)
        if self.encoding == "Q4_0":
            nibbles, minimum = _nibbles(blocks_RBx[..., 2:]), scale * -8.0
        else:
            nibbles, minimum = _nibbles(blocks_RBx[..., 4:]), _halves(blocks_RBx, 2)
        return nibbles.view(rows, columns), scale, minimum

    def q8_parts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Values and scale of a Q8_0 matrix: int8 [rows, columns], float32 [rows, columns / 32].

        Raises:
            UnsupportedFormatError: for any other encoding.
        """
        if self.encoding != "Q8_0":
            raise UnsupportedFormatError(f"8-bit parts exist for Q8_0, not for {self.encoding}")
        sizes = (self.shape[1] // 32, block_layout(self.encoding).bytes)
        blocks_RBx = _unflatten(_aligned(self.blocks), 1, sizes)
        return blocks_RBx[..., 2:].view(torch.int8).flatten(1), _halves(blocks_RBx, 0)


def supported_encodings() -> tuple[str, ...]:
    """The block encodings ``QuantizedTensor`` can expand."""
    return tuple(_LAYOUTS)


def on_blocks(encoding: str, first: int, stop: int) -> bool:
    """True when columns ``first`` .. ``stop - 1`` begin and end with a block of ``encoding``."""
    values = block_layout(encoding).values
    return first % values == 0 and stop % values == 0


def block_layout(encoding: str) -> BlockLayout:
    """The layout of ``encoding``.

    Raises:
        UnsupportedFormatError: naming the encodings that are read.
    """
    layout = _LAYOUTS.get(encoding)
    if layout is None:
        raise UnsupportedFormatError(
            f"encoding {encoding} is not one of {', '.join(supported_encodings())}"
        )
    return layout


def _chunk_values(out: torch.Tensor) -> int:
    if out.device.type != "cpu":
        return _DEVICE_CHUNK
    if out.numel() <= _SERIAL_LIMIT and torch.get_num_threads() > 1:
        return _SERIAL_CHUNK
    return _THREADED_CHUNK


def _unflatten(tensor: torch.Tensor, dim: int, sizes: tuple[int, ...]) -> torch.Tensor:
    parts: torch.Tensor = tensor.unflatten(dim, sizes)  # type: ignore[no-untyped-call]
    return parts


def _aligned(blocks: torch.Tensor) -> torch.Tensor:
    """Blocks whose bytes may be viewed as 16-bit values: an even offset and dense rows."""
    if blocks.storage_offset() % 2 or (blocks.shape[0] and blocks.stride(1) != 1):
        return blocks.clone(memory_format=torch.contiguous_format)
    if blocks.stride(0) % 2:
        return blocks.contiguous()
    return blocks


def _halves(blocks_RBx: torch.Tensor, offset: int) -> torch.Tensor:
    """The float16 at byte ``offset`` of every block, as float32 [R, B]."""
    return blocks_RBx[..., offset : offset + 2].view(torch.float16).squeeze(-1).float()


def _nibbles(packed_RBn: torch.Tensor) -> torch.Tensor:
    """uint8 [R, B, n] to [R, B, 2n]: all low nibbles of a block, then all its high ones."""
    packed = packed_RBn.contiguous()
    out = packed.new_empty((*packed.shape[:-1], 2, packed.shape[-1]))
    torch.bitwise_and(packed, 15, out=out[..., 0, :])
    torch.bitwise_right_shift(packed, 4, out=out[..., 1, :])
    return out.flatten(-2)


def _bit_planes(packed_RB4: torch.Tensor) -> torch.Tensor:
    """uint8 [R, B, n] to the 8n single bits of each block, lowest bit of the first byte first."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed_RB4.device)
    return ((packed_RB4.unsqueeze(-1) >> shifts) & 1).flatten(-2)


def _expand_q8_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(blocks[..., 2:].view(torch.int8))
    out.mul_(_halves(blocks, 0).unsqueeze(-1))


def _expand_q4_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(_nibbles(blocks[..., 2:]))
    out.sub_(8).mul_(_halves(blocks, 0).unsqueeze(-1))


def _expand_q4_1(blocks: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(_nibbles(blocks[..., 4:]))
    out.mul_(_halves(blocks, 0).unsqueeze(-1)).add_(_halves(blocks, 2).unsqueeze(-1))


def _expand_q5_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    high = _bit_planes(blocks[..., 2:6]).bitwise_left_shift_(4)
    out.copy_(_nibbles(blocks[..., 6:]).bitwise_or_(high))
    out.sub_(16).mul_(_halves(blocks, 0).unsqueeze(-1))


def _expand_q5_1(blocks: torch.Tensor, out: torch.Tensor) -> None:
    high = _bit_planes(blocks[..., 4:8]).bitwise_left_shift_(4)
    out.copy_(_nibbles(blocks[..., 8:]).bitwise_or_(high))
    out.mul_(_halves(blocks, 0).unsqueeze(-1)).add_(_halves(blocks, 2).unsqueeze(-1))


def _six_bit_scales(packed_RB12: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Q4_K and Q5_K sub-block scales and minima, uint8 [R, B, 8] each.

    Twelve bytes hold sixteen 6-bit numbers. The first four scales and minima are the low six bits
    of bytes 0-3 and 4-7; the last four keep their low nibbles in bytes 8-11 and their two high
    bits in the spare bits of bytes 0-3 and 4-7.
    """
    first, second, third = torch.split(packed_RB12, 4, dim=-1)
    scales = torch.cat((first & 63, (third & 15) | ((first >> 6) << 4)), dim=-1)
    minima = torch.cat((second & 63, (third >> 4) | ((second >> 6) << 4)), dim=-1)
    return scales, minima


def _k_scales(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What the sub-blocks of Q4_K and Q5_K are multiplied by, and what is then taken off them.

    FP32 [R, B, 8] each.
    """
    scales, minima = _six_bit_scales(blocks[..., 4:16])
    scale = scales.float().mul_(_halves(blocks, 0).unsqueeze(-1))
    return scale, minima.float().mul_(_halves(blocks, 2).unsqueeze(-1))


def _scale_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """Scale the integers in ``out`` by the sub-block scales of Q4_K and Q5_K, in place."""
    scale, minimum = _k_scales(blocks)
    _unflatten(out, -1, (8, 32)).mul_(scale.unsqueeze(-1)).sub_(minimum.unsqueeze(-1))


def _expand_q4_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(_nibbles(_unflatten(blocks[..., 16:], -1, (4, 32))).flatten(-2))
    _scale_k(blocks, out)


def _expand_q5_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device).unsqueeze(-1)
    high = (blocks[..., 16:48].unsqueeze(-2) >> shifts) & 1
    low = _nibbles(_unflatten(blocks[..., 48:], -1, (4, 32))).flatten(-2)
    out.copy_(low.bitwise_or_(high.bitwise_left_shift_(4).flatten(-2)))
    _scale_k(blocks, out)


def _expand_q6_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    # Two halves of 128 values: 64 bytes of low nibbles and 32 bytes of two-bit tops each.
    low = _nibbles(_unflatten(blocks[..., :128], -1, (2, 64)))
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device).unsqueeze(-1)
    top = (_unflatten(blocks[..., 128:192], -1, (2, 1, 32)) >> shifts) & 3
    values = low.bitwise_or_(top.bitwise_left_shift_(4).flatten(-2)).flatten(-2)
    out.copy_(values)
    scales = blocks[..., 192:208].view(torch.int8).float()
    scales.mul_(_halves(blocks, 208).unsqueeze(-1))
    _unflatten(out.sub_(32), -1, (16, 16)).mul_(scales.unsqueeze(-1))


_LAYOUTS = MappingProxyType(
    {
        "Q8_0": BlockLayout(32, 34, _expand_q8_0),
        "Q4_0": BlockLayout(32, 18, _expand_q4_0),
        "Q4_1": BlockLayout(32, 20, _expand_q4_1),
        "Q5_0": BlockLayout(32, 22, _expand_q5_0),
        "Q5_1": BlockLayout(32, 24, _expand_q5_1),
        "Q4_K": BlockLayout(256, 144, _expand_q4_k),
        "Q5_K": BlockLayout(256, 176, _expand_q5_k),
        "Q6_K": BlockLayout(256, 210, _expand_q6_k),
    }
)
