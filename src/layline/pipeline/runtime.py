"""The runtime of N stages in one process: walks, fences and barriers.

The host issues, streams run. A step goes stage by stage: receive from the cut, walk the stage's
layers, send into the next cut. What orders two stages is the cut's slots alone; what orders the
pipeline with its caller are the entry fence and the publication of results:

- before a walk every stage waits for the caller's point, so that memory which the caller freed or
  still reads is not written too early;
- after it the caller's stream waits for the last stage;
- after loading, and after a cache is made, every stream is waited for once.

The caller is a stream on the primary device. The unsplit walk runs there too, through all stages'
programs: a gate's reference arm, and what a loop without a split does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from layline.errors import RunError, UnsplitError
from layline.pipeline.access import Buffer
from layline.pipeline.cells import Cell, Inlet
from layline.pipeline.counters import Counters
from layline.pipeline.faults import Fault
from layline.pipeline.graphs import own_step
from layline.pipeline.payload import Payload
from layline.pipeline.readback import PendingLogits, PendingResult
from layline.pipeline.stages import StageHome
from layline.pipeline.streams import Capture, Stream, Streams
from layline.pipeline.transport import Boundary, CutOptions

WAIT_S = 300.0
"""How long barriers wait for a stream."""


Entry = Cell[Payload] | Inlet[Payload]
Entering = Entry | Callable[[], Entry]
"""What the first stage of a walk is given, or what issues the task that brings it."""


class PipelineRuntime:
    """Stages, the cuts between them, and the caller's stream. One host thread at a time issues.

    Args:
        stages: In order, each on its stream.
        caller: The stream that uses results and admits caches, on the primary device.
        streams: What the stages' streams were made by.
        counters: Counts splits, slot growth and remote reads.
        options: For every cut; faults in it are re-created by the runtime too.
    """

    def __init__(
        self,
        stages: Sequence[StageHome],
        caller: Stream,
        streams: Streams,
        *,
        counters: Counters | None = None,
        options: CutOptions | None = None,
    ) -> None:
        if not stages:
            raise RunError("a pipeline has no stages; expected at least one")
        self.stages = tuple(stages)
        self.caller = caller
        self.counters = counters or Counters()
        self._streams = streams
        given = options or CutOptions()
        self.faults = given.faults
        self._timeout_s = given.timeout_s
        cut = CutOptions(given.timeout_s, given.poison, given.faults, self.counters.add)
        self.cuts = tuple(
            Boundary(f"cut {stage.index}", stage.stream, after.stream, streams, options=cut)
            for stage, after in zip(self.stages, self.stages[1:], strict=False)
        )
        self._entry = streams.event("caller's point")
        self._exit = streams.event("end of the last stage")
        self._readback = streams.stream("readback", self.last.device.ordinal)

    @property
    def last(self) -> StageHome:
        """The stage with the head."""
        return self.stages[-1]

    # Walks.

    def walk(
        self,
        step: Any,
        entering: Entering | None = None,
        *,
        overlap: bool,
        within: Callable[[int], AbstractContextManager[None]] | None = None,
    ) -> Cell[Any]:
        """Issue one step on every stage; the last stage's result.

        Publishing it is the caller's to ask for: a caller whose stream waited for this step would
        have the next step's entry fence wait for it as well, and nothing would overlap.

        ``entering`` is a payload for the first stage, from a task that is ordered before it, or
        issues that task. With ``overlap`` the cuts alternate their slots. ``within(stage)`` is a
        scope around that stage's layers, where they run.
        """
        self.fence_stages_behind(self.caller)
        crossing: Cell[Any] | None = None
        # Stages may be a run of a longer pipeline's, so places here are not their numbers.
        for place, stage in enumerate(self.stages):
            if stage.device.kind == "cpu":
                # On CUDA the host does it all in one go, and waits for no stage meanwhile.
                stage.stream.run(
                    partial(_prepare, stage, step),
                    writes=(stage.scratch,),
                    label=f"prepare stage {stage.index}",
                )
            entry = self.cuts[place - 1].receive() if place > 0 else entered(entering)
            scope = None if within is None else partial(within, stage.index)
            crossing = self.turn(stage, step, entry, within=scope)
            if stage is not self.last:
                room = stage.program.room(own_step(step, stage.index))
                self.cuts[place].send(crossing, room, overlap=overlap)
        assert crossing is not None
        return crossing

    def turn(
        self,
        stage: StageHome,
        step: Any,
        entering: Entry | None,
        on: Stream | None = None,
        within: Callable[[], AbstractContextManager[None]] | None = None,
    ) -> Cell[Any]:
        """Issue one stage's layers for one step, on its own stream or ``on`` another.

        ``within`` makes a scope around the walk, in the task.
        """
        stream = on or stage.stream
        if stage.weights.device != stream.device:
            self.counters.add("remote_reads")
            self.counters.add("remote_read_bytes", stage.weight_bytes)
        scratch = stage.scratch
        if Fault.SHARED_SCRATCH in self.faults:
            scratch = self.stages[0].scratch
        return stream.run(
            partial(_walk, stage, step, entering, within),
            reads=(stage.weights, *(() if entering is None else entering.buffers)),
            writes=(stage.cache, scratch),
            label=f"stage {stage.index}",
        )

    def walk_unsplit(self, step: Any, entering: Entry | None = None) -> Cell[Any]:
        """All layers on the caller's stream; remote stages' weights are read where they are.

        Stages' streams must have nothing under way: call :meth:`drain` after split walks.
        Raises UnsplitError on CUDA for weights on several devices, which no operation may mix.
        """
        devices = {stage.weights.device for stage in self.stages} | {self.caller.device}
        if len(devices) > 1 and self.caller.device.kind == "cuda":
            raise UnsplitError(
                f"an unsplit walk would compute with weights of {len(devices)} CUDA devices, which "
                "torch refuses; expected a loop that is split over the stages, or one device"
            )
        entry, crossing = entering, None
        for stage in self.stages:
            entry = crossing = self.turn(stage, step, entry, on=self.caller)
        assert crossing is not None
        return crossing

    def pending(self, result: Cell[Any], on: Stream) -> PendingLogits:
        """Read a walk's result back without stopping the stages. Call right after the walk.

        ``on`` is the stream that it is on: the last stage's, or the caller's of an unsplit walk.
        """
        return PendingLogits(result, on, self._readback, self._streams, faults=self.faults)

    def capture(self) -> AbstractContextManager[Capture]:
        """See Streams.capture. No step may be under way."""
        return self._streams.capture()

    def outcome(self, result: Cell[Any], on: Stream) -> PendingResult:
        """Wait for a walk's result, whatever it is, where it is. Call as :meth:`pending`."""
        return PendingResult(result, on, self._streams)

    # What orders the pipeline with its caller.

    def fence_stages_behind(self, caller: Stream) -> None:
        """Every stage waits for the caller's present point."""
        if Fault.DROP_ENTRY_FENCE in self.faults:
            return
        caller.record(self._entry)
        for stage in self.stages:
            if stage.stream is not caller:
                stage.stream.wait(self._entry)

    def publish_to(self, caller: Stream) -> None:
        """The caller's stream waits for the last stage; nothing to do where they are one."""
        if caller is self.last.stream or Fault.DROP_PUBLISH in self.faults:
            return
        self.last.stream.record(self._exit)
        caller.wait(self._exit)

    def admit(self, task: Callable[[], None], caches: Sequence[Buffer] | None = None) -> None:
        """Run a task of the caller that writes the stages' caches, between steps.

        The caller waits for what the stages do with them now, and their next walk for the task.
        """
        buffers = tuple(stage.cache for stage in self.stages) if caches is None else tuple(caches)
        if Fault.DROP_BIRTH_BARRIER not in self.faults:
            self.drain()
        self.caller.run(task, writes=buffers, label="admit caches")
        if Fault.DROP_BIRTH_BARRIER not in self.faults:
            self.caller.synchronize(self._timeout_s)

    def load_barrier(self) -> None:
        """Wait for all that loading has issued, wherever it was."""
        if Fault.DROP_LOAD_BARRIER not in self.faults:
            self._streams.settle()
            self.drain()

    def drain(self) -> None:
        """Wait in the host until every stage and the caller have ended what was issued.

        Raises RunError after the timeout, naming the stream, and what a task raised.
        """
        for stage in self.stages:
            stage.stream.synchronize(self._timeout_s)
        self.caller.synchronize(self._timeout_s)


def entered(entering: Entering | None) -> Entry | None:
    """The payload, with the task that brings it issued now if it was not."""
    return entering() if callable(entering) else entering


def _prepare(stage: StageHome, step: Any) -> None:
    stage.program.prepare(own_step(step, stage.index))


def _walk(
    stage: StageHome,
    step: Any,
    entering: Entry | None,
    within: Callable[[], AbstractContextManager[None]] | None,
) -> Any:
    payload = None if entering is None else entering.get()
    with nullcontext() if within is None else within():
        return stage.program.run(own_step(step, stage.index), payload)
