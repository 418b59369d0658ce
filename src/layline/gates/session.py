"""Open a model for its gates: what is run, on which stages, with which scenarios."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from layline.boundary.mesh import Mesh
from layline.config import EngineConfig
from layline.engine.facts import resolve
from layline.engine.launch import open_doors
from layline.engine.model import LoadedModel, load_part
from layline.engine.pipeline_load import StagePlan, check_sharding, inventory
from layline.errors import UsageError
from layline.gates.arms import GateModel
from layline.gates.mutations import Bench
from layline.gates.scenarios import ScenarioMaker
from layline.pipeline.doors import Doors
from layline.pipeline.fence import layers_of, listed
from layline.weights.checkpoint import Checkpoint
from layline.weights.opening import open_checkpoint

STAGES = 2
"""Of a gate that nobody gave a number of stages."""
MOST_CHUNK = 64
"""Tokens of a prefill chunk, where the model's context has room for them."""
LONGEST = 10
"""Chunks of the longest scenario, and some tokens after them."""


@dataclass(frozen=True)
class GateSession:
    """One model's gates."""

    model: GateModel
    doors: Doors
    make: ScenarioMaker
    bench: Bench

    @property
    def configuration(self) -> dict[str, object]:
        """What ran, for the report."""
        plan = self.model.plan
        stages = [layers_of(plan.fence, index) for index in range(plan.num_stages)]
        return {
            "architecture": plan.facts.config.architecture,
            "dtype": plan.facts.dtype,
            "device": plan.engine.device,
            "threads": plan.threads,
            "stages": [[layers.start, layers.stop - 1] for layers in stages],
            "devices": list(plan.placement.devices),
            "doors": self.doors.in_effect(),
        }

    def headline(self) -> str:
        """The same in a line."""
        plan = self.model.plan
        bounds = [layers_of(plan.fence, index) for index in range(plan.num_stages)]
        spans = " | ".join(f"{layers.start}-{layers.stop - 1}" for layers in bounds)
        doors = "".join(f", {name}={text}" for name, text in self.doors.in_effect().items())
        return (
            f"{plan.facts.config.architecture}: layers {spans} on {plan.engine.device} "
            f"{listed(plan.placement.devices)}, {plan.facts.dtype}, {plan.threads} "
            f"thread{'s' if plan.threads > 1 else ''} a stage{doors}; every bit of every step "
            "against one stage"
        )


@contextmanager
def open_gate(engine: EngineConfig, warn: Callable[[str], None]) -> Iterator[GateSession]:
    """Load the whole model and its stages. Raises UsageError, PlacementError, CheckpointError."""
    checkpoint = open_checkpoint(engine.model, seed=engine.seed)
    try:
        facts = resolve(engine, checkpoint)
        if not facts.spec.topology.is_single or engine.pp_processes > 1:
            raise UsageError(
                "gates run the stages of one process in this version; expected tp 1 and "
                "pp_processes 1"
            )
        doors = open_doors(engine)
        fence = doors.fence(facts.config.num_layers)
        if fence is None:
            engine = replace(engine, pp_stages=STAGES)
            doors = open_doors(engine)
            fence = doors.fence(facts.config.num_layers)
            assert fence is not None
        placement = doors.placement(len(fence) - 1, inventory(engine.device))
        check_sharding(engine, doors)
        plan = StagePlan(engine, facts, fence, placement, sharded=doors.shard)
        chunk = min(MOST_CHUNK, facts.max_model_len // LONGEST)
        if chunk < 4:
            raise UsageError(
                f"max_model_len {facts.max_model_len} is too short for a gate's prompts; expected "
                f"at least {4 * LONGEST}"
            )
        model = GateModel.load(plan, checkpoint)
        make = ScenarioMaker(facts.config.vocab_size, plan.num_stages, chunk)
        bench = Bench(model, lambda: _flipped(plan, checkpoint))
        yield GateSession(model, doors, make, bench)
    finally:
        checkpoint.close()


def _flipped(plan: StagePlan, checkpoint: Checkpoint) -> LoadedModel:
    """The last stage, batch-invariant where the others are not."""
    last = plan.num_stages - 1
    facts = replace(plan.facts, batch_invariant=not plan.facts.batch_invariant)
    return load_part(facts, checkpoint, Mesh(facts.spec), plan.device(last), plan.part(last))
