"""Functions of single rows, to the bit: what batch-invariant runs are made of, and its check.

Shape suffixes: T token rows, K columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from layline.errors import UsageError
from layline.kernels.rope import rotate_heads_

RowFunction = Callable[[torch.Tensor], torch.Tensor]
MATMUL_ROWS = 17
"""A whole tile and one row of the next."""
DIVIDED_VALUES = 150_000
"""Enough for torch to divide an elementwise operation among a few threads."""
SHIFTS = (1, 6)


@dataclass(frozen=True)
class RowClaim:
    """That ``function`` computes each row of [tokens, ``columns``] from that row alone."""

    function: RowFunction
    columns: int
    rows: int


@dataclass
class RowClaims:
    """The row functions of a model, each kind and size once, by name."""

    _claims: dict[str, RowClaim] = field(default_factory=dict)

    def matmul(self, name: str, function: RowFunction, columns: int) -> None:
        """Claim it of a matrix product."""
        self._claims.setdefault(name, RowClaim(function, columns, MATMUL_ROWS))

    def elementwise(self, name: str, function: RowFunction, columns: int) -> None:
        """Claim it of something that is done to each value, or to each row."""
        rows = DIVIDED_VALUES // columns + 7
        self._claims.setdefault(name, RowClaim(function, columns, rows))

    @torch.inference_mode()
    def check(self, dtype: torch.dtype, device: torch.device) -> None:
        """Try every function: the same rows alone, together and in another order, bit by bit.

        Raises UsageError where this machine and this build of torch do not hold a claim.
        """
        for name, claim in self._claims.items():
            generator = torch.Generator().manual_seed(claim.columns)
            x = torch.randn(claim.rows, claim.columns, generator=generator).to(device)
            # Between the matrices there are FP32 rows too, whatever the run's dtype.
            types = {dtype} if claim.rows == MATMUL_ROWS else {dtype, torch.float32}
            if not all(_holds(claim.function, x.to(each)) for each in types):
                raise UsageError(
                    f"batch_invariant does not hold here: torch {torch.__version__} gives a row of "
                    f"a {name} in {str(dtype).removeprefix('torch.')} other bits beside other "
                    "rows; expected another dtype, or a run without it"
                )


def _holds(function: RowFunction, x_TK: torch.Tensor) -> bool:
    whole = function(x_TK.clone())
    for shift in SHIFTS:
        if not same_bits(function(x_TK.roll(shift, 0)).roll(-shift, 0), whole):
            return False
    last = x_TK.shape[0] - 1
    return all(
        same_bits(function(x_TK[row : row + 1].clone()), whole[row : row + 1])
        for row in (0, last // 2, last)
    )


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype are equal bit by bit, signs of zeros too."""
    return torch.equal(
        one.contiguous().view(torch.uint8), other.to(one.dtype).contiguous().view(torch.uint8)
    )


def rotation_of_rows(num_heads: int, head_dim: int) -> tuple[RowFunction, int]:
    """The rotation of heads as a function of rows [heads, cosines, sines], and their columns."""

    def rotate(x_TK: torch.Tensor) -> torch.Tensor:
        heads, cos, sin = torch.split(x_TK, [num_heads * head_dim, head_dim, head_dim], dim=1)
        heads = heads.contiguous().view(-1, num_heads, head_dim)
        return rotate_heads_(heads, cos.unsqueeze(1), sin.unsqueeze(1)).flatten(1)

    return rotate, (num_heads + 2) * head_dim
