"""The loops that steps come in, each with its split over the stages and its way back.

| loop | split | rollback door |
| --- | --- | --- |
| eager | one step, read before the next | LAYLINE_PP_STREAMS=0 (one stream) |
| deferred | up to four steps in flight, each read when the caller asks | |
| batch | as many microbatches in flight as there are stages | LAYLINE_BATCH_PP=0 |
| verify | one step of several rows for a request | LAYLINE_SPEC_PP=0 |
| graph | a step's walk captured once and replayed | LAYLINE_PP_STREAMS=0 |
| prime | a prompt's chunks one after the other | LAYLINE_PRIME_PP=0 |
| prime, pipelined | chunk c + 1 on a stage while c is on the next | LAYLINE_PRIME_PIPE=0 |

Doors are looked at in every call. A loop whose door is shut walks all layers on the caller's
stream, which is refused while weights are on other devices; prime's is not, being what a gate
compares with.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from layline.errors import RunError
from layline.pipeline.cells import Cell
from layline.pipeline.counters import WalkerWatch
from layline.pipeline.faults import Fault
from layline.pipeline.graphs import WalkCache
from layline.pipeline.guards import (
    UnwiredLoops,
    refuse_chunk_pipeline,
    refuse_deferred,
    refuse_unsplit_if_remote,
)
from layline.pipeline.payload import Payload, copied
from layline.pipeline.placement import Placement, Residency
from layline.pipeline.runtime import Entering, PipelineRuntime, entered
from layline.pipeline.streams import Stream

MOST_DEFERRED = 4
"""Steps that deferred decode may have in flight."""

_BATCH_WAY = "LAYLINE_BATCH_PP unset, which splits batches over the stages"
_VERIFY_WAY = "LAYLINE_SPEC_PP unset, which splits verification over the stages"


class LoopDoors(Protocol):
    """What the loops ask of the doors, each time anew."""

    @property
    def streams(self) -> bool: ...

    @property
    def overlap(self) -> bool: ...

    @property
    def batch(self) -> bool: ...

    @property
    def verify(self) -> bool: ...

    @property
    def prime(self) -> bool: ...

    @property
    def prime_pipe(self) -> bool: ...

    @property
    def allow_unsplit_batch(self) -> bool: ...

    @property
    def force_same_device_pipelined(self) -> bool: ...


@dataclass(frozen=True)
class Site:
    """Where the stages are, and where their weights really are."""

    placement: Placement
    residency: Residency


class Waitable(Protocol):
    """A step's result on its way."""

    def is_done(self) -> bool: ...


Read = TypeVar("Read", bound=Waitable)
Reader = Callable[[Cell[Any], Stream], Read]
"""How results are read: :meth:`PipelineRuntime.pending` or :meth:`PipelineRuntime.outcome`."""


class Loops(Generic[Read]):
    """Steps on a runtime. One host thread at a time calls.

    ``report`` gets a line for each loop that runs without a split; ``read`` follows each walk.
    """

    def __init__(
        self,
        runtime: PipelineRuntime,
        doors: LoopDoors,
        site: Site,
        report: Callable[[str], None],
        read: Reader[Read],
    ) -> None:
        self.runtime = runtime
        self._read = read
        self._doors = doors
        self._site = site
        self._unwired = UnwiredLoops(report)
        self._under_way: list[Read] = []
        self._watch = WalkerWatch(runtime.counters, "step_overlaps")
        self._numbers = itertools.count()
        self._graphs = WalkCache(runtime, copied)

    @property
    def _count(self) -> Callable[..., None]:
        return self.runtime.counters.add

    @property
    def _splits(self) -> bool:
        return Fault.NEVER_SPLIT not in self.runtime.faults

    def eager(self, step: Any, entering: Cell[Payload] | None = None) -> Read:
        """One step; wait for it before the next. With streams off it is on one stream."""
        if not self._doors.streams or not self._splits:
            return self._unsplit(step, entering)
        result = self.runtime.walk(step, entering, overlap=self._doors.overlap)
        self.runtime.publish_to(self.runtime.caller)
        self._count("eager_splits")
        return self._split(result)

    def deferred(self, step: Any, entering: Cell[Payload] | None = None) -> Read:
        """One of up to four steps in flight: the caller reads each when it likes.

        Raises UnsplitError where that is refused, and RunError for a fifth that nobody reads.
        """
        refuse_deferred(
            self._site.placement,
            streams=self._doors.streams,
            forced=self._doors.force_same_device_pipelined,
        )
        self._under_way = [each for each in self._under_way if not each.is_done()]
        if len(self._under_way) >= MOST_DEFERRED:
            raise RunError(
                f"{len(self._under_way)} steps are in flight; expected at most {MOST_DEFERRED}, "
                "read one first"
            )
        if not self._splits:
            return self._unsplit(step, entering)
        pending = self._split(self._watched(step, entering, overlap=True))
        self._count("deferred_splits")
        self._under_way.append(pending)
        return pending

    def batch(
        self, microbatches: Sequence[Any], entering: Sequence[Cell[Payload] | None] | None = None
    ) -> list[Read]:
        """A step in microbatches of disjoint requests, which follow each other through the stages.

        Raises UnsplitError when the door is shut and weights are remote.
        """
        entering = entering or [None] * len(microbatches)
        alternates = len(microbatches) > 1
        pairs = zip(microbatches, entering, strict=True)
        found = [self.microbatch(step, cell, overlap=alternates) for step, cell in pairs]
        if self._batch_splits:
            self.runtime.publish_to(self.runtime.caller)
        return found

    def microbatch(
        self, step: Any, entering: Entering | None = None, *, overlap: bool = True
    ) -> Read:
        """One microbatch, in order after those under way. Raises as :meth:`batch`."""
        if not self._batch_splits:
            allowed = self._doors.allow_unsplit_batch
            self._refuse("batched decode", _BATCH_WAY, allowed=allowed)
            return self._unsplit(step, entering)
        result = self._watched(step, entering, overlap=overlap)
        self._count("batch_splits")
        return self._split(result)

    @property
    def _batch_splits(self) -> bool:
        return self._doors.batch and self._splits

    def verify(self, step: Any, entering: Entering | None = None) -> Read:
        """One step that scores a request's drafts. Raises UnsplitError as :meth:`batch` does."""
        if not self._doors.verify or not self._splits:
            self._refuse("verification", _VERIFY_WAY)
            return self._unsplit(step, entering)
        result = self.runtime.walk(step, entering, overlap=self._doors.overlap)
        self.runtime.publish_to(self.runtime.caller)
        self._count("verify_splits")
        return self._split(result)

    def graph(self, step: Any, key: Hashable) -> Read:
        """One step, replayed from a walk that was captured for ``key``: what its work depends on.

        A step that captures waits for those before it.
        """
        if not self._doors.streams or not self._splits:
            return self._unsplit(step)
        if key not in self._graphs:
            self.runtime.drain()
        result = self._graphs.run(step, key)
        self._count("graph_splits")
        return self._split(result)

    def prime(self, chunks: Sequence[Any], *, num_prompts: int = 1) -> list[Read]:
        """The chunks of one prompt or several, in order; what each leaves on the last stage.

        Raises UnsplitError where stages share a device and chunks would overlap.
        """
        if Fault.EMPTY_UNDERFLOW in self.runtime.faults:
            self.runtime.stages[0].program.room(chunks[len(chunks) - 1])
        if num_prompts > 1:
            self._count("prime_batches")
        if not self._doors.prime or not self._splits:
            return [self._unsplit(chunk) for chunk in chunks]
        pipelined = self._doors.prime_pipe and len(chunks) > 1
        if pipelined:
            refuse_chunk_pipeline(self._site.placement)
            self._prewarm(chunks)
        grown = self.runtime.counters["growth_events"]
        watch = WalkerWatch(self.runtime.counters)
        found = []
        for number, chunk in enumerate(chunks):
            found.append(self._prime_chunk(chunk, number, watch, overlap=pipelined))
            if num_prompts > 1:
                self._count("prime_batch_splits")
            if not pipelined or Fault.SERIAL_CHUNKS in self.runtime.faults:
                self.runtime.drain()
        if pipelined:
            self._count("late_growths", self.runtime.counters["growth_events"] - grown)
        self.runtime.publish_to(self.runtime.caller)
        return found

    def _prewarm(self, chunks: Sequence[Any]) -> None:
        """Grow the cuts before the first chunk: in the middle a growth would drain its receiver."""
        if Fault.SKIP_PREWARM in self.runtime.faults:
            return
        for cut, stage in zip(self.runtime.cuts, self.runtime.stages, strict=False):
            cut.prewarm(max(stage.program.room(chunk) for chunk in chunks))

    def _watched(self, step: Any, entering: Entering | None, *, overlap: bool) -> Cell[Any]:
        """A walk in which overlap with others is counted."""
        number = next(self._numbers)

        def within(stage: int) -> AbstractContextManager[None]:
            return self._watch.walking(stage, number)

        return self.runtime.walk(step, entering, overlap=overlap, within=within)

    def _prime_chunk(self, chunk: Any, number: int, watch: WalkerWatch, *, overlap: bool) -> Read:
        def within(stage: int) -> AbstractContextManager[None]:
            return watch.walking(stage, number)

        result = self.runtime.walk(chunk, overlap=overlap, within=within)
        self._count("prime_split_chunks")
        return self._split(result)

    def unwired(self, loop: str, alternative: str) -> None:
        """For a loop that has no split: warns once, or refuses where weights are remote."""
        self._unwired.enter(
            loop,
            alternative,
            self._site.residency,
            allowed=self._doors.allow_unsplit_batch,
        )

    def _refuse(self, path: str, alternative: str, *, allowed: bool = False) -> None:
        refuse_unsplit_if_remote(path, alternative, self._site.residency, allowed=allowed)

    def _split(self, result: Cell[Any]) -> Read:
        return self._read(result, self.runtime.last.stream)

    def _unsplit(self, step: Any, entering: Entering | None = None) -> Read:
        found = entered(entering)
        self.runtime.drain()
        result = self.runtime.walk_unsplit(step, found)
        return self._read(result, self.runtime.caller)
