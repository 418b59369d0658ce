"""What a pipeline runs: one program for each stage, and what the stage owns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from layline.pipeline.access import Buffer
from layline.pipeline.device import StageDevice
from layline.pipeline.payload import Payload
from layline.pipeline.streams import Stream


class StageProgram(Protocol):
    """The compute of one stage. The runtime knows neither models nor what a step is.

    A program makes its own copy of what a step says (positions, cache slots, token ids), so that
    nothing of one stage's is read on another's device.
    """

    def room(self, step: Any) -> int:
        """Bytes that this stage hands on in ``step`` at most; 0 for the last stage."""

    def prepare(self, step: Any) -> None:
        """Make what the stage needs of the step itself, before what enters is waited for."""

    def run(self, step: Any, entering: Payload | None) -> Any:
        """Walk the stage's layers.

        ``entering`` is what the stage before handed on, or what the caller gave the first stage.
        Returns a payload; the last stage whatever the caller wants of it, its logits as a rule.
        """


@dataclass(frozen=True, eq=False)
class StageHome:
    """One stage: where it runs, what it runs, and the memory that is its own.

    Attributes:
        index: Its number, from 0.
        stream: Its ordered stream, on its device.
        program: Its compute.
        cache: Its layers' keys and values.
        scratch: Whatever its compute overwrites in every step.
        weights: Where its layers' weights are; on another device when sharding is rolled back.
        weight_bytes: Their size, which a remote stage reads in every step.
    """

    index: int
    stream: Stream
    program: StageProgram
    cache: Buffer
    scratch: Buffer
    weights: Buffer
    weight_bytes: int = 0

    @property
    def device(self) -> StageDevice:
        """Where it runs."""
        return self.stream.device


def stage_home(
    index: int,
    stream: Stream,
    program: StageProgram,
    *,
    weights_on: StageDevice | None = None,
    weight_bytes: int = 0,
) -> StageHome:
    """A stage with buffers of its own; ``weights_on`` is where its weights are, if elsewhere."""
    device = stream.device
    return StageHome(
        index=index,
        stream=stream,
        program=program,
        cache=Buffer(f"cache of stage {index}", device),
        scratch=Buffer(f"scratch of stage {index}", device),
        weights=Buffer(f"weights of stage {index}", weights_on or device),
        weight_bytes=weight_bytes,
    )
