"""Run a model for a few steps; compare every collective of every rank, and what crosses each cut,
with its plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from layline.boundary.planning.compare import Comparison
from layline.boundary.rows import BatchKind, kind_of
from layline.comm.groups import CollectiveRecord
from layline.config import EngineConfig
from layline.engine.balance import MeshScheduler, SampleRow
from layline.engine.core import Engine
from layline.engine.executor import Crossed, Executor, ForwardingExecutor, Launched
from layline.engine.facts import ModelFacts
from layline.engine.launch import launch
from layline.engine.pipeline_plan import PipelinePlan
from layline.engine.planned import ITEMSIZES, ModelPlan
from layline.engine.step import MeshStep
from layline.errors import UsageError
from layline.models.parallel import Shards
from layline.pipeline.fence import boundaries
from layline.sampling import SamplingParams
from layline.weights.quantized import FOUR_BIT

PROMPT_TOKENS = 16
NEW_TOKENS = 4


@dataclass(frozen=True)
class RecordedStep:
    """One step that ran, by rank the collectives of it, and what else is known of it."""

    step: MeshStep
    records: Sequence[Sequence[CollectiveRecord]]
    launched: Launched = field(default_factory=Launched)


@dataclass
class Analysis:
    """What ran beside what was planned. ``kinds`` counts the steps of each kind of batch.

    ``cuts`` are those of a pipeline, ``cut_differences`` tells of them what differs, in words.
    """

    ranks: int
    kinds: dict[str, int] = field(default_factory=dict)
    comparison: Comparison = field(default_factory=Comparison)
    cuts: list[CutTotal] = field(default_factory=list)
    cut_differences: list[str] = field(default_factory=list)

    @property
    def agrees(self) -> bool:
        """True when every step ran as planned."""
        return self.comparison.agrees and not self.cut_differences

    @property
    def differences(self) -> list[str]:
        """What differs, in words."""
        return [*self.comparison.differences, *self.cut_differences]


@dataclass
class CutTotal:
    """What crossed the cut before ``layer`` in all steps. Planned bytes are the most there are."""

    layer: int
    crossings: int = 0
    planned_bytes: int = 0
    bytes: int = 0


class RecordedExecutor(ForwardingExecutor):
    """An executor that keeps every step and what each rank recorded of it.

    Steps of a draft model are left out: plans are of the model.
    """

    def __init__(self, executor: Executor) -> None:
        super().__init__(executor)
        self.steps: list[RecordedStep] = []

    def launch(
        self, step: MeshStep, rows: Sequence[Sequence[SampleRow]], before: Launched | None, /
    ) -> Launched:
        """See Executor. Waits for the step, whose records are to be told from the next one's."""
        launched = super().launch(step, rows, before)
        self.steps.append(RecordedStep(step, self.collectives(), launched))
        return launched


def analyse(
    plan: ModelPlan, flags: Mapping[str, Any], staged: PipelinePlan | None = None
) -> Analysis:
    """Run the planned model on short prompts, one for each attention DP rank, and compare.

    ``plan`` has the sizes that the kernels return (:func:`with_kernel_sizes`), ``staged`` is its
    pipeline of several stages. The prompts end at different steps, so that ranks idle in the last
    ones. Raises what a run can.
    """
    # Drafts change how many rows a step has, which the plan's examples do not know.
    flags = {name: value for name, value in flags.items() if not name.startswith("speculative")}
    config = EngineConfig(**{**flags, "record_collectives": True})
    model, executor = launch(config)
    recorded = RecordedExecutor(executor)
    try:
        # Without shared blocks every trial computes what its plan says.
        scheduler = MeshScheduler.of(
            config,
            executor.num_blocks,
            shares=False,
            num_stages=model.microbatches(config),
            divide=model.divide(config),
        )
        engine = Engine(model, scheduler, recorded, in_flight=model.in_flight(config))
        requests = [
            engine.submit(
                prompt,
                SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True),
                embeds=model.facts.pooling is not None,
            )
            for prompt, most in trial_prompts(plan)
        ]
        engine.run(requests)
    finally:
        executor.close()
    analysis = compare_steps(plan, recorded.steps)
    if staged is not None:
        compare_cuts(staged, recorded.steps, analysis)
    return analysis


def refuse_staged_ranks(engine: EngineConfig, staged: PipelinePlan | None) -> None:
    """Raise UsageError for stages on several ranks, whose steps are not told apart here."""
    if staged is None or engine.topology().is_single:
        return
    degree = f"tp {engine.tp}" if engine.tp > 1 else f"pp_processes {engine.pp_processes}"
    raise UsageError(
        f"{degree} cannot be analysed with {staged.placement.num_stages} pipeline stages in this "
        "version; expected tp 1 and pp_processes 1, or pp_stages 1"
    )


def trial_prompts(plan: ModelPlan) -> list[tuple[list[int], int]]:
    """Token ids, and how many to generate, of each prompt: all of other lengths."""
    topology = plan.spec.topology
    # So that an input-scattered mesh gets a step whose rows divide.
    length = -(-PROMPT_TOKENS // topology.tp) * topology.tp
    limit = min(plan.facts.max_model_len - NEW_TOKENS - topology.attn_dp, length)
    vocabulary = plan.facts.config.vocab_size
    return [
        (
            [(index + rank) % vocabulary for index in range(max(1, limit - rank))],
            NEW_TOKENS + topology.attn_dp - 1 - rank,
        )
        for rank in range(topology.attn_dp)
    ]


def compare_steps(plan: ModelPlan, steps: Sequence[RecordedStep]) -> Analysis:
    """Compare what each rank recorded of each step with the plan for that kind of batch.

    ``plan`` itself is what steps of its kind are compared with.
    """
    topology = plan.spec.topology
    plans: dict[BatchKind, ModelPlan] = {plan.kind: plan}
    analysis = Analysis(topology.tp)
    for number, ran in enumerate(steps):
        kind = kind_of(ran.step.rows, topology)
        analysis.kinds[str(kind)] = analysis.kinds.get(str(kind), 0) + 1
        if kind not in plans:
            plans[kind] = plan.of_kind(kind)
        for rank, records in enumerate(ran.records):
            part = ran.step.parts[topology.at(rank).coordinates.attn_dp]
            planned = plans[kind].records(
                ran.step.rows,
                rank,
                sum(part.samples),
                prefill=ran.step.prefills,
                fed=part.num_fed,
            )
            analysis.comparison.add(f"step {number} ({kind}), rank {rank}", planned, records)
    return analysis


def compare_cuts(staged: PipelinePlan, steps: Sequence[RecordedStep], analysis: Analysis) -> None:
    """Compare what crossed each cut in each step: tensors, rows and bytes.

    Where kernels decide an output's dtype the plan has the widest, and fewer bytes may cross.
    """
    layers = boundaries(staged.fence)
    analysis.cuts = [CutTotal(layer) for layer in layers]
    for number, ran in enumerate(steps):
        tokens = sum(part.num_tokens for part in ran.step.parts)
        crossed = [*ran.launched.crossed]
        if len(crossed) != len(layers):
            analysis.cut_differences.append(
                f"step {number}: {len(layers)} cuts are planned, {len(crossed)} were crossed"
            )
            continue
        for cut, planned, total in zip(crossed, staged.cuts, analysis.cuts, strict=True):
            total.crossings += 1
            wanted = [
                Crossed(each.name, tokens, round(tokens * staged.bytes_per_token(each)))
                for each in planned.tensors
            ]
            total.planned_bytes += sum(each.num_bytes for each in wanted)
            total.bytes += sum(each.num_bytes for each in cut)
            if not _crossed_as(wanted, cut, narrower=staged.assumes_outputs):
                analysis.cut_differences.append(
                    f"step {number}, cut before layer {total.layer}: planned {_listed(wanted)}, "
                    f"ran {_listed(cut)}"
                )


def _crossed_as(wanted: Sequence[Crossed], cut: Sequence[Crossed], *, narrower: bool) -> bool:
    if [(each.name, each.rows) for each in wanted] != [(each.name, each.rows) for each in cut]:
        return False
    pairs = [(one.num_bytes, other.num_bytes) for one, other in zip(wanted, cut, strict=True)]
    return all(ran == most or (narrower and ran < most) for most, ran in pairs)


def _listed(tensors: Sequence[Crossed]) -> str:
    return ", ".join(f"{one.name} of {one.rows} rows ({one.num_bytes} bytes)" for one in tensors)


def with_kernel_sizes(plan: ModelPlan) -> ModelPlan:
    """``plan`` with the sizes of what this machine's kernels return: the one to print and run."""
    scores = scores_bytes(plan.facts, plan.packed_head)
    return plan.with_sizes(replace(plan.sizes, scores=scores))


def scores_bytes(facts: ModelFacts, packed_head: str | None) -> int:
    """Bytes of a score: where the head is packed, of what its kernel accumulates in."""
    run = ITEMSIZES[facts.dtype]
    if packed_head is None:
        return run
    from layline.kernels.native.library import native_kernels
    from layline.kernels.packed_matmul import ROW_ALIGNMENT, has_vnni

    if native_kernels().library is not None:
        return 4
    aligned = Shards(facts.config, facts.spec.topology).vocab_rows % ROW_ALIGNMENT == 0
    as_int4 = aligned and packed_head in FOUR_BIT
    return 4 if has_vnni() and not as_int4 else run
