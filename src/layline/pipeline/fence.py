"""Which layers a pipeline stage has: fences and cuts. No torch here.

A fence is ``(0, c1, .., num_layers)``; stage ``s`` has the layers from ``fence[s]`` to
``fence[s + 1] - 1``, and the numbers between the ends are the cuts.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

from layline.errors import UsageError

Fence = tuple[int, ...]


def even_fence(num_layers: int, num_stages: int) -> Fence:
    """The fence with cut ``s`` at ``floor(s * num_layers / num_stages)``.

    Raises UsageError unless every stage gets a layer.
    """
    check_stages(num_stages, num_layers)
    return tuple(stage * num_layers // num_stages for stage in range(num_stages + 1))


def fence_of(cuts: Sequence[int], num_layers: int) -> Fence:
    """The fence with these cuts. Raises UsageError as :func:`check_cuts` does."""
    check_cuts(cuts, num_layers)
    return (0, *cuts, num_layers)


def check_stages(num_stages: int, num_layers: int) -> None:
    """Raise UsageError unless a stack of ``num_layers`` can have this many stages."""
    if not 1 <= num_stages <= num_layers:
        near = min(max(num_stages, 1), num_layers)
        raise UsageError(
            f"pp_stages {num_stages} does not fit the model's {num_layers} layers; expected 1 to "
            f"{num_layers}; the nearest is {near}"
        )


def check_cuts(cuts: Sequence[int], num_layers: int, num_stages: int | None = None) -> None:
    """Raise UsageError unless the cuts increase strictly inside the stack.

    With ``num_stages`` there must also be one fewer than stages.
    """
    wanted = len(cuts) if num_stages is None else num_stages - 1
    increases = all(first < second for first, second in pairwise(cuts))
    if len(cuts) == wanted and increases and all(0 < cut < num_layers for cut in cuts):
        return
    kept = sorted({cut for cut in cuts if 0 < cut < num_layers})
    if len(kept) != wanted and wanted < num_layers:
        kept = list(even_fence(num_layers, wanted + 1)[1:-1])
    raise UsageError(
        f"pp_splits {listed(cuts)} does not cut {num_layers} layers into {wanted + 1} stages; "
        f"expected {wanted} increasing layer numbers from 1 to {num_layers - 1}"
        + (f"; the nearest is {listed(kept)}" if len(kept) == wanted else "")
    )


def boundaries(fence: Fence) -> tuple[int, ...]:
    """The cuts: boundary ``b`` is between stage ``b`` and stage ``b + 1``."""
    return fence[1:-1]


def stage_of(fence: Fence, layer: int) -> int:
    """The stage that has ``layer``; layers beyond the stack (NextN) are with the last stage."""
    assert layer >= 0, "layers are counted from 0"
    return min(bisect_right(fence, layer), len(fence) - 1) - 1


def layers_of(fence: Fence, stage: int) -> range:
    """The layers of one stage."""
    return range(fence[stage], fence[stage + 1])


def listed(numbers: Sequence[int]) -> str:
    """Numbers as they are written on the command line: ``10,20``."""
    return ",".join(map(str, numbers))
