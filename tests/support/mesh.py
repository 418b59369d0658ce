"""Run a real model on simulated ranks with hand-written steps, and keep every row's logits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from layline.boundary.mesh import make_mesh
from layline.comm.groups import CollectiveRecord
from layline.comm.recording import Recorder, record_groups
from layline.comm.simulated import run_ranks
from layline.config import EngineConfig
from layline.engine.balance import StepRules
from layline.engine.facts import ModelFacts, open_model
from layline.engine.model import LoadedModel, load_part
from layline.engine.rank_part import part_of
from layline.engine.runner import Runner
from layline.engine.step import IDLE, MeshStep, RankStep
from layline.layers.spans import MixedPhase, Phase, SequenceSpan, StepPhase
from layline.topology import Topology
from support.poison import poison
from support.ranks import Settings, run_processes

BLOCKS_EACH = 4


@dataclass(frozen=True)
class TextSequence:
    """A sequence with its whole text, at home on one DP rank, with blocks of its own."""

    ids: tuple[int, ...]
    attn_dp: int
    first_block: int

    @property
    def blocks(self) -> list[int]:
        return list(range(self.first_block, self.first_block + BLOCKS_EACH))

    def span(self, start: int, count: int) -> SequenceSpan:
        return SequenceSpan(start, count, self.blocks, rope_length=len(self.ids))


def rank_step(phase: StepPhase, parts: Sequence[tuple[TextSequence, int, int]]) -> RankStep:
    """One DP rank's part: ``(sequence, start, count)`` in row order."""
    if not parts:
        return IDLE
    if isinstance(phase, MixedPhase):
        num_decode = phase.num_decode
    else:
        num_decode = len(parts) if phase is Phase.DECODE else 0
    return RankStep(
        num_decode,
        tuple(sequence.span(start, count) for sequence, start, count in parts),
        tuple(i for sequence, start, count in parts for i in sequence.ids[start : start + count]),
        (True,) * len(parts),
    )


def hand_written_steps(sequences: Sequence[TextSequence], attn_dp: int) -> list[list[RankStep]]:
    """Chunked prefills, prefills beside decodes, idle ranks, decodes of unequal batches.

    The sequences of a DP rank advance together; the last of several DP ranks starts late, and the
    first goes on alone.
    """
    home = [[s for s in sequences if s.attn_dp == dp] for dp in range(attn_dp)]

    def part(dp: int, phase: Phase, start: int, count: int) -> RankStep:
        return rank_step(phase, [(s, start, min(count, len(s.ids) - start)) for s in home[dp]])

    late = attn_dp - 1 if attn_dp > 1 else -1
    steps = []
    steps.append(
        [IDLE if dp == late else part(dp, Phase.PREFILL, 0, 4 + dp) for dp in range(attn_dp)]
    )
    second = []
    for dp in range(attn_dp):
        if dp == late:
            second.append(part(dp, Phase.PREFILL, 0, 9))
        elif dp == 0:
            second.append(part(dp, Phase.PREFILL, 4, 3))
        else:
            second.append(part(dp, Phase.DECODE, 4 + dp, 1))
    steps.append(second)
    third = [
        part(dp, Phase.DECODE, 9 if dp == late else 7 if dp == 0 else 5 + dp, 1)
        for dp in range(attn_dp)
    ]
    steps.append(third)
    steps.append([part(dp, Phase.DECODE, 8, 1) if dp == 0 else IDLE for dp in range(attn_dp)])
    # Both phases on one rank, beside ranks that decode.
    one, other = home[0]
    both = rank_step(MixedPhase(1), [(one, 9, 1), (other, 9, 3)])
    others = [part(dp, Phase.DECODE, 10 if dp == late else 6 + dp, 1) for dp in range(1, attn_dp)]
    steps.append([both, *others])
    return steps


@dataclass
class MeshRun:
    """What one rank computed: for each step, the rows it had and their logits; and its record."""

    rows: list[list[tuple[tuple[int, ...], int]]]
    logits: list[torch.Tensor]
    sampled: list[torch.Tensor]
    records: list[CollectiveRecord]


@dataclass(frozen=True)
class Job:
    """A model, a configuration and the steps to run it through."""

    engine: EngineConfig
    facts: ModelFacts
    steps: tuple[MeshStep, ...]

    @property
    def num_blocks(self) -> int:
        """The cache block that no sequence has any more, block 0 included."""
        used = [b for step in self.steps for p in step.parts for s in p.spans for b in s.blocks]
        return 1 + max(used)


def run_on_mesh(
    engine: EngineConfig,
    parts: Sequence[Sequence[RankStep]],
    backend: str = "threads",
    **spec: Any,
) -> list[MeshRun]:
    """Every rank's rows and logits, on simulated ranks or on processes ("gloo", "nccl").

    Cache rows that no token has written are NaN, and so is memory that nothing has written.
    """
    served, checkpoint = open_model(engine)
    checkpoint.close()
    facts = replace(served.facts, spec=replace(served.facts.spec, **spec))
    rules = StepRules.of(engine)
    steps = tuple(MeshStep(tuple(step), rules.rows(step)) for step in parts)
    job = Job(engine, facts, steps)
    topology = facts.spec.topology
    if backend == "threads":
        # Torch has one switch for the process, so it is set around all ranks.
        with poisoned_memory():
            return run_ranks(topology, lambda here, groups: walk(here, groups, job))
    return run_processes(
        topology, walk_alone, job, settings=Settings(backend=backend), timeout_s=120
    )


def walk_alone(topology: Topology, groups: Any, job: Job) -> MeshRun:
    """One rank in a process of its own."""
    with poisoned_memory():
        return walk(topology, groups, job)


def walk(topology: Topology, groups: Any, job: Job) -> MeshRun:
    """One rank: load its part of the model and run every step."""
    recorder = Recorder()
    facts = job.facts.on_rank(topology.rank)
    mesh = make_mesh(facts.spec, *record_groups(groups, recorder))
    on_gpu = job.engine.device == "cuda"
    device = torch.device("cuda", topology.rank) if on_gpu else torch.device("cpu")
    _, checkpoint = open_model(job.engine)
    run = MeshRun([], [], [], recorder.records)
    with torch.inference_mode():
        runner = _runner(load_part(facts, checkpoint, mesh, device), job.num_blocks)
        checkpoint.close()
        for step in job.steps:
            part = part_of(step, topology, job.engine.cp_layout)
            hidden = runner.hidden_states(step)
            run.rows.append(
                [
                    (tuple(span.blocks), position)
                    for span in part.spans
                    for position in range(span.start, span.length)
                ]
            )
            run.sampled.append(runner.score(hidden, step).float().cpu())
            run.logits.append(runner.model.logits(hidden).float().cpu())
    return run


def _runner(loaded: LoadedModel, num_blocks: int) -> Runner:
    loaded.bind_cache(num_blocks + 1)
    for layer in loaded.runner.model.layers:
        assert layer.self_attn.cache is not None
        poison(layer.self_attn.cache)
    return loaded.runner


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Let torch fill memory that it allocates without a value with NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
