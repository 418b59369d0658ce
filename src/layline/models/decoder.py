"""One dense decoder for every family: compute modules, and layers whose boundaries are declared.

Shape suffixes: T token rows, N heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from layline.boundary.factories import make_stages
from layline.boundary.residual import batch as residual_batch
from layline.kernels.rope import rotate_heads_
from layline.kernels.silu_mul import silu_mul
from layline.layers.attention import AttentionBackend
from layline.layers.embedding import Embedding
from layline.layers.forward_batch import ForwardBatch
from layline.layers.linear import Linear
from layline.layers.norm import RMSNorm
from layline.layers.rope import RotaryTable
from layline.layers.spans import Phase
from layline.models.config import DecoderConfig
from layline.models.loader import ModelLoader
from layline.models.stack import LayerStages
from layline.topology import Topology


class SelfAttention:
    """Merged projections, rotary positions, cache write, attention, output projection."""

    def __init__(
        self, config: DecoderConfig, layer_id: int, loader: ModelLoader, backend: AttentionBackend
    ) -> None:
        prefix = f"model.layers.{layer_id}.self_attn"
        sizes = (config.q_size, config.kv_size, config.kv_size)
        names = tuple(f"{prefix}.{part}_proj" for part in "qkv")
        self.qkv_proj = loader.linear(names, sizes, config.hidden_size, bias=config.qkv_bias)
        self.o_proj = loader.linear(
            (f"{prefix}.o_proj",), (config.hidden_size,), config.q_size, bias=config.output_bias
        )
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if config.qk_norm:
            self.q_norm = loader.norm(f"{prefix}.q_norm", config.head_dim, config.norm_eps)
            self.k_norm = loader.norm(f"{prefix}.k_norm", config.head_dim, config.norm_eps)
        self._q_size = config.q_size
        self._rotated = config.num_heads + config.num_kv_heads
        self._num_heads = config.num_heads
        self._num_kv_heads = config.num_kv_heads
        self._head_dim = config.head_dim
        self._window = config.windows[layer_id]
        self._backend = backend
        self.cache: torch.Tensor | None = None

    def __call__(self, hidden_states: torch.Tensor, forward_batch: ForwardBatch) -> torch.Tensor:
        """[tokens, hidden] to a partial output of the same shape."""
        assert self.cache is not None, "the runner binds a cache before the first step"
        qkv = self.qkv_proj(hidden_states, forward_batch.phase)
        heads_TND = qkv.view(qkv.shape[0], -1, self._head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            self._normalise_heads(heads_TND, self.q_norm, self.k_norm)
        rotate_heads_(heads_TND[:, : self._rotated], forward_batch.rope_cos, forward_batch.rope_sin)
        kv_T2KD = heads_TND[:, self._num_heads :].view(-1, 2, self._num_kv_heads, self._head_dim)
        if isinstance(forward_batch.slots, slice):
            self.cache[forward_batch.slots].copy_(kv_T2KD)
        else:
            self.cache.index_copy_(0, forward_batch.slots, kv_T2KD.to(self.cache.dtype))
        attended = self._backend.attend(
            heads_TND[:, : self._num_heads],
            kv_T2KD,
            self.cache,
            forward_batch.attention,
            self._window,
        )
        return self.o_proj(attended, forward_batch.phase)

    def _normalise_heads(self, heads_TND: torch.Tensor, q_norm: RMSNorm, k_norm: RMSNorm) -> None:
        queries = heads_TND[:, : self._num_heads]
        keys = heads_TND[:, self._num_heads : self._rotated]
        queries.copy_(q_norm(queries))
        keys.copy_(k_norm(keys))


class GatedMLP:
    """SwiGLU feed-forward: merged gate and up, then down."""

    def __init__(self, config: DecoderConfig, layer_id: int, loader: ModelLoader) -> None:
        prefix = f"model.layers.{layer_id}.mlp"
        size = config.intermediate_size
        self.gate_up_proj = loader.linear(
            (f"{prefix}.gate_proj", f"{prefix}.up_proj"),
            (size, size),
            config.hidden_size,
            bias=config.mlp_bias,
        )
        self.down_proj = loader.linear(
            (f"{prefix}.down_proj",), (config.hidden_size,), size, bias=config.mlp_bias
        )

    def __call__(self, hidden_states: torch.Tensor, forward_batch: ForwardBatch) -> torch.Tensor:
        """[tokens, hidden] to the same shape."""
        phase = forward_batch.phase
        return self.down_proj(silu_mul(self.gate_up_proj(hidden_states, phase)), phase)


class DecoderLayer:
    """Attention and FFN between declared boundaries; the layer itself only computes."""

    def __init__(
        self,
        config: DecoderConfig,
        layer_id: int,
        stages: LayerStages,
        loader: ModelLoader,
        backend: AttentionBackend,
        topology: Topology,
    ) -> None:
        prefix = f"model.layers.{layer_id}"
        self.self_attn = SelfAttention(config, layer_id, loader, backend)
        self.mlp = GatedMLP(config, layer_id, loader)
        self.input_layernorm = loader.norm(
            f"{prefix}.input_layernorm", config.hidden_size, config.norm_eps
        )
        self.post_attention_layernorm = loader.norm(
            f"{prefix}.post_attention_layernorm", config.hidden_size, config.norm_eps
        )
        self.attn_boundary, self.ffn_boundary = make_stages(
            (stages.attn, self.input_layernorm),
            (stages.ffn, self.post_attention_layernorm),
            previous=stages.previous,
            terminal=stages.terminal,
            topology=topology,
        )

    def __call__(self, hidden_states: torch.Tensor, forward_batch: ForwardBatch) -> torch.Tensor:
        """Pass the stream's handle on, [tokens, hidden]."""
        hidden_states = self.attn_boundary.prepare(hidden_states, forward_batch)
        if hidden_states.shape[0] != 0:
            hidden_states = self.self_attn(hidden_states, forward_batch)
        hidden_states = self.attn_boundary.finish(hidden_states, forward_batch)

        hidden_states = self.ffn_boundary.prepare(hidden_states, forward_batch)
        with self.ffn_boundary.exit(forward_batch) as output:
            hidden_states = self.mlp(hidden_states, forward_batch)
        return output.finish(hidden_states)  # type: ignore[no-any-return]


class Decoder:
    """Embedding, layers, final norm and head of one model on one device."""

    def __init__(
        self,
        config: DecoderConfig,
        stack: Sequence[LayerStages],
        loader: ModelLoader,
        backend: AttentionBackend,
        topology: Topology,
    ) -> None:
        self.config = config
        self.embed_tokens: Embedding = loader.embedding(
            "model.embed_tokens", config.vocab_size, config.hidden_size
        )
        self.norm = loader.norm("model.norm", config.hidden_size, config.norm_eps)

        def head() -> Linear:
            shape = (config.vocab_size, config.hidden_size)
            return loader.head("lm_head", self.embed_tokens, shape, config.tied_head)

        def layer(layer_id: int) -> DecoderLayer:
            return DecoderLayer(config, layer_id, stack[layer_id], loader, backend, topology)

        # The head is the longest job, so it starts first.
        ids = range(config.num_layers)
        self.lm_head, self.layers = loader.head_and_layers(head, [partial(layer, i) for i in ids])
        self._rotary: RotaryTable = loader.rotary(config.rope, config.head_dim)

    @property
    def num_bytes(self) -> int:
        """Memory of the matrices: the table, and every copy each linear layer holds."""
        linears = [self.lm_head]
        for layer in self.layers:
            linears += [layer.self_attn.qkv_proj, layer.self_attn.o_proj]
            linears += [layer.mlp.gate_up_proj, layer.mlp.down_proj]
        table = self.embed_tokens.table
        shared = self.lm_head.weight is table
        return sum(linear.num_bytes for linear in linears) + (0 if shared else table.nbytes)

    def bind_cache(self, layer_caches: Sequence[torch.Tensor]) -> None:
        """Give each layer its cache, [slots, 2, kv heads, head dim]."""
        for layer, cache in zip(self.layers, layer_caches, strict=True):
            layer.self_attn.cache = cache

    @property
    def rope_is_dynamic(self) -> bool:
        """True when :meth:`rotations` needs the sequence lengths."""
        return self._rotary.is_dynamic

    def rotations(
        self, phase: Phase, positions: torch.Tensor, lengths: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [tokens, 1, head_dim] for ``positions`` [tokens], in heads' dtype."""
        dtype = self.layers[0].self_attn.qkv_proj.output_dtype(phase)
        cos, sin = self._rotary(positions, lengths)
        return cos.to(dtype), sin.to(dtype)

    def forward(self, input_ids: torch.Tensor, forward_batch: ForwardBatch) -> torch.Tensor:
        """Normalised hidden states [tokens, hidden] for ``input_ids`` [tokens] (int64)."""
        residual_batch.start(forward_batch)
        hidden_states = self.embed_tokens(input_ids)
        for layer in self.layers:
            hidden_states = layer(hidden_states, forward_batch)
        normed: torch.Tensor = residual_batch.norm(
            hidden_states, forward_batch, self.norm, skip_empty=True
        )
        return normed

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Scores [rows, vocabulary], FP32 or the run's dtype; always by the decode kernel."""
        if hidden_states.shape[0] == 0:
            return hidden_states.new_empty(0, self.config.vocab_size)
        return self.lm_head(hidden_states, Phase.DECODE)
