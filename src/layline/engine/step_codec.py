"""Steps as messages, and back. A block table travels once, not with every step that uses it."""

from __future__ import annotations

from collections.abc import Sequence

from layline.boundary.layout import BatchVariant
from layline.boundary.rows import DpPadding, StepRows
from layline.engine.balance import SampleRow
from layline.engine.reading import RowRead
from layline.engine.step import MeshStep, RankStep
from layline.engine.wire import Part, Step, WireError
from layline.layers.spans import SequenceSpan

KEPT_STEPS = 256
"""A table that this many steps did not use is forgotten on both sides."""


class _Table:
    __slots__ = ("blocks", "length", "number", "used")

    def __init__(self, number: int, blocks: Sequence[int], used: int) -> None:
        self.number = number
        # Kept, so that the identity by which it is found stays its own.
        self.blocks = blocks
        self.length = len(blocks)
        self.used = used


class StepEncoder:
    """The driver's side. Tables count as known only after :meth:`sent`."""

    def __init__(self) -> None:
        self._known: dict[int, _Table] = {}
        self._next = 0
        self._fresh: dict[int, _Table] = {}
        self._stale: list[int] = []

    def encode(
        self,
        number: int,
        step: MeshStep,
        rows: Sequence[Sequence[SampleRow]],
        before: int = 0,
        *,
        draft: bool = False,
    ) -> Step:
        """The message of a step, of the draft model's where ``draft`` says so.

        ``before`` is the number of the step whose tokens it is fed.
        """
        self._fresh = {}
        parts = [self._part(number, part) for part in step.parts]
        self._stale = [
            key
            for key, table in self._known.items()
            if key in self._fresh or number - table.used > KEPT_STEPS
        ]
        return Step(
            number=number,
            before=before,
            parts=parts,
            variant=step.rows.variant.value,
            counts=[list(counts) for counts in step.rows.counts],
            padding=step.rows.padding.value,
            rows=[[(row.request_id, row.index, row.ahead) for row in part] for part in rows],
            tables={table.number: list(table.blocks) for table in self._fresh.values()},
            dropped=[self._known[key].number for key in self._stale],
            draft=draft,
        )

    def sent(self) -> None:
        """The latest message is on its way to every rank."""
        for key in self._stale:
            self._known.pop(key, None)
        self._known.update(self._fresh)
        self._stale, self._fresh = [], {}

    def _part(self, step: int, part: RankStep) -> Part:
        spans = [
            (span.start, span.count, self._number(step, span.blocks), span.rope_length)
            for span in part.spans
        ]
        reads = [
            (read.span, read.first, read.count, list(read.next_ids), read.top, read.vocab)
            for read in part.reads
        ]
        return Part(part.num_decode, spans, list(part.token_ids), list(part.samples), reads)

    def _number(self, step: int, blocks: Sequence[int]) -> int:
        key = id(blocks)
        table = self._fresh.get(key) or self._known.get(key)
        if table is None or table.length != len(blocks):
            table = self._fresh[key] = _Table(self._next, blocks, step)
            self._next += 1
        table.used = step
        return table.number


class StepDecoder:
    """A rank's side."""

    def __init__(self) -> None:
        self._tables: dict[int, list[int]] = {}

    def decode(self, message: Step) -> tuple[MeshStep, list[list[SampleRow]]]:
        """The step and its sampled rows. Raises WireError for a table that never came."""
        for number in message.dropped:
            self._tables.pop(number, None)
        self._tables.update(message.tables)
        try:
            parts = tuple(self._part(part) for part in message.parts)
            variant, padding = BatchVariant(message.variant), DpPadding(message.padding)
        except (KeyError, ValueError) as error:
            raise WireError(f"step {message.number} names what is not known: {error}") from None
        counts = tuple(map(tuple, message.counts))
        rows = [[SampleRow(*row) for row in part] for part in message.rows]
        return MeshStep(parts, StepRows(variant, counts, padding)), rows

    def _part(self, part: Part) -> RankStep:
        spans = tuple(
            SequenceSpan(start, count, self._tables[table], rope_length)
            for start, count, table, rope_length in part.spans
        )
        reads = tuple(RowRead(*read[:3], tuple(read[3]), *read[4:]) for read in part.reads)
        return RankStep(part.num_decode, spans, tuple(part.token_ids), tuple(part.samples), reads)


def in_series(number: int, before: int, step: MeshStep) -> bool:
    """Whether step ``number`` goes on from the one right before it: stages take turns then."""
    return before == number - 1 and any(part.num_fed for part in step.parts)
