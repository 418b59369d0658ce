"""Pipeline stages on ranks in other processes, as the driver sees them. No torch here."""

from __future__ import annotations

from collections.abc import Sequence

from layline.engine.balance import SampleRow
from layline.engine.executor import ForwardingExecutor, Launched
from layline.engine.remote import RemoteExecutor
from layline.engine.step import MeshStep
from layline.engine.wire import Pipeline
from layline.errors import UnsplitError
from layline.pipeline.doors import Doors
from layline.topology import Topology


class StagedRanks(ForwardingExecutor):
    """Ranks that walk a step over the stages, and have no other way: the doors to one refuse."""

    def __init__(self, executor: RemoteExecutor, doors: Doors) -> None:
        super().__init__(executor)
        self._ranks = executor
        self._doors = doors

    @property
    def num_overlapped(self) -> int:
        """See RemoteExecutor."""
        return self._ranks.num_overlapped

    def launch(
        self, step: MeshStep, rows: Sequence[Sequence[SampleRow]], before: Launched | None, /
    ) -> Launched:
        """See Executor. Raises UnsplitError where a door is shut."""
        verifies = any(row.ahead for part in rows for row in part)
        door = "LAYLINE_SPEC_PP" if verifies else "LAYLINE_BATCH_PP"
        if not (self._doors.verify if verifies else self._doors.batch):
            raise UnsplitError(
                f"the stages are on ranks of their own, and no rank has all layers; expected "
                f"{door} unset, or tp 1 and pp_processes 1"
            )
        return super().launch(step, rows, before)


def stages_of(pipeline: Pipeline | None, topology: Topology) -> range | None:
    """The stages that the rank ``topology`` stands on runs, where there are several."""
    if pipeline is None:
        return None
    here, processes = topology.coordinates.pp, pipeline.processes
    first = processes.index(here)
    return range(first, first + processes.count(here))
