"""Which tokens of a verified step are the request's. No torch here."""

from __future__ import annotations

from layline.engine.step_plan import StepEntry


def is_verified(entry: StepEntry) -> bool:
    """Whether the token drawn from the entry's row comes next in its request.

    It does when the row was fed what the request's latest token has turned out to be. Asked row by
    row, while the tokens of the rows before it are accepted.
    """
    request = entry.request
    if entry.ahead == 0:
        return True
    if entry.span.length != request.num_tokens:
        return False  # An earlier draft was wrong.
    return request.output_ids[-1] == request.drafts[entry.ahead - 1]
