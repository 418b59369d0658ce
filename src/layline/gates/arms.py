"""The arms of a gate: a model on one stage, and the same model over pipeline stages.

Both run the same steps with the same threads and kernels, over caches that hold NaN wherever no
step has written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch

from layline.boundary.mesh import Mesh
from layline.engine.model import LoadedModel, load_part
from layline.engine.pipeline_load import StagePlan, load_stages, stage_homes
from layline.engine.runner import Runner
from layline.engine.scheduler import BLOCK_SIZE
from layline.engine.stage_program import StagedStep
from layline.engine.step import MeshStep
from layline.gates.scenarios import Call, Scenario
from layline.pipeline.access import AccessRecorder
from layline.pipeline.counters import Counters
from layline.pipeline.lanes import Controller
from layline.pipeline.loops import LoopDoors, Loops, Site
from layline.pipeline.readback import PendingLogits
from layline.pipeline.runtime import PipelineRuntime
from layline.pipeline.stages import StageHome
from layline.pipeline.streams import make_streams
from layline.pipeline.transport import CutOptions
from layline.weights.checkpoint import Checkpoint

WAIT_S = 120.0


@dataclass(frozen=True)
class GateModel:
    """The weights of all arms, loaded once: the whole model, and its stages."""

    plan: StagePlan
    whole: LoadedModel
    stages: tuple[LoadedModel, ...]

    @classmethod
    def load(cls, plan: StagePlan, checkpoint: Checkpoint) -> GateModel:
        """Raises CheckpointError for a bad file."""
        last = plan.device(plan.num_stages - 1)
        whole = load_part(plan.facts, checkpoint, Mesh(plan.facts.spec), last)
        return cls(plan, whole, tuple(load_stages(plan, checkpoint)))

    def fresh_caches(self, num_blocks: int) -> None:
        """New caches for every arm."""
        for loaded in (self.whole, *self.stages):
            loaded.bind_cache(num_blocks)
            poison_cache(loaded)


@dataclass(frozen=True)
class FixedDoors:
    """The pipeline's doors as they were at one look; see pipeline.doors.Doors."""

    streams: bool
    overlap: bool
    batch: bool
    verify: bool
    prime: bool
    prime_pipe: bool
    allow_unsplit_batch: bool
    force_same_device_pipelined: bool

    @classmethod
    def of(cls, doors: LoopDoors, **changed: bool) -> FixedDoors:
        """What ``doors`` say now, but for those that are ``changed``."""
        values = {name: getattr(doors, name) for name in cls.__dataclass_fields__}
        return cls(**{**values, **changed})


@dataclass
class Hooks:
    """What a canary does beside the steps; ``end`` comes when the arm's streams have ended."""

    start: Callable[[Arm], None] = lambda arm: None
    before_step: Callable[[Arm, MeshStep], None] = lambda arm, step: None
    after_step: Callable[[Arm, PendingLogits], None] = lambda arm, pending: None
    after_call: Callable[[Arm, Call], None] = lambda arm, call: None
    end: Callable[[], None] = lambda: None


@dataclass(frozen=True, kw_only=True)
class ArmOptions:
    """How an arm is built; the defaults are those of a gate that should be green.

    ``homes`` may exchange what the stages are made of, ``counters`` those of the runtime.
    """

    cut: CutOptions = field(default_factory=lambda: CutOptions(WAIT_S, poison=True))
    controller: Controller | None = None
    recorder: AccessRecorder | None = None
    homes: Callable[[list[StageHome]], list[StageHome]] = lambda homes: homes
    counters: Callable[[], Counters] = Counters
    caller_on: int | None = None
    site: Callable[[Site], Site] = lambda site: site
    hooks: Hooks = field(default_factory=Hooks)


class Arm:
    """A runtime over the stages, and its loops."""

    def __init__(
        self, model: GateModel, runtime: PipelineRuntime, doors: LoopDoors, options: ArmOptions
    ) -> None:
        self.model = model
        self.runtime = runtime
        self.warnings: list[str] = []
        self.site = options.site(model.plan.site())
        self.loops: Loops[PendingLogits] = Loops(
            runtime, doors, self.site, self.warnings.append, runtime.pending
        )
        self.hooks = options.hooks

    def run(self, scenario: Scenario) -> list[torch.Tensor]:
        """What every step of the scenario gives, in order. Raises what the loops raise."""
        self.hooks.start(self)
        found: list[torch.Tensor] = []
        for call in scenario.calls:
            found += self._run_call(call)
        self.runtime.drain()
        return found

    def _run_call(self, call: Call) -> list[torch.Tensor]:
        if call.loop == "deferred":
            return self._windowed(call, self.loops.deferred)
        if call.loop == "graph":
            return self._windowed(call, lambda step: self.loops.graph(step, shape_of(step)))
        if call.loop in ("eager", "verify"):
            one = self.loops.eager if call.loop == "eager" else self.loops.verify
            found = []
            for step in call.steps:
                self.hooks.before_step(self, step)
                pending = one(staged(step, whole=call.whole))
                self.hooks.after_step(self, pending)
                found.append(pending.wait(WAIT_S))
            return found
        for step in call.steps:
            self.hooks.before_step(self, step)
        steps = [staged(step, whole=call.whole) for step in call.steps]
        if call.loop == "batch":
            waiting = self.loops.batch(steps)
        else:
            waiting = self.loops.prime(steps, num_prompts=call.num_prompts)
        self.hooks.after_call(self, call)
        return [pending.wait(WAIT_S) for pending in waiting]

    def _windowed(
        self, call: Call, issue: Callable[[StagedStep], PendingLogits]
    ) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        waiting: deque[PendingLogits] = deque()
        for step in call.steps:
            if len(waiting) == call.window:
                found.append(waiting.popleft().wait(WAIT_S))
            self.hooks.before_step(self, step)
            waiting.append(issue(staged(step, whole=call.whole)))
        self.hooks.after_call(self, call)
        return found + [pending.wait(WAIT_S) for pending in waiting]


@contextmanager
def opened(model: GateModel, doors: LoopDoors, options: ArmOptions) -> Iterator[Arm]:
    """An arm on streams of its own, which end with it."""
    with ExitStack() as stack:
        stack.callback(options.hooks.end)
        yield stack.enter_context(_opened(model, doors, options))


@contextmanager
def _opened(model: GateModel, doors: LoopDoors, options: ArmOptions) -> Iterator[Arm]:
    plan = model.plan
    kind, recorder, controller = plan.engine.device, options.recorder, options.controller
    with make_streams(kind, recorder=recorder, controller=controller) as streams:
        primary = plan.placement.primary if options.caller_on is None else options.caller_on
        caller = streams.stream("caller", primary, num_threads=plan.threads)
        homes = options.homes(stage_homes(plan, model.stages, streams))
        cut, counters = options.cut, options.counters()
        runtime = PipelineRuntime(homes, caller, streams, counters=counters, options=cut)
        runtime.load_barrier()
        yield Arm(model, runtime, doors, options)


def one_stage(model: GateModel, scenario: Scenario) -> list[torch.Tensor]:
    """The reference: every step of the scenario on the whole model, one after the other."""
    runner = model.whole.runner
    ordinal = model.plan.placement.primary
    found = []
    with make_streams(model.plan.engine.device) as streams:
        stream = streams.stream("one stage", ordinal, num_threads=model.plan.threads)
        for call, step in scenario.steps:
            cell = stream.run(
                partial(_whole_step, runner, step, whole=call.whole), label="one stage"
            )
            stream.synchronize(WAIT_S)
            found.append(cell.get().cpu())
    return found


def staged(step: MeshStep, *, whole: bool = False) -> StagedStep:
    """A step for the stages, whose result are the values that are compared."""
    return StagedStep(step, partial(_values, step, whole))


def shape_of(step: StagedStep) -> tuple[tuple[int, int], ...]:
    """What a captured walk depends on: rows, and how many of them decode."""
    return tuple((part.num_tokens, part.num_decode) for part in step.step.parts)


def _whole_step(runner: Runner, step: MeshStep, *, whole: bool) -> torch.Tensor:
    return _values(step, whole, runner, runner.hidden_states(step))


def _values(step: MeshStep, whole: bool, runner: Runner, hidden: torch.Tensor) -> torch.Tensor:
    """The logits of the step's sampled rows; ``whole`` puts all rows' hidden states before them."""
    logits = runner.score(hidden, step)
    if not whole:
        return logits
    return torch.cat([hidden.float().flatten(), logits.float().flatten()])


@torch.inference_mode()
def poison_cache(loaded: LoadedModel) -> None:
    """Fill a fresh cache with NaN but for the null block; 8-bit values have none."""
    for layer in loaded.runner.model.layers:
        cache = layer.self_attn.cache
        for tensor in () if cache is None else cache.tensors:
            if tensor.dtype in (torch.float32, torch.bfloat16, torch.float16):
                tensor[BLOCK_SIZE:].fill_(torch.nan)
