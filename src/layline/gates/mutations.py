"""What canaries exchange in an arm, so that one failure class comes back.

Programs here stand in for a stage's own; each leaves out, or shares, what keeps the class away.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from layline.engine.model import LoadedModel
from layline.engine.stage_program import ModelStage, StagedStep
from layline.engine.step import MeshStep, RankStep
from layline.gates.arms import Arm, ArmOptions, GateModel, Hooks
from layline.pipeline.access import Buffer
from layline.pipeline.controllers import Listed, ScriptedController
from layline.pipeline.counters import Counters
from layline.pipeline.device import StageDevice
from layline.pipeline.faults import Fault, Faults
from layline.pipeline.payload import Payload, layout_of
from layline.pipeline.stages import StageHome, StageProgram

SLEEP_CYCLES = 40_000_000


@dataclass(frozen=True)
class Bench:
    """What canaries are built on. ``flipped`` loads the last stage with the other exactness."""

    model: GateModel
    flipped: Callable[[], LoadedModel]


class Turns:
    """Streams advance in turn, one item each."""

    def __init__(self) -> None:
        self._latest = ""

    def ahead(self) -> int:
        """See Policy.ahead."""
        return 0

    def pick(self, names: Sequence[str]) -> str:
        """See Policy.pick."""
        later = [name for name in names if name > self._latest]
        self._latest = min(later or names)
        return self._latest


def ordered(
    bench: Bench, *first: str, stalled: str | None = None, turns: bool = False, **options: Any
) -> ArmOptions:
    """Streams that advance in an order which shows a failure.

    On the CPU they advance one at a time, those listed first (with ``turns`` in turn), and
    ``stalled`` only when no other can. On CUDA they run by themselves, and a ``stalled`` stage
    sleeps before every step.
    """
    if bench.model.plan.engine.device != "cpu":
        return _sleeping(stalled, **options)
    controller = ScriptedController(Turns() if turns else Listed(*first))
    hooks: Hooks = options.pop("hooks", Hooks())
    begin = hooks.start

    def start(arm: Arm) -> None:
        if stalled is not None:
            controller.stall(stalled)
        begin(arm)

    return ArmOptions(controller=controller, hooks=replace(hooks, start=start), **options)


def _sleeping(stalled: str | None, **options: Any) -> ArmOptions:
    before = options.pop("homes", list)

    def homes(given: list[StageHome]) -> list[StageHome]:
        return [
            replace(home, program=Sleepy(home.program)) if home.stream.name == stalled else home
            for home in before(given)
        ]

    return ArmOptions(homes=homes, **options)


@dataclass(frozen=True)
class Around:
    """A stage's program, around which something is done."""

    program: StageProgram

    def room(self, step: StagedStep) -> int:
        """See StageProgram."""
        return self.program.room(step)

    def prepare(self, step: StagedStep) -> None:
        """See StageProgram."""
        self.program.prepare(step)

    def run(self, step: StagedStep, entering: Payload | None) -> Any:
        """See StageProgram."""
        return self.program.run(step, entering)


@dataclass(frozen=True)
class Sleepy(Around):
    """A stage on a CUDA device that sleeps before each of its steps."""

    def run(self, step: StagedStep, entering: Payload | None) -> Any:
        """See StageProgram."""
        sleep_on_device()
        return self.program.run(step, entering)


def sleep_on_device() -> None:
    """Keep the current CUDA stream busy for some hundredths of a second."""
    spin: Any = torch.cuda._sleep  # No public name.
    spin(SLEEP_CYCLES)


def with_fault(options: ArmOptions, *faults: Fault) -> ArmOptions:
    """The same arm with failure classes re-created."""
    return replace(options, cut=replace(options.cut, faults=Faults(frozenset(faults))))


def of_programs(
    change: Callable[[StageHome], StageProgram],
) -> Callable[[list[StageHome]], list[StageHome]]:
    """For ArmOptions.homes: another program for every stage."""
    return lambda homes: [replace(home, program=change(home)) for home in homes]


@dataclass
class Latest:
    """The step that the host issued last."""

    step: MeshStep | None = None

    def note(self, _: Arm, step: MeshStep) -> None:
        """For Hooks.before_step."""
        self.step = step

    def leave(self, arm: Arm, step: MeshStep) -> None:
        """For Hooks.before_step: a task of the caller notes it."""
        arm.runtime.caller.run(partial(setattr, self, "step", step), label="leave a step")


@dataclass(frozen=True)
class OfTheLatest(Around):
    """Every stage but the first takes what a step says from the host's latest one.

    ``mixed`` makes the step that is run of the stage's own and the latest.
    """

    latest: Latest
    mixed: Callable[[RankStep, RankStep], RankStep]

    def run(self, step: StagedStep, entering: Payload | None) -> Any:
        """See StageProgram."""
        if entering is not None and self.latest.step is not None:
            (own,), (latest,) = step.step.parts, self.latest.step.parts
            parts = (self.mixed(own, latest),)
            step = replace(step, step=replace(step.step, parts=parts))
        return self.program.run(step, entering)


def latest_positions(own: RankStep, latest: RankStep) -> RankStep:
    """The stage's rows at the latest step's positions."""
    pairs = zip(own.spans, latest.spans, strict=False)
    moved = [replace(span, start=other.start) for span, other in pairs]
    return replace(own, spans=(*moved, *own.spans[len(moved) :]))


def latest_tables(own: RankStep, latest: RankStep) -> RankStep:
    """The stage's rows with the latest step's block tables."""
    pairs = zip(own.spans, latest.spans, strict=False)
    moved = [replace(span, blocks=other.blocks) for span, other in pairs]
    return replace(own, spans=(*moved, *own.spans[len(moved) :]))


class Arena:
    """Bytes that grow to the largest result."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def keep(self, tensors: Payload) -> Payload:
        """Copies of ``tensors`` at the beginning of the arena, one behind the other."""
        layout = layout_of(tensors)
        device = next(iter(tensors.values())).device
        if self._bytes.numel() < layout.size or self._bytes.device != device:
            self._bytes = torch.empty(layout.size, dtype=torch.uint8, device=device)
        memory = self._bytes[: layout.size]
        return {part.name: part.of(memory).copy_(tensors[part.name]) for part in layout.parts}


@dataclass(frozen=True)
class InArena(Around):
    """A stage that keeps what enters it in ``arena``, and then what it hands on."""

    arena: Arena

    def run(self, step: StagedStep, entering: Payload | None) -> Any:
        """See StageProgram."""
        if entering is not None:
            entering = self.arena.keep(entering)
        found = self.program.run(step, entering)
        return self.arena.keep(found) if isinstance(found, dict) else found


@dataclass(frozen=True)
class FromTheCaller(Around):
    """The first stage runs the step that a task of the caller has left for it."""

    box: Latest

    def run(self, step: StagedStep, entering: Payload | None) -> Any:
        """See StageProgram."""
        if entering is None:
            if self.box.step is None:
                raise RuntimeError("the caller has left no step yet")
            step = replace(step, step=self.box.step)
        return self.program.run(step, entering)


@dataclass(frozen=True)
class Sentinel(Around):
    """The first stage is fed the id of a row whose logits were all NaN, -1."""

    loaded: LoadedModel
    checks: bool

    def run(self, step: StagedStep, entering: Payload | None) -> Any:
        """See StageProgram."""
        if entering is None:
            ids = torch.tensor([-1], device=self.loaded.device)
            if self.checks:
                # As the engine feeds what the step before sampled.
                self.loaded.runner.feed((-1,), ids)
            else:
                table = self.loaded.runner.model.embed_tokens
                assert table is not None
                table(ids)
        return self.program.run(step, entering)


@dataclass(frozen=True)
class ByRowCount(Around):
    """A stage that takes a prompt's last row for a decode, because it is one row."""

    def run(self, step: StagedStep, entering: Payload | None) -> Any:
        """See StageProgram."""
        (part,) = step.step.parts
        if part.num_tokens == 1:
            parts = (replace(part, num_decode=1),)
            step = replace(step, step=replace(step.step, parts=parts))
        return self.program.run(step, entering)


class StuckCounters(Counters):
    """Counters that never move."""

    def add(self, name: str, amount: int = 1) -> None:
        """See Counters."""


def other_part(index: int, loaded: LoadedModel) -> Callable[[list[StageHome]], list[StageHome]]:
    """For ArmOptions.homes: stage ``index`` runs another loaded part."""

    def homes(before: list[StageHome]) -> list[StageHome]:
        changed = replace(before[index], program=ModelStage(index, loaded.runner))
        return [*before[:index], changed, *before[index + 1 :]]

    return homes


def caches_with_the_first(homes: list[StageHome]) -> list[StageHome]:
    """Every cache on the first stage's device."""
    device = homes[0].device
    return [replace(home, cache=_moved(home.cache, device)) for home in homes]


def _moved(buffer: Buffer, device: StageDevice) -> Buffer:
    return Buffer(buffer.name, device)
