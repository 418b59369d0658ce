"""Load a model: resolve the run's dtype and context, build the decoder, bind its cache."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch

from layline.config import EngineConfig, default_threads
from layline.engine import kv
from layline.engine.runner import Runner
from layline.errors import UsageError
from layline.layers.attention import TorchAttention
from layline.models.config import DecoderConfig
from layline.models.decoder import Decoder
from layline.models.loader import LoadTarget, ModelLoader
from layline.models.registry import family_of
from layline.text.tokenizer import Tokenizer, load_tokenizer
from layline.topology import Topology
from layline.weights.checkpoint import Checkpoint
from layline.weights.opening import open_checkpoint

PLAIN_ENCODINGS = frozenset({"F32", "F16", "BF16"})
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run, with what was resolved for it.

    ``valid_vocab`` is the number of ids that may be sampled: rows of the embedding beyond the
    tokenizer's vocabulary are padding.
    """

    config: DecoderConfig
    tokenizer: Tokenizer
    runner: Runner
    max_model_len: int
    valid_vocab: int
    num_blocks: int
    device: torch.device
    dtype: torch.dtype
    packed: bool
    weight_bytes: int
    cache_bytes: int


def load_model(engine: EngineConfig) -> LoadedModel:
    """Open the checkpoint that ``engine.model`` names and load it.

    Raises UsageError or CheckpointError with one line that names the value or file at fault.
    """
    device = resolve_device(engine.device)
    checkpoint = open_checkpoint(engine.model, seed=engine.seed)
    # Torch has one count for the process: the model that is loaded last decides.
    torch.set_num_threads(engine.threads or default_threads())
    try:
        return _load(engine, checkpoint, device)
    finally:
        checkpoint.close()


def resolve_device(name: str) -> torch.device:
    """The torch device; raises UsageError where it does not exist."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError(
            "device 'cuda' is not here: this machine or this build of torch has 0 CUDA devices; "
            "expected cpu"
        )
    return torch.device(name, 0) if name == "cuda" else torch.device(name)


def resolve_dtype(engine: EngineConfig, checkpoint: Checkpoint) -> tuple[torch.dtype, bool]:
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
        return DTYPES[engine.dtype], False
    if quantised:
        return torch.bfloat16, on_cpu
    if common is None:
        named = str(checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype"))
        common = {"float16": "F16", "bfloat16": "BF16"}.get(named, "F32")
    if common == "F16":
        return (torch.float32 if on_cpu else torch.float16), False
    return (torch.bfloat16 if common == "BF16" else torch.float32), False


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


def _load(engine: EngineConfig, checkpoint: Checkpoint, device: torch.device) -> LoadedModel:
    family = family_of(checkpoint.config)
    config = family.parse(checkpoint.config)
    max_model_len = resolve_context(engine, config)
    dtype, packed = resolve_dtype(engine, checkpoint)
    tokenizer = load_tokenizer(checkpoint)
    backend = TorchAttention(kv.BLOCK_SIZE, device, dtype)
    loader = ModelLoader(
        checkpoint,
        LoadTarget(device=device, dtype=dtype, packed=packed, max_position=max_model_len),
    )
    with torch.inference_mode():
        stack = tuple(family.stack(config))
        model = Decoder(config, stack, loader, backend, Topology())
        loader.finish()
        blocks = kv.num_blocks(engine, config, max_model_len, device, dtype)
        model.bind_cache(kv.allocate(config, blocks, device, dtype))
    return LoadedModel(
        config=config,
        tokenizer=tokenizer,
        runner=Runner(model, backend, kv.BLOCK_SIZE, device),
        max_model_len=max_model_len,
        valid_vocab=min(tokenizer.vocab_size, config.vocab_size),
        num_blocks=blocks,
        device=device,
        dtype=dtype,
        packed=packed,
        weight_bytes=model.num_bytes,
        cache_bytes=blocks * kv.BLOCK_SIZE * kv.slot_bytes(config, dtype),
    )
