"""Load one rank's part of a model: build the decoder, size its cache, bind it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from layline.boundary.mesh import Mesh, make_mesh
from layline.comm.groups import Groups
from layline.config import EngineConfig, default_threads
from layline.engine import kv
from layline.engine.facts import ModelFacts, resolve
from layline.engine.runner import Runner
from layline.engine.scheduler import BLOCK_SIZE
from layline.engine.speculation.draft_facts import open_draft, resolve_draft
from layline.errors import UsageError
from layline.kernels.native.attend import CACHE_DTYPES
from layline.kernels.native.library import LANES, native_kernels
from layline.layers.attention import AttentionBackend, TorchAttention
from layline.layers.decode_attention import DecodeAttention, NativeDecode, PaddedDecode
from layline.layers.invariant_attention import InvariantAttention
from layline.models.config import DecoderConfig
from layline.models.decoder import Decoder
from layline.models.loader import LoadTarget, ModelLoader
from layline.models.registry import family_of
from layline.models.stack import LayerRange
from layline.weights.checkpoint import Checkpoint
from layline.weights.opening import open_checkpoint

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
# What the values of a cache are stored as.
KV_DTYPES = {**DTYPES, "fp8": torch.float8_e4m3fn, "int8": torch.int8}


@dataclass
class LoadedModel:
    """One rank's weights, ready to run once a cache is bound.

    ``num_blocks`` is 0 before that. ``weight_bytes`` and ``cache_bytes`` are this rank's, those of
    a draft model included, whose cache has the same blocks.
    """

    facts: ModelFacts
    runner: Runner
    device: torch.device
    dtype: torch.dtype
    weight_bytes: int
    num_blocks: int = 0
    draft: LoadedModel | None = None

    @property
    def part(self) -> LayerRange:
        """The layers that are here: all, or those of a pipeline stage."""
        return self.runner.model.part

    def attach(self, draft: LoadedModel) -> None:
        """Take a draft model in, before the cache is sized."""
        self.draft = draft
        self.weight_bytes += draft.weight_bytes

    def draft_model(self) -> LoadedModel:
        """The draft model that :meth:`attach` was given."""
        assert self.draft is not None, "only a run with a draft model has steps for it"
        return self.draft

    @property
    def config(self) -> DecoderConfig:
        """The model's configuration."""
        return self.facts.config

    @property
    def kv_dtype(self) -> torch.dtype:
        """The type of cached keys and values in memory."""
        return KV_DTYPES[self.facts.kv_dtype]

    @property
    def cache_bytes(self) -> int:
        """Bytes of the key-value cache."""
        return self.num_blocks * BLOCK_SIZE * self.slot_bytes

    @property
    def slot_bytes(self) -> int:
        """Bytes that a token takes in the layers that are here."""
        attn_tp, layers = self.facts.spec.topology.attn_tp, len(self.part)
        own = kv.slot_bytes(self.config, self.kv_dtype, attn_tp, layers)
        return own if self.draft is None else own + self.draft.slot_bytes

    def fitting_blocks(self, engine: EngineConfig, local_ranks: int = 1) -> int:
        """Blocks that this rank's cache can have. Raises UsageError when that is too few."""
        return kv.num_blocks(
            engine, kv.Room(self.slot_bytes, self.facts.max_model_len, self.device, local_ranks)
        )

    @torch.inference_mode()
    def bind_cache(self, num_blocks: int) -> None:
        """Allocate the cache and give it to the layers."""
        heads = kv.local_heads(self.config, self.facts.spec.topology.attn_tp)
        shape = kv.CacheShape(num_blocks, heads, self.device, self.kv_dtype, self.dtype)
        caches = kv.allocate(self.config, shape, len(self.part))
        self.runner.model.bind_cache(caches)
        self.num_blocks = num_blocks
        if self.draft is not None:
            self.draft.bind_cache(num_blocks)


def load_model(engine: EngineConfig) -> LoadedModel:
    """Load a model into this process alone, cache included.

    Raises UsageError or CheckpointError with one line that names the value or file at fault.
    """
    checkpoint = open_checkpoint(engine.model, seed=engine.seed)
    try:
        return load_alone(engine, resolve(engine, checkpoint), checkpoint)
    finally:
        checkpoint.close()


def load_alone(engine: EngineConfig, facts: ModelFacts, checkpoint: Checkpoint) -> LoadedModel:
    """Load an open checkpoint on one rank, cache included."""
    device = resolve_device(engine.device)
    # Torch has one count for the process: the model that is loaded last decides.
    torch.set_num_threads(engine.threads or default_threads())
    loaded = load_part(facts, checkpoint, Mesh(facts.spec), device)
    load_draft(engine, loaded, None, device)
    loaded.bind_cache(loaded.fitting_blocks(engine))
    return loaded


def _decode_attention(
    facts: ModelFacts, device: torch.device, dtype: torch.dtype
) -> DecodeAttention:
    """The native kernel for packed models whose cache it reads, else torch, in ``dtype``."""
    cached, size = KV_DTYPES[facts.kv_dtype], facts.config.head_dim
    if facts.packed and cached in CACHE_DTYPES and size % LANES == 0:
        library = native_kernels().library
        if library is not None:
            return NativeDecode(library, BLOCK_SIZE)
    return PaddedDecode(BLOCK_SIZE, device, dtype)


def load_part(
    facts: ModelFacts,
    checkpoint: Checkpoint,
    mesh: Mesh,
    device: torch.device,
    part: LayerRange | None = None,
) -> LoadedModel:
    """Load what the rank of ``mesh`` holds; the cache is bound later, when all ranks know its size.

    ``part`` is a pipeline stage's; without it all layers are loaded. Every rank of the mesh must
    call it. Raises CheckpointError for a file that does not fit.
    """
    dtype = DTYPES[facts.dtype]
    # Attention computes in the wider of the two: neither queries nor keys are rounded for it.
    # A quantised cache is read in the run's.
    wider = torch.promote_types(dtype, DTYPES.get(facts.kv_dtype, dtype))
    backend: AttentionBackend = TorchAttention(
        BLOCK_SIZE, device, _decode_attention(facts, device, wider)
    )
    if facts.batch_invariant:
        backend = InvariantAttention(BLOCK_SIZE)
    loader = ModelLoader(
        checkpoint,
        LoadTarget(
            device=device,
            dtype=dtype,
            packed=facts.packed,
            max_position=facts.max_model_len,
            batch_invariant=facts.batch_invariant,
        ),
    )
    with torch.inference_mode():
        stack = tuple(family_of(checkpoint.config).stack(facts.config))
        model = Decoder(facts.config, stack, loader, backend, mesh, part)
        loader.finish(part)
    runner = Runner(model, backend, BLOCK_SIZE, device, mesh, facts.cp_layout)
    return LoadedModel(facts, runner, device, dtype, model.num_bytes)


def load_draft(
    engine: EngineConfig, target: LoadedModel, groups: Groups | None, device: torch.device
) -> None:
    """Attach the draft model that ``engine`` names to ``target``, where it names one.

    ``groups`` are those of the mesh, None where this rank is alone. Every rank must call it, after
    it has loaded the model and before the cache is sized. Raises CheckpointError.
    """
    if engine.speculative != "draft":
        return
    checkpoint = open_draft(engine)
    try:
        facts = resolve_draft(engine, checkpoint, target.facts)
        mesh = Mesh(facts.spec) if groups is None else make_mesh(facts.spec, groups)
        target.attach(load_part(facts, checkpoint, mesh, device))
    finally:
        checkpoint.close()


def resolve_device(name: str, ordinal: int = 0, ranks: int = 1) -> torch.device:
    """The torch device of one of ``ranks`` local ranks; raises UsageError where too few exist."""
    if name != "cuda":
        return torch.device(name)
    if not torch.cuda.is_available():
        raise UsageError(
            "device 'cuda' is not here: this machine or this build of torch has 0 CUDA devices; "
            "expected cpu"
        )
    found = torch.cuda.device_count()
    if found < ranks:
        raise UsageError(
            f"device 'cuda' has {found} CUDA device{'s' if found > 1 else ''} here, one for each "
            f"rank is needed; expected a tp of at most {found}, or cpu"
        )
    return torch.device(name, ordinal)
