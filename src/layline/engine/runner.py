"""Run one step's model pass: build the batch, walk the layers, score the rows that sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from layline.boundary.layout import BatchVariant
from layline.boundary.mesh import Mesh
from layline.boundary.rows import kind_of, rank_rows
from layline.engine.input_ids import InputIds, PlacedIds
from layline.engine.outcome import FailedRow
from layline.engine.pass_clock import PassClock
from layline.engine.rank_part import RankPart, part_of
from layline.engine.reading import Reading
from layline.engine.row_reader import RowReader
from layline.engine.step import MeshStep
from layline.layers.attention import AttentionBackend
from layline.layers.cache_slots import slot_numbers
from layline.layers.forward_batch import ContextRows, ForwardBatch
from layline.layers.parallel import compute_group
from layline.layers.spans import SequenceSpan
from layline.layers.transfer import upload
from layline.models.decoder import Decoder
from layline.topology import GroupName, Topology


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a stage needs of a step itself: ``ids`` where it has the embedding."""

    batch: ForwardBatch
    ids: PlacedIds | None


class Runner:
    """Executes this rank's part of mesh steps on one device.

    Every rank of the mesh is given every step, in the same order.
    """

    def __init__(
        self,
        model: Decoder,
        backend: AttentionBackend,
        block_size: int,
        device: torch.device,
        mesh: Mesh | None = None,
        cp_layout: str = "contiguous",
    ) -> None:
        self.model = model
        self._backend = backend
        self._block_size = block_size
        self._device = device
        self._windows = model.windows
        self._mesh = mesh or Mesh()
        self._cp_layout = cp_layout
        self._cp_group = compute_group(self._mesh, GroupName.ATTN_CP)
        self._ids = InputIds(device, self._mesh)
        self.clock = PassClock(device)

    @property
    def topology(self) -> Topology:
        """The mesh of the layers that are here, and this rank's place in it."""
        return self._mesh.topology

    def run(self, step: MeshStep, sampled: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [sampling rows, vocabulary] of this DP rank, in row order.

        ``sampled`` are the ids that the step before gave, int64 [its sampled rows], where this rank
        draws them. A step in which no prompt of it is complete gives no rows.
        """
        return self.score(self.hidden_states(step, sampled), step)

    def run_reading(
        self, step: MeshStep, sampled: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, list[Reading | FailedRow]]:
        """Logits as :meth:`run` gives them, and what the step's reads on this DP rank give."""
        return self.finish(self.hidden_states(step, sampled), step)

    def finish(
        self, hidden: torch.Tensor, step: MeshStep
    ) -> tuple[torch.Tensor, list[Reading | FailedRow]]:
        """What :meth:`run_reading` gives, of hidden states that are there already."""
        here = self._mesh.topology.coordinates
        logits = self.score(hidden, step)
        part = step.parts[here.attn_dp]
        if not part.reads:
            return logits, []
        reader = RowReader(self.model, self._cp_group, here.attn_cp)
        return logits, reader.read(hidden, part, self._part(step))

    def hidden_states(self, step: MeshStep, sampled: torch.Tensor | None = None) -> torch.Tensor:
        """Normalised hidden states of this rank's rows, [tokens, hidden]; the cache is written."""
        hidden = self.walk(step, None, sampled)
        assert isinstance(hidden, torch.Tensor), "one stage has both ends"
        return hidden

    def walk(
        self,
        step: MeshStep,
        entering: Mapping[str, torch.Tensor] | None,
        sampled: torch.Tensor | None = None,
        prepared: Prepared | None = None,
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """This pipeline stage's part of a step, as Decoder.run_stage gives it.

        ``entering`` is what the stage before returned; the first stage has None, and ``sampled`` as
        :meth:`run`. ``prepared`` is what :meth:`prepare` made of the step before, if it did.
        """
        ready = prepared or self.prepare(step)
        entry: torch.Tensor | Mapping[str, torch.Tensor]
        if entering is None:
            assert ready.ids is not None, "the first stage has the embedding"
            entry = self._ids.fill(ready.ids, sampled)
        else:
            entry = entering
        self.clock.lap("prepare")
        return self.model.run_stage(entry, ready.batch)

    def prepare(self, step: MeshStep) -> Prepared:
        """All that this stage needs of a step beside what enters it."""
        part = self._part(step)
        ids = self._ids.prepare(part.token_ids) if self.model.part.is_first else None
        return Prepared(self._batch(step, part), ids)

    def feed(self, token_ids: Sequence[int], sampled: torch.Tensor | None) -> torch.Tensor:
        """Ids [tokens] for the embedding; see InputIds."""
        return self._ids.of(token_ids, sampled)

    def score(self, hidden: torch.Tensor, step: MeshStep) -> torch.Tensor:
        """Logits of those rows of ``hidden`` that the step samples from, on this DP rank.

        In a context-parallel batch a row is on one of the CP ranks; all of them get its logits.
        """
        part = self._part(step)
        if step.rows.variant is BatchVariant.CONTEXT_PARALLEL and self._cp_group is not None:
            return self.model.logits(self._joined_rows(hidden, part))
        rows = [row for row in part.sampling_rows if row is not None]
        if len(rows) != hidden.shape[0]:
            index = upload(np.array(rows, dtype=np.int64), self._device)
            hidden = hidden.index_select(0, index)
        return self.model.logits(hidden)

    def _joined_rows(self, hidden: torch.Tensor, part: RankPart) -> torch.Tensor:
        assert self._cp_group is not None
        if not part.sampling_rows:
            return hidden[:0]
        own = [(at, row) for at, row in enumerate(part.sampling_rows) if row is not None]
        rows = hidden.new_zeros((len(part.sampling_rows), hidden.shape[1]))
        for at, row in own:
            rows[at] = hidden[row]
        joined: torch.Tensor = self._cp_group.all_reduce(rows)
        return joined

    def _part(self, step: MeshStep) -> RankPart:
        return part_of(step, self._mesh.topology, self._cp_layout)

    def _batch(self, step: MeshStep, part: RankPart) -> ForwardBatch:
        spans = part.spans
        positions = _positions(spans)
        lengths = None
        if self.model.rope_is_dynamic:
            counts = [span.count for span in spans]
            each = np.array([span.rope_length for span in spans], dtype=np.int64)
            lengths = upload(np.repeat(each, counts), self._device)
        cos, sin = self.model.rotations(part.phase, upload(positions, self._device), lengths)
        topology = self._mesh.topology
        single = topology.is_single
        return ForwardBatch(
            phase=part.phase,
            rope_cos=cos,
            rope_sin=sin,
            slots=self._slots(part.cached_spans),
            attention=self._backend.plan(part.phase, spans, self._windows),
            kind=kind_of(step.rows, topology),
            rows=None if single else rank_rows(step.rows, topology, prefill=step.prefills),
            ffn_phase=None if single else step.ffn_phase,
            context_parallel=self._context(part),
        )

    def _context(self, part: RankPart) -> ContextRows | None:
        if part.join_order is None:
            return None
        order = upload(np.array(part.join_order, dtype=np.int64), self._device)
        return ContextRows(part.join_width, order)

    def _slots(self, spans: Sequence[SequenceSpan]) -> torch.Tensor | slice:
        size = self._block_size
        ones, others = _divided(spans)
        starts = [(span.blocks[span.start // size], span.start % size) for span in ones]
        slots = _joined(
            [block * size + row for block, row in starts],
            [slot_numbers(span, span.start, span.length, size) for span in others],
        )
        # A plain copy is a fraction of an indexed one; one sequence's rows are mostly consecutive.
        if len(slots) and (np.diff(slots) == 1).all():
            return slice(int(slots[0]), int(slots[0]) + len(slots))
        return upload(slots, self._device)


def _positions(spans: Sequence[SequenceSpan]) -> np.ndarray:
    """Positions of the spans' tokens, int64 [tokens]."""
    ones, others = _divided(spans)
    ranges = [np.arange(span.start, span.length, dtype=np.int64) for span in others]
    return _joined([span.start for span in ones], ranges)


def _divided(
    spans: Sequence[SequenceSpan],
) -> tuple[Sequence[SequenceSpan], Sequence[SequenceSpan]]:
    """The leading spans of one token, and the others: those are quicker without arrays."""
    count = next((i for i, span in enumerate(spans) if span.count != 1), len(spans))
    return spans[:count], spans[count:]


def _joined(numbers: Sequence[int], arrays: Sequence[np.ndarray]) -> np.ndarray:
    """``numbers`` and then those of ``arrays``, int64."""
    first = np.array(numbers, dtype=np.int64)
    return np.concatenate([first, *arrays]) if arrays else first
