"""A model's plan for one kind of batch: its lines, and what a step of it costs. No torch here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from layline.boundary.contracts import StageDeclaration
from layline.boundary.factories import link_stages
from layline.boundary.layout import BatchVariant
from layline.boundary.mesh import MeshSpec
from layline.boundary.planning.cost import Bytes, Collective, ElementSizes, RankStep, step_records
from layline.boundary.planning.moves import Ground, batch_kinds
from layline.boundary.planning.show import Line, counted, lines_of
from layline.boundary.planning.stage import StagePlan
from layline.boundary.planning.walk import plan_layers
from layline.boundary.rows import BatchKind, DpPadding, StepRows, effective_padding
from layline.comm.groups import CollectiveRecord, wire_bytes
from layline.config import EngineConfig
from layline.engine.facts import PLAIN_ENCODINGS, ModelFacts, resolve
from layline.engine.room import Room, room_for
from layline.engine.speculation.draft_facts import draft_facts
from layline.errors import UsageError, one_of
from layline.layers.kv_types import VALUE_BYTES, head_bytes
from layline.models.collectives import compute_collectives
from layline.models.footprint import Footprint, footprint
from layline.models.registry import family_of
from layline.topology import GroupName
from layline.weights.checkpoint import Checkpoint
from layline.weights.opening import open_checkpoint

ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
DECODE_TOKENS = 1
PREFILL_TOKENS = 512
NEEDS = {
    BatchVariant.CONTEXT_PARALLEL: "--attn-cp above 1",
    BatchVariant.INPUT_SCATTERED: "--input-scattered",
    BatchVariant.SEQUENCE_PARALLEL: "--sequence-parallel",
}


@dataclass(frozen=True)
class ModelPlan:
    """One model on one mesh, for one kind of batch; ``stages`` hold the others too.

    ``lines`` are those of a step in the order in which ranks run them. ``packed_head`` is the
    encoding of a head that stays quantised: which kernel this machine has for it decides what its
    scores are, so ``sizes`` are ``assumed`` until the kernels have been asked. ``room`` is what
    the device has for a rank, ``weights_format`` how the checkpoint stores its matrices;
    ``overlaps`` tells whether steps are launched one ahead. ``draft`` is a draft model that takes
    a part of the room.
    """

    facts: ModelFacts
    layers: tuple[tuple[StageDeclaration, ...], ...]
    kind: BatchKind
    sizes: ElementSizes
    stages: tuple[StagePlan, ...]
    lines: tuple[Line, ...]
    room: Room
    packed_head: str | None = None
    assumed: bool = False
    overlaps: bool = False
    weights_format: str = ""
    draft: ModelFacts | None = None

    def with_sizes(self, sizes: ElementSizes) -> ModelPlan:
        """The same plan with what this machine's kernels return."""
        return replace(self, sizes=sizes, assumed=False)

    def of_kind(self, kind: BatchKind) -> ModelPlan:
        """The same model on the same mesh for another kind of batch."""
        return self if kind is self.kind else replace(self, kind=kind, lines=self._lines_of(kind))

    def _lines_of(self, kind: BatchKind) -> tuple[Line, ...]:
        compute = compute_collectives(
            self.facts.config, self.spec, kind, self.facts.kv_dtype, overlaps=self.overlaps
        )
        return tuple(lines_of(self.stages, Ground(self.spec, kind), compute))

    @property
    def spec(self) -> MeshSpec:
        """The mesh."""
        return self.facts.spec

    @property
    def ground(self) -> Ground:
        """The mesh and the kind of batch."""
        return Ground(self.spec, self.kind)

    @property
    def distinct(self) -> dict[Line, int]:
        """Distinct lines, and how often each occurs."""
        return counted(self.lines)

    @property
    def footprint(self) -> Footprint:
        """Memory of one rank, a draft model's included."""
        own = _footprint(self.facts)
        if self.draft is None:
            return own
        beside = _footprint(self.draft)
        return Footprint(own.weights + beside.weights, own.kv_per_token + beside.kv_per_token)

    def collectives(self) -> Iterator[Collective]:
        """Those of a step, in order."""
        for line in self.lines:
            yield from line.collectives

    def prefills(self, tokens: int) -> bool:
        """Whether the example step with as many tokens is a prefill; only ordinary ones may not."""
        return self.kind.variant is not BatchVariant.ORDINARY or tokens > DECODE_TOKENS

    def records(
        self, step: StepRows, rank: int, sampled: int, *, prefill: bool = False, fed: int = 0
    ) -> list[CollectiveRecord]:
        """What ``rank`` must record in a step in which its DP rank scores ``sampled`` rows.

        ``prefill`` tells that every DP rank with rows prefills, ``fed`` how many rows of its DP
        rank the step before samples for.
        """
        topology = self.spec.topology.at(rank)
        numbers = RankStep.of(step, topology, sampled, prefill=prefill, fed=fed)
        return step_records(self.collectives(), numbers, self.sizes)


def open_plan(model: str, flags: Mapping[str, Any], variant: str) -> ModelPlan:
    """Plan ``model`` as ``flags``, keywords of EngineConfig, say; reads no weights.

    Raises UsageError for degrees that do not fit the model and for a variant that the mesh does not
    bind, DeclarationError for an edge that has no correct transition on it.
    """
    engine = EngineConfig(**{**flags, "model": model})
    checkpoint = open_checkpoint(model)
    try:
        facts = resolve(engine, checkpoint)
        layers = linked_layers(facts, checkpoint.config)
        head = packed_head(facts, checkpoint)
        stored = weights_format(checkpoint)
    finally:
        checkpoint.close()
    plan = ModelPlan(
        facts=facts,
        layers=layers,
        kind=kind_for(facts.spec, variant, engine.dp_padding),
        sizes=element_sizes(facts, engine.device, head),
        stages=plan_layers(layers, facts.spec),
        lines=(),
        room=room_for(engine, facts.spec.topology),
        packed_head=head,
        assumed=head is not None,
        overlaps=engine.overlaps,
        weights_format=stored,
        draft=draft_facts(engine, facts),
    )
    return replace(plan, lines=plan._lines_of(plan.kind))


def _footprint(facts: ModelFacts) -> Footprint:
    cached = head_bytes(facts.kv_dtype, facts.config.head_dim)
    return footprint(facts.config, facts.spec.topology, ITEMSIZES[facts.dtype], cached)


def packed_head(facts: ModelFacts, checkpoint: Checkpoint) -> str | None:
    """The encoding of a head that stays quantised, None for one whose scores have the run's dtype.

    A head that is not in the file, or that the configuration ties, is the embedding's table.
    """
    if not facts.packed:
        return None
    infos, name = checkpoint.infos(), "lm_head.weight"
    if facts.config.tied_head or name not in infos:
        name = "model.embed_tokens.weight"
    encoding = infos[name].encoding
    return None if encoding in PLAIN_ENCODINGS else encoding


def weights_format(checkpoint: Checkpoint) -> str:
    """The kind of checkpoint and the encodings of its matrices: ``gguf: 180 Q4_1, 31 Q6_K``."""
    counts = Counter(info.encoding for info in checkpoint.infos().values() if len(info.shape) > 1)
    stored = ", ".join(f"{count} {encoding}" for encoding, count in counts.most_common())
    return f"{checkpoint.kind}: {stored}" if stored else checkpoint.kind


def linked_layers(
    facts: ModelFacts, config: Mapping[str, object]
) -> tuple[tuple[StageDeclaration, ...], ...]:
    """The stages of every layer, as the model's layers link them; ``config`` is config.json's."""
    return tuple(
        link_stages(layer.attn, layer.ffn, previous=layer.previous, terminal=layer.terminal)
        for layer in family_of(config).stack(facts.config)
    )


def element_sizes(facts: ModelFacts, device: str, head: str | None) -> ElementSizes:
    """Bytes of values, as far as they are known without torch.

    On the CPU outputs and residual are FP32. So are the scores of a packed ``head`` taken to be:
    of the kernels that may run there, most return what they accumulate in.
    """
    run = ITEMSIZES[facts.dtype]
    summed = 4 if device == "cpu" else run
    cached = VALUE_BYTES[facts.kv_dtype]
    return ElementSizes(summed=summed, run=run, scores=run if head is None else 4, cached=cached)


def kind_for(spec: MeshSpec, variant: str, padding: str) -> BatchKind:
    """The kind of batch with this variant. Raises UsageError for one the mesh does not bind."""
    known = [each.value for each in BatchVariant]
    if variant not in known:
        raise UsageError(one_of("--variant", variant, known))
    wanted = BatchVariant(variant)
    effective = effective_padding(spec.topology, DpPadding(padding))
    kinds = batch_kinds(spec)
    for kind in kinds:
        if kind.variant is wanted and kind.padding is effective:
            return kind
    bound = ", ".join(dict.fromkeys(kind.variant.value for kind in kinds))
    raise UsageError(
        f"--variant {variant} is not bound on this mesh; it needs {NEEDS[wanted]} (bound: {bound})"
    )


@dataclass(frozen=True)
class GroupTotal:
    """The collectives of one group in a step, those of compute apart."""

    group: GroupName
    in_compute: bool
    count: int
    bytes: Bytes


def example_steps(plan: ModelPlan) -> dict[int, StepRows]:
    """Steps with equally full slots, by tokens on each attention DP rank, that this kind can be."""
    topology = plan.spec.topology
    if plan.kind.variant is BatchVariant.ORDINARY:
        tokens = [DECODE_TOKENS, PREFILL_TOKENS]
    else:
        # The other kinds are for prompts; an input-scattered one divides by TP.
        unit = topology.tp if plan.kind.variant is BatchVariant.INPUT_SCATTERED else 1
        tokens = [-(-PREFILL_TOKENS // unit) * unit]
    steps = {}
    for count in tokens:
        counts: tuple[int, ...] = (count,) * topology.attn_cp
        if plan.kind.variant is BatchVariant.CONTEXT_PARALLEL:
            least, more = divmod(count, topology.attn_cp)
            counts = tuple(least + (rank < more) for rank in range(topology.attn_cp))
        padding = plan.kind.padding or DpPadding.MAX_LEN
        steps[count] = StepRows(plan.kind.variant, (counts,) * topology.attn_dp, padding)
    return steps


def totals(plan: ModelPlan, step: StepRows, *, prefill: bool) -> list[GroupTotal]:
    """Totals of rank 0 in a step that scores one row on each attention DP rank.

    A decode is fed what the step before sampled.
    """
    found: dict[tuple[GroupName, bool], tuple[int, Bytes]] = {}
    for record in plan.records(step, 0, 1, prefill=prefill, fed=0 if prefill else 1):
        ranks = plan.spec.topology.size(record.group)
        count, num_bytes = found.get((record.group, record.in_compute), (0, Bytes()))
        wire = wire_bytes(record.kind, record.payload_bytes, ranks)
        found[record.group, record.in_compute] = (
            count + 1,
            num_bytes + Bytes(record.payload_bytes, wire),
        )
    return [GroupTotal(*key, *value) for key, value in found.items()]
