"""Which rows of a step are read, and what becomes of the readings. No torch here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from layline.engine.reading import Reading, RowRead
from layline.engine.request import Request
from layline.engine.step_plan import StepEntry


def reads_of(entries: Sequence[StepEntry]) -> Iterator[RowRead]:
    """The reads of a step with these entries, as far as earlier steps have not read."""
    for number, entry in enumerate(entries):
        request, span = entry.request, entry.span
        if request.reading is None:
            continue
        start = max(span.start, request.num_read)
        rows = request.reading.rows(request.prompt_ids, start, span.length)
        if rows:
            yield request.reading.of_span(request.prompt_ids, rows, number, span.start)


def take_reading(request: Request, reading: Reading) -> None:
    """Add what a step has read to what earlier ones have."""
    if request.reading is not None and request.reading.vocab:
        request.prompt_logprobs += reading  # type: ignore[arg-type]
    elif request.hidden_sum:
        request.hidden_sum = [a + b for a, b in zip(request.hidden_sum, reading, strict=True)]  # type: ignore[operator]
    else:
        request.hidden_sum = list(reading)  # type: ignore[arg-type]
