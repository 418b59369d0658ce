"""A small pipeline whose every bit depends on order: stages with state, and cuts between them.

Each stage scales what comes, adds its state, and changes that. So a payload that is lost, early,
late or doubled shows in all later steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from layline.pipeline.access import Buffer
from layline.pipeline.cells import Cell
from layline.pipeline.device import StageDevice
from layline.pipeline.payload import Payload, room_for
from layline.pipeline.readback import PendingLogits
from layline.pipeline.streams import Stream, Streams
from layline.pipeline.transport import Boundary, CutOptions

WIDTH = 8
TIMEOUT_S = 60.0


class Stage:
    """A stage's compute. Its state is a cache of its own, read and written by every step."""

    def __init__(self, number: int, stream: Stream) -> None:
        self.number = number
        self.stream = stream
        self.state = Buffer(f"state {number}", stream.device)
        self._value = torch.zeros(WIDTH, device=stream.device.torch_device)

    def compute(self, inputs: Payload) -> Payload:
        """The next stage's payload: hidden states, and from odd stages on a residual too."""
        hidden = inputs["hidden_states"] * 1.25 + self._value + self.number
        if "residual" in inputs:
            hidden = hidden + inputs["residual"] * 0.5
        self._value = self._value * 0.5 + hidden.sum(dim=0) / 64
        result = {"hidden_states": hidden}
        if self.number % 2:
            result["residual"] = torch.sin(hidden)
        return result


@dataclass(frozen=True)
class Run:
    """What a program did: every step's output, and the slots its first cut used."""

    outputs: list[Tensor]
    slots: list[int]


class Chain:
    """Stages on streams "stage 0", "stage 1", ..., cuts between neighbours, and a readback."""

    def __init__(
        self,
        streams: Streams,
        num_stages: int = 2,
        *,
        options: CutOptions | None = None,
        ordinals: Sequence[int] | None = None,
    ) -> None:
        places = ordinals or range(num_stages)
        self.streams = streams
        self.options = options or CutOptions(timeout_s=TIMEOUT_S)
        self.stages = [
            Stage(number, streams.stream(f"stage {number}", place))
            for number, place in zip(range(num_stages), places, strict=True)
        ]
        self.cuts = [
            Boundary(f"cut {number}", first.stream, second.stream, streams, options=self.options)
            for number, (first, second) in enumerate(
                zip(self.stages[:-1], self.stages[1:], strict=True)
            )
        ]
        self.readback = streams.stream("readback", places[-1])
        self.slots: list[int] = []

    def issue(self, x: Tensor, *, overlap: bool) -> PendingLogits:
        """Issue one step on every stage, and give what will come out of the last."""
        cell = self._run_stage(self.stages[0], None, x)
        for number, (cut, stage) in enumerate(zip(self.cuts, self.stages[1:], strict=True)):
            room = room_for(tuple(x.shape), x.dtype)
            slot = cut.send(cell, room, overlap=overlap)
            if number == 0:
                self.slots.append(slot)
            cell = self._run_stage(stage, cut.receive(slot), None)
        return self.pending(cell)

    def pending(self, cell: Cell[Payload]) -> PendingLogits:
        last = self.stages[-1].stream
        logits = last.run(partial(_logits, cell), reads=cell.buffers, label="logits")
        return PendingLogits(logits, last, self.readback, self.streams, faults=self.options.faults)

    def run(self, inputs: Sequence[Tensor], *, window: int = 1, overlap: bool = False) -> Run:
        """All steps, with at most ``window`` that have not been read back."""
        outputs: list[Tensor] = []
        waiting: deque[PendingLogits] = deque()
        for x in inputs:
            if len(waiting) == window:
                outputs.append(waiting.popleft().wait(TIMEOUT_S))
            waiting.append(self.issue(x, overlap=overlap))
        outputs += [pending.wait(TIMEOUT_S) for pending in waiting]
        return Run(outputs, self.slots)

    def _run_stage(
        self, stage: Stage, incoming: Cell[Payload] | None, x: Tensor | None
    ) -> Cell[Payload]:
        return stage.stream.run(
            partial(_compute, stage, incoming, x),
            reads=(stage.state, *(incoming.buffers if incoming is not None else ())),
            writes=(stage.state,),
            label=f"layers of stage {stage.number}",
        )


def _compute(stage: Stage, incoming: Cell[Payload] | None, x: Tensor | None) -> Payload:
    if incoming is not None:
        return stage.compute(incoming.get())
    assert x is not None
    return stage.compute({"hidden_states": x.to(stage.stream.device.torch_device)})


def _logits(cell: Cell[Payload]) -> Tensor:
    return cell.get()["hidden_states"].clone()


def steps(num_steps: int, *, seed: int = 0, most_rows: int = 5) -> list[Tensor]:
    """Inputs [rows, WIDTH] of uneven rows, wide ones first and last."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(1, most_rows + 1, (num_steps,), generator=generator).tolist()
    return [torch.randn(n, WIDTH, generator=generator) for n in rows]


def reference(
    inputs: Sequence[Tensor], num_stages: int, device: StageDevice | None = None
) -> list[Tensor]:
    """The same steps one after the other in this thread, without streams or cuts."""
    here: Any = SimpleNamespace(device=device or StageDevice("cpu", 0))
    stages = [Stage(number, here) for number in range(num_stages)]
    outputs = []
    with torch.inference_mode():
        for x in inputs:
            payload: Payload = {"hidden_states": x.to(here.device.torch_device)}
            for stage in stages:
                payload = stage.compute(payload)
            outputs.append(payload["hidden_states"].cpu())
    return outputs


def same_bits(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    """Whether two runs' outputs agree in shape and in every bit."""
    return len(first) == len(second) and all(
        a.shape == b.shape and torch.equal(a.view(torch.int32), b.view(torch.int32))
        for a, b in zip(first, second, strict=True)
    )
