"""What is settled about a model before any weight is read or any worker starts. No torch here."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from layline.boundary.mesh import MeshSpec
from layline.boundary.policy import resolve_policy
from layline.config import EngineConfig
from layline.engine.prompt_chunks import Divide
from layline.errors import UsageError
from layline.models.config import DecoderConfig
from layline.models.parallel import check_degrees
from layline.models.registry import family_of
from layline.pipeline.doors import Doors
from layline.pipeline.fence import Fence
from layline.pipeline.schedule import prime_chunks
from layline.text.tokenizer import Tokenizer, load_tokenizer
from layline.weights.checkpoint import Checkpoint
from layline.weights.embedding_checkpoint import pooling_of
from layline.weights.opening import open_checkpoint
from layline.weights.pooling import Pooling

PLAIN_ENCODINGS = frozenset({"F32", "F16", "BF16"})


@dataclass(frozen=True)
class ModelFacts:
    """The model's configuration and what the run makes of it.

    ``dtype`` is that of weights and arithmetic, ``kv_dtype`` that of cached keys and values;
    ``packed`` keeps quantised matrices quantised for decode. ``spec`` is the mesh as rank 0 sees
    it, ``policy_reason`` says where its policy comes from. ``batch_invariant`` computes each row
    alike whatever shares its step. ``pooling`` is how a model that makes embeddings does; others
    generate text.
    """

    config: DecoderConfig
    spec: MeshSpec
    policy_reason: str
    dtype: str
    kv_dtype: str
    packed: bool
    max_model_len: int
    cp_layout: str
    batch_invariant: bool = False
    pooling: Pooling | None = None

    @property
    def shares_prefixes(self) -> bool:
        """True when cached keys depend on the tokens before them alone.

        Dynamic rope turns them by the whole prompt's length too.
        """
        return self.config.rope.kind != "dynamic"

    def on_rank(self, rank: int) -> ModelFacts:
        """The same facts, with the mesh as ``rank`` sees it."""
        return replace(self, spec=replace(self.spec, topology=self.spec.topology.at(rank)))


@dataclass(frozen=True)
class ServedModel:
    """What the engine needs of a model: facts and text, no weights.

    ``draft`` are the facts of the draft model, where there is one; ``fence`` is what cuts the
    layers into pipeline stages, None for one stage, and ``doors`` are the pipeline's.
    """

    facts: ModelFacts
    tokenizer: Tokenizer
    draft: ModelFacts | None = None
    fence: Fence | None = None
    doors: Doors | None = None

    @property
    def num_stages(self) -> int:
        """Pipeline stages."""
        return 1 if self.fence is None else len(self.fence) - 1

    def in_flight(self, engine: EngineConfig) -> int:
        """Steps that are under way at a time.

        One more than stages, so that the next is planned while they run: a further one would only
        make requests wait longer for their first step. On several even where one stage would not
        gain by it.
        """
        if self.num_stages == 1:
            return 2 if engine.overlaps else 1
        alone = engine.overlap is False or engine.speculative != "off"
        return 1 if alone else self.num_stages + 1

    def divide(self, engine: EngineConfig) -> Divide | None:
        """How prompts are divided into chunks that follow each other through the stages.

        None where one step is under way at a time. The doors are looked at for each chunk.
        """
        doors = self.doors
        if doors is None or self.microbatches(engine) == 1:
            return None

        def chunks(num_tokens: int) -> tuple[int, ...]:
            if not doors.prime_pipe:
                return (num_tokens,)
            return prime_chunks(num_tokens, self.num_stages, doors.prime_chunks)

        return chunks

    def microbatches(self, engine: EngineConfig) -> int:
        """Steps over which those that decode are spread: with one under way at a time it is one."""
        return 1 if self.in_flight(engine) == 1 else self.num_stages

    @property
    def valid_vocab(self) -> int:
        """Ids that may be sampled: rows beyond the tokenizer's vocabulary are padding."""
        return min(self.tokenizer.vocab_size, self.facts.config.vocab_size)


def open_model(engine: EngineConfig) -> tuple[ServedModel, Checkpoint]:
    """The model that ``engine`` names and its open checkpoint, of which no weight is read yet.

    Raises UsageError or CheckpointError with one line that names the value or file at fault.
    """
    checkpoint = open_checkpoint(engine.model, seed=engine.seed)
    try:
        facts = resolve(engine, checkpoint)
        return ServedModel(facts, load_tokenizer(checkpoint)), checkpoint
    except BaseException:
        checkpoint.close()
        raise


def read_tokenizer(engine: EngineConfig) -> Tokenizer:
    """The tokenizer of the model that ``engine`` names, and nothing else of it."""
    checkpoint = open_checkpoint(engine.model, seed=engine.seed)
    try:
        return load_tokenizer(checkpoint)
    finally:
        checkpoint.close()


def resolve(engine: EngineConfig, checkpoint: Checkpoint) -> ModelFacts:
    """The facts of a run. Raises UsageError when the configuration does not fit the model."""
    config = family_of(checkpoint.config).parse(checkpoint.config)
    dtype, packed = resolve_dtype(engine, checkpoint)
    spec, reason = resolve_mesh(engine, config)
    if engine.batch_invariant and config.rope.kind == "dynamic":
        raise UsageError(
            "batch_invariant does not go with dynamic rope scaling, whose angles are computed for "
            "a whole step at once; expected a run without it"
        )
    return ModelFacts(
        config=config,
        spec=spec,
        policy_reason=reason,
        dtype=dtype,
        kv_dtype=dtype if engine.kv_dtype == "auto" else engine.kv_dtype,
        packed=packed,
        max_model_len=resolve_context(engine, config),
        cp_layout=engine.cp_layout,
        batch_invariant=engine.batch_invariant,
        pooling=pooling_of(checkpoint),
    )


def resolve_mesh(engine: EngineConfig, config: DecoderConfig) -> tuple[MeshSpec, str]:
    """The mesh and the reason for its policy. Raises UsageError for degrees that do not divide."""
    topology = engine.topology()
    check_degrees(config, topology)
    policy, reason = resolve_policy(engine.boundary_reduction, config.architecture)
    spec = MeshSpec(
        topology=topology,
        policy=policy,
        sequence_parallel=engine.sequence_parallel,
        input_scattered=engine.input_scattered,
        quantised_all_reduce=engine.quantised_all_reduce,
    )
    return spec, reason


def resolve_dtype(engine: EngineConfig, checkpoint: Checkpoint) -> tuple[str, bool]:
    """The run's dtype, and whether quantised weights stay quantised for decode.

    ``auto`` keeps the checkpoint's dtype; quantised files run in bfloat16; FP16 files run in FP32
    on the CPU, which is exact where most CPUs have no FP16 arithmetic.
    """
    encodings = Counter(
        info.encoding for info in checkpoint.infos().values() if len(info.shape) > 1
    )
    common = encodings.most_common(1)[0][0] if encodings else None
    quantised = common is not None and common not in PLAIN_ENCODINGS
    on_cpu = engine.device == "cpu"
    if engine.dtype != "auto":
        return engine.dtype, False
    if quantised:
        return "bfloat16", on_cpu
    if common is None:
        named = str(checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype"))
        common = {"float16": "F16", "bfloat16": "BF16"}.get(named, "F32")
    if common == "F16":
        return ("float32" if on_cpu else "float16"), False
    return ("bfloat16" if common == "BF16" else "float32"), False


def resolve_context(engine: EngineConfig, config: DecoderConfig) -> int:
    """Tokens a sequence may have. Raises UsageError for more than the model was made for."""
    limit = config.max_position
    if config.rope.kind == "dynamic":
        limit = int(limit * config.rope.factor)
    wanted = engine.max_model_len
    if wanted is not None and wanted > limit:
        raise UsageError(
            f"max_model_len {wanted} is beyond the model's context; expected <= {limit}"
        )
    return wanted or limit
