"""The total transition table of one token axis, and what it makes of a move over several.

A layout nests DP, CP and TP scatter, outermost first, so an axis may change only while every axis
inside it is whole.
"""

from __future__ import annotations

import functools
from enum import Enum

from layline.boundary.layout import Layout, TokenAxis
from layline.errors import DeclarationError

AXES = tuple(TokenAxis)  # Outermost first.


class Transition(Enum):
    """What happens along one axis."""

    NONE = "none"
    SLICE = "slice"
    ALL_GATHER = "all-gather"
    ALL_REDUCE = "all-reduce"
    REDUCE_SCATTER = "reduce-scatter"
    UNSUPPORTED = "unsupported"


# (a sum is owed over the axis, rows divided before, rows divided after)
TRANSITIONS = {
    (False, False, False): Transition.NONE,
    (False, True, True): Transition.NONE,
    (False, False, True): Transition.SLICE,
    (False, True, False): Transition.ALL_GATHER,
    (True, False, False): Transition.ALL_REDUCE,
    (True, False, True): Transition.REDUCE_SCATTER,
    # Ranks that hold different rows cannot be summed.
    (True, True, True): Transition.UNSUPPORTED,
    (True, True, False): Transition.UNSUPPORTED,
}


@functools.cache
def transport(
    before: Layout, after: Layout, owed: frozenset[TokenAxis] = frozenset()
) -> tuple[tuple[Transition, TokenAxis], ...]:
    """Transitions that bring rows from ``before`` to ``after`` and complete the owed sum, in order.

    Gathers come first, innermost axis first; then completions and slices, outermost first. Raises
    DeclarationError when a sum is owed over an axis that divides the rows.
    """
    for axis in AXES:
        if axis in owed and axis in before.sharded:
            raise DeclarationError(
                f"no transport completes a sum over {axis.value} on rows [{before}] divided over "
                f"the same axis on the way to rows [{after}]"
            )
    steps: list[tuple[Transition, TokenAxis]] = []
    current = set(before.sharded)
    changing = [index for index, axis in enumerate(AXES) if _changes(axis, before, after)]
    outermost = min(changing, default=len(AXES))
    for index in reversed(range(outermost, len(AXES))):
        axis = AXES[index]
        if axis in current and (axis not in after.sharded or index > outermost):
            steps.append((Transition.ALL_GATHER, axis))
            current.discard(axis)
    for axis in AXES:
        transition = TRANSITIONS[axis in owed, axis in current, axis in after.sharded]
        if transition is not Transition.NONE:
            steps.append((transition, axis))
    return tuple(steps)


def _changes(axis: TokenAxis, before: Layout, after: Layout) -> bool:
    return (axis in before.sharded) != (axis in after.sharded)
