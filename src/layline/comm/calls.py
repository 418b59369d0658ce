"""What a rank brings to a collective, and the checks it can make alone. Nothing here needs torch.

Real and simulated groups refuse the same calls with the same words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from layline.comm.groups import CollectiveKind
from layline.errors import CollectiveError
from layline.topology import GroupName


@dataclass(frozen=True, slots=True)
class Call:
    """One rank's call of a collective: its input's shape and dtype.

    ``counts`` are rows for each rank, of a reduce-scatter-v only. Two calls fit when they are
    equal.
    """

    kind: CollectiveKind
    rows: int
    columns: int
    dtype: str
    counts: tuple[int, ...] | None = None

    @property
    def is_empty(self) -> bool:
        """True when no value crosses, so that every rank may skip the collective."""
        return self.rows * self.columns == 0

    def __str__(self) -> str:
        counts = "" if self.counts is None else f" with counts {list(self.counts)}"
        return f"{self.kind.value} of [{self.rows}, {self.columns}] {self.dtype}{counts}"


def make_call(
    kind: CollectiveKind,
    x: Any,
    where: tuple[GroupName, int],
    counts: Sequence[int] | None = None,
) -> Call:
    """The call that ``x`` makes on a group of ``where`` (its name and size).

    Raises CollectiveError when ``x`` is not two-dimensional, when a sum is asked of a dtype that
    is not floating point, and when ``size`` or ``counts`` do not fit the rows.
    """
    name, size = where
    label = f"{kind.value} on {name.value}"
    if x.dim() != 2:
        raise CollectiveError(
            f"{label}: a tensor of shape {list(x.shape)}; expected [rows, columns]"
        )
    dtype = str(x.dtype).removeprefix("torch.")
    rows, columns = x.shape
    if kind is not CollectiveKind.ALL_GATHER and not _can_be_summed(x):
        raise CollectiveError(
            f"{label}: {dtype} is not summed; expected float32, float64, bfloat16 or float16"
        )
    if kind is CollectiveKind.REDUCE_SCATTER and rows % size:
        raise CollectiveError(
            f"{label}: {rows} rows do not divide over {size} ranks; "
            f"expected a multiple such as {-(-rows // size) * size}"
        )
    if kind is not CollectiveKind.REDUCE_SCATTER_V:
        return Call(kind, rows, columns, dtype)
    shares = tuple(counts or ())
    if len(shares) != size or min(shares) < 0 or sum(shares) != rows:
        raise CollectiveError(
            f"{label}: counts {list(shares)} do not fit; expected {size} counts of at least 0 "
            f"that add up to {rows} rows"
        )
    return Call(kind, rows, columns, dtype, shares)


def _can_be_summed(x: Any) -> bool:
    return bool(x.is_floating_point()) and x.element_size() > 1
