"""A deterministic estimate of what layers cost, from shapes alone. No torch here.

A part takes as long as the longer of its arithmetic and its memory traffic, the roofline model
(Williams, Waterman and Patterson, 2009), in bytes of traffic: an operation counts as 1 /
``operations_per_byte``. It compares parts with each other; it predicts no seconds. Measured costs
take its place as another :class:`layline.pipeline.cuts.StackCost`.
"""

from __future__ import annotations

from dataclasses import dataclass

from layline.pipeline.cuts import PartCost, StackCost

OPERATIONS_PER_BYTE = {"cpu": 10, "cuda": 200}
"""Nominal: how many operations a device does while it reads a byte of memory."""


@dataclass(frozen=True, kw_only=True)
class PartShape:
    """What one layer or end multiplies, reads and keeps.

    ``multiplied`` weights meet every row; each row does ``attended`` multiply-adds with each key
    that it sees, at most ``window`` of them; each token leaves ``cached`` entries. ``weights`` are
    what it holds; ``scored_only`` ends see one row of each sequence.
    """

    weights: int
    multiplied: int
    attended: int = 0
    cached: int = 0
    window: int | None = None
    scored_only: bool = False


@dataclass(frozen=True, kw_only=True)
class StackShape:
    """The shapes of a model, and the bytes of a weight and of a cached entry."""

    layers: tuple[PartShape, ...]
    embedding: PartShape
    head: PartShape
    itemsize: int
    cached_itemsize: int
    operations_per_byte: int


@dataclass(frozen=True, kw_only=True)
class Load:
    """What one item of work has: ``rows`` of ``sequences``, each with ``context`` keys."""

    rows: int
    sequences: int
    context: int


def cost_of(part: PartShape, stack: StackShape, load: Load) -> float:
    """The cost of one part for one item, in bytes of traffic."""
    rows = load.sequences if part.scored_only else load.rows
    keys = load.context if part.window is None else min(load.context, part.window)
    operations = 2 * rows * (part.multiplied + part.attended * keys)
    traffic = part.multiplied * stack.itemsize
    traffic += load.sequences * keys * part.cached * stack.cached_itemsize
    return max(operations / stack.operations_per_byte, float(traffic))


def held_by(part: PartShape, stack: StackShape, kept_tokens: int) -> int:
    """Bytes of a part's weights and of what it keeps of ``kept_tokens`` tokens."""
    return part.weights * stack.itemsize + part.cached * kept_tokens * stack.cached_itemsize


def stack_cost(stack: StackShape, load: Load, kept_tokens: int) -> StackCost:
    """The estimate for a whole model; memory is weights and the cache of ``kept_tokens``."""

    def part(shape: PartShape) -> PartCost:
        return PartCost(
            cost=cost_of(shape, stack, load), num_bytes=held_by(shape, stack, kept_tokens)
        )

    return StackCost(
        layers=tuple(part(shape) for shape in stack.layers),
        embedding=part(stack.embedding),
        head=part(stack.head),
        unit="bytes",
        source=(
            f"estimated for {load.rows} rows of {load.sequences} sequences with {load.context} "
            f"tokens each, {stack.operations_per_byte} operations a byte"
        ),
    )


def chunk_load(start: int, stop: int) -> Load:
    """A chunk of a prompt: its rows see half of their own chunk and all that is before it."""
    return Load(rows=stop - start, sequences=1, context=(start + stop) // 2)
