"""How much of each prompt a step computes. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

from layline.engine.request import Request
from layline.engine.waiting import Ticket

Divide = Callable[[int], Sequence[int]]
"""The chunks, in tokens, that a prompt of so many tokens is computed in."""


def chunks_of_step(
    prompts: Iterable[tuple[Ticket, bool]],
    budget: int,
    filling: set[bytes],
    block_size: int,
    divide: Divide | None,
) -> list[tuple[Request, int]]:
    """Whose prompt to compute, and how many tokens of it, ``budget`` at most in all.

    ``prompts`` come with whether others are behind them; ``filling`` gets the keys of the blocks
    that the step fills, for who begins with one waits for the next step. A prompt that does not end
    in this step takes half of what is left when others are behind it, so that one long prompt never
    holds up all that are shorter. None goes beyond its chunk, where ``divide`` gives prompts any.
    """
    chunks: list[tuple[Request, int]] = []
    for ticket, more in prompts:
        request = ticket.request
        start = request.num_computed
        count = _left_of_chunk(request, divide)
        if count > budget:
            count = max(1, budget // 2) if more else budget
        full = (start + count) // block_size
        filling.update(ticket.keys[start // block_size : full])
        chunks.append((request, count))
        budget -= count
        if budget == 0:
            break
    for number, (request, count) in enumerate(chunks):
        # What was left for others and has found nobody.
        extra = min(budget, _left_of_chunk(request, divide) - count)
        chunks[number] = (request, count + extra)
        budget -= extra
    return chunks


def _left_of_chunk(request: Request, divide: Divide | None) -> int:
    """Tokens until the prompt, or the chunk that it is in, ends."""
    start, total = request.num_computed, len(request.prompt_ids)
    if divide is None:
        return total - start
    return next(end for end in accumulate(divide(total)) if end > start) - start
