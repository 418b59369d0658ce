"""Which new tokens of a prompt each attention CP rank computes. No torch here.

Contiguous parts are the simplest to gather; zigzag gives every rank an early and a late piece, so
that causal attention costs them about the same.
"""

from __future__ import annotations

from layline.config import CP_LAYOUTS
from layline.errors import UsageError, one_of


def split_context(count: int, cp: int, layout: str) -> list[list[range]]:
    """The ranges of ``range(count)`` that each of ``cp`` ranks takes, by rank; none is empty.

    ``contiguous`` cuts into ``cp`` parts in order, ``zigzag`` into ``2 * cp`` pieces of which rank
    ``i`` takes pieces ``i`` and ``2 * cp - 1 - i``. Pieces are as even as possible, the longer ones
    first. A chunk of a prompt is divided by its own tokens alone. Raises UsageError for an unknown
    layout.
    """
    if layout not in CP_LAYOUTS:
        raise UsageError(one_of("cp_layout", layout, CP_LAYOUTS))
    if layout == "contiguous":
        return [[part] if part else [] for part in _pieces(count, cp)]
    pieces = _pieces(count, 2 * cp)
    return [
        [piece for piece in (pieces[rank], pieces[2 * cp - 1 - rank]) if piece]
        for rank in range(cp)
    ]


def _pieces(count: int, parts: int) -> list[range]:
    least, longer = divmod(count, parts)
    pieces: list[range] = []
    start = 0
    for part in range(parts):
        end = start + least + (part < longer)
        pieces.append(range(start, end))
        start = end
    return pieces
