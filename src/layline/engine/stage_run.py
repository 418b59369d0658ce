"""Which pipeline stages one rank's process runs. No torch here."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from layline.engine.wire import Pipeline
from layline.models.stack import LayerRange
from layline.pipeline.fence import Fence, layers_of
from layline.pipeline.placement import Placement
from layline.topology import Topology


@dataclass(frozen=True)
class StageRun:
    """The run of stages that the rank ``topology`` stands on drives, among all of them.

    ``topology`` has a pipeline rank for each process of ``placement``.
    """

    fence: Fence
    placement: Placement
    topology: Topology

    @classmethod
    def of(cls, pipeline: Pipeline, topology: Topology) -> StageRun:
        """What a rank was sent."""
        placement = Placement(tuple(pipeline.devices), tuple(pipeline.processes))
        return cls(tuple(pipeline.fence), placement, topology)

    @property
    def process(self) -> int:
        """This rank's place among the processes that have runs of stages."""
        return self.topology.coordinates.pp

    @property
    def stages(self) -> range:
        """The stages here."""
        processes = self.placement.processes
        first = processes.index(self.process)
        return range(first, first + processes.count(self.process))

    @property
    def longest(self) -> int:
        """Most stages that a process has."""
        return max(Counter(self.placement.processes).values())

    @property
    def num_stages(self) -> int:
        """All stages."""
        return self.placement.num_stages

    @property
    def is_first(self) -> bool:
        """True when the first stage is here."""
        return self.stages.start == 0

    @property
    def is_last(self) -> bool:
        """True when the last stage is here, which draws tokens."""
        return self.stages.stop == self.num_stages

    def layers(self, stage: int) -> LayerRange:
        """The layers of a stage."""
        layers = layers_of(self.fence, stage)
        return LayerRange(layers.start, layers.stop, self.fence[-1])
