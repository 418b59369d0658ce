"""One dense decoder for every family: compute modules, and layers whose boundaries are declared.

Shape suffixes: T token rows, N heads, D head size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch

from layline.boundary.factories import make_stages
from layline.boundary.layout import BatchVariant
from layline.boundary.mesh import Mesh
from layline.boundary.residual import batch as residual_batch
from layline.layers.attention import AttentionBackend
from layline.layers.embedding import Embedding
from layline.layers.forward_batch import ForwardBatch
from layline.layers.kv_cache import KVCache
from layline.layers.linear import Linear
from layline.layers.norm import RMSNorm
from layline.layers.parallel import (
    ParallelHead,
    RowParallelLinear,
    VocabParallelEmbedding,
    compute_group,
    gather_context,
    gather_shards,
    scatter_shards,
    sliced_rows,
)
from layline.layers.rope import RotaryTable
from layline.layers.spans import Phase, StepPhase
from layline.models.config import DecoderConfig
from layline.models.loader import ModelLoader, TiedTable
from layline.models.parallel import Shards
from layline.models.stack import LayerRange, LayerStages
from layline.topology import GroupName
from layline.weights.checkpoint import Region


class SelfAttention:
    """Merged projections, rotary positions, cache write, attention, output projection.

    On a mesh these are this rank's heads. The output projection never sums over ranks: its output
    is left partial, except on a slice of the tokens, which compute gathers and scatters itself.
    Outputs then have the residual's dtype whatever kernel ran: ranks in another phase join them.
    """

    def __init__(
        self,
        shards: Shards,
        layer_id: int,
        loader: ModelLoader,
        backend: AttentionBackend,
        mesh: Mesh,
    ) -> None:
        config = shards.config
        prefix = f"model.layers.{layer_id}.self_attn"
        hidden, queries = config.hidden_size, (config.q_size, config.hidden_size)
        keys = Region((config.kv_size, hidden), rows=shards.kv_span)
        self.qkv_proj = loader.linear(
            {
                f"{prefix}.q_proj": Region(queries, rows=shards.q_span),
                f"{prefix}.k_proj": keys,
                f"{prefix}.v_proj": keys,
            },
            bias=config.qkv_bias,
        )
        self.o_proj = loader.row_parallel(
            f"{prefix}.o_proj",
            Region((hidden, config.q_size), columns=shards.q_span),
            bias=config.output_bias,
            group=compute_group(mesh, GroupName.ATTN_TP),
            reduce_results=False,
        )
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if config.qk_norm:
            self.q_norm = loader.norm(f"{prefix}.q_norm", config.head_dim, config.norm_eps)
            self.k_norm = loader.norm(f"{prefix}.k_norm", config.head_dim, config.norm_eps)
        self._rotate = loader.rotation()
        self._num_heads = shards.num_heads
        self._num_kv_heads = shards.num_kv_heads
        self._rotated = self._num_heads + self._num_kv_heads
        self._head_dim = config.head_dim
        self._window = config.windows[layer_id]
        self._backend = backend
        self._tp_group = compute_group(mesh, GroupName.TP)
        self._cp_group = compute_group(mesh, GroupName.ATTN_CP)
        self._output_dtype = loader.residual_dtype if mesh.topology.tp > 1 else None
        self.cache: KVCache | None = None

    def __call__(self, hidden_states: torch.Tensor, forward_batch: ForwardBatch) -> torch.Tensor:
        """[tokens, hidden] to a partial output of the same shape."""
        assert self.cache is not None, "the runner binds a cache before the first step"
        group = self._tp_group
        sliced = None if group is None else sliced_rows(forward_batch)
        if group is not None and sliced is not None:
            hidden_states = gather_shards(hidden_states, sliced, group)
        qkv = self.qkv_proj(hidden_states, forward_batch.phase)
        heads_TND = qkv.view(qkv.shape[0], -1, self._head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            self._normalise_heads(heads_TND, self.q_norm, self.k_norm)
        self._rotate(heads_TND[:, : self._rotated], forward_batch.rope_cos, forward_batch.rope_sin)
        kv_T2KD = heads_TND[:, self._num_heads :].view(-1, 2, self._num_kv_heads, self._head_dim)
        if forward_batch.context_parallel is not None:
            self.join_context(kv_T2KD, forward_batch)
        else:
            self.cache.write(forward_batch.slots, kv_T2KD)
        attended = self._backend.attend(
            heads_TND[:, : self._num_heads],
            kv_T2KD,
            self.cache,
            forward_batch.attention,
            self._window,
        )
        output = self.o_proj(attended, forward_batch.phase)
        if self._output_dtype is None:
            return output
        output = output.to(self._output_dtype)
        if group is None or sliced is None:
            return output
        return scatter_shards(output, sliced, group)

    def without_rows(
        self, hidden_states: torch.Tensor, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        """What a rank without rows does instead of a call: [0, hidden] to the same shape."""
        if forward_batch.context_parallel is not None:
            self.join_context(None, forward_batch)
        if self._output_dtype is None:
            return hidden_states
        return hidden_states.to(self._output_dtype)

    def join_context(self, kv_T2KD: torch.Tensor | None, forward_batch: ForwardBatch) -> None:
        """Write the keys and values of every context-parallel rank to this rank's cache.

        They travel as they are stored: a quantised cache's in 8 bits, with their scales.

        Every rank of the CP group calls it once a layer; None stands for no rows.
        """
        context = forward_batch.context_parallel
        assert context is not None
        assert self.cache is not None
        assert self._cp_group is not None
        joined = gather_context(self.cache.stored(kv_T2KD), context, self._cp_group)
        self.cache.write_stored(forward_batch.slots, joined)

    def _normalise_heads(self, heads_TND: torch.Tensor, q_norm: RMSNorm, k_norm: RMSNorm) -> None:
        queries = heads_TND[:, : self._num_heads]
        keys = heads_TND[:, self._num_heads : self._rotated]
        queries.copy_(q_norm(queries))
        keys.copy_(k_norm(keys))


class GatedMLP:
    """SwiGLU feed-forward: merged gate and up, then down.

    On a mesh with ``dense_tp`` 1 a rank has the whole FFN and computes on its own rows; otherwise
    it has a part of the intermediate features, and the down projection sums over all ranks unless
    the open exit scope leaves that to the boundary.
    """

    def __init__(self, shards: Shards, layer_id: int, loader: ModelLoader, mesh: Mesh) -> None:
        config = shards.config
        prefix = f"model.layers.{layer_id}.mlp"
        hidden, size = config.hidden_size, config.intermediate_size
        up = Region((size, hidden), rows=shards.intermediate)
        self.gate_up_proj = loader.linear(
            {f"{prefix}.gate_proj": up, f"{prefix}.up_proj": up}, bias=config.mlp_bias
        )
        first, stop = shards.intermediate
        self._gated = loader.gated_product(stop - first)
        self._group = None
        if mesh.topology.dense_tp != 1:
            self._group = compute_group(mesh, GroupName.TP)
        self._output_dtype = loader.residual_dtype if mesh.topology.tp > 1 else None
        self.down_proj = loader.row_parallel(
            f"{prefix}.down_proj",
            Region((hidden, size), columns=shards.intermediate),
            bias=config.mlp_bias,
            group=self._group,
        )

    def __call__(self, hidden_states: torch.Tensor, forward_batch: ForwardBatch) -> torch.Tensor:
        """[tokens, hidden] to the same shape."""
        if self._output_dtype is not None:
            return self._on_mesh(hidden_states, forward_batch).to(self._output_dtype)
        phase = forward_batch.phase
        return self.down_proj(self._gated(self.gate_up_proj(hidden_states, phase)), phase)

    def _on_mesh(self, hidden_states: torch.Tensor, forward_batch: ForwardBatch) -> torch.Tensor:
        if self._group is None:
            phase = forward_batch.phase
            return self.down_proj(self._gated(self.gate_up_proj(hidden_states, phase)), phase)
        assert isinstance(self.down_proj, RowParallelLinear)
        phase = forward_batch.ffn_phase or forward_batch.phase
        sliced = sliced_rows(forward_batch)
        if sliced is None:
            return self.down_proj(self._gated(self.gate_up_proj(hidden_states, phase)), phase)
        gathered = gather_shards(hidden_states, sliced, self._group)
        part = self.down_proj.partial(self._gated(self.gate_up_proj(gathered, phase)), phase)
        return scatter_shards(part, sliced, self._group)


class DecoderLayer:
    """Attention and FFN between declared boundaries; the layer itself only computes."""

    def __init__(
        self,
        shards: Shards,
        layer_id: int,
        stages: LayerStages,
        loader: ModelLoader,
        backend: AttentionBackend,
        mesh: Mesh,
    ) -> None:
        config = shards.config
        prefix = f"model.layers.{layer_id}"
        self.self_attn = SelfAttention(shards, layer_id, loader, backend, mesh)
        self.mlp = GatedMLP(shards, layer_id, loader, mesh)
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
            mesh=mesh,
        )

    def __call__(self, hidden_states: torch.Tensor, forward_batch: ForwardBatch) -> torch.Tensor:
        """Pass the stream's handle on, [tokens, hidden]."""
        hidden_states = self.attn_boundary.prepare(hidden_states, forward_batch)
        if hidden_states.shape[0] != 0:
            hidden_states = self.self_attn(hidden_states, forward_batch)
        else:
            hidden_states = self.self_attn.without_rows(hidden_states, forward_batch)
        hidden_states = self.attn_boundary.finish(hidden_states, forward_batch)

        hidden_states = self.ffn_boundary.prepare(hidden_states, forward_batch)
        with self.ffn_boundary.exit(forward_batch) as output:
            hidden_states = self.mlp(hidden_states, forward_batch)
        return output.finish(hidden_states)  # type: ignore[no-any-return]


class Decoder:
    """One pipeline stage of a model, this rank's part of it, on one device.

    A pipeline of one stage is the whole: embedding, layers, final norm and head. Otherwise the
    first stage has the embedding, the last the norm and the head, and each its ``layers``.
    Raises UsageError when the model cannot be divided over the mesh.
    """

    def __init__(
        self,
        config: DecoderConfig,
        stack: Sequence[LayerStages],
        loader: ModelLoader,
        backend: AttentionBackend,
        mesh: Mesh,
        part: LayerRange | None = None,
    ) -> None:
        self.config = config
        self.shards = shards = Shards(config, mesh.topology)
        self.part = part or LayerRange.whole(config.num_layers)
        vocabulary = Region((config.vocab_size, config.hidden_size), rows=shards.vocabulary)
        group = compute_group(mesh, GroupName.ATTN_TP)
        embedding = None
        if self.part.is_first:
            embedding = loader.embedding("model.embed_tokens", vocabulary, shards.vocab_rows)
        self.embed_tokens: Embedding | VocabParallelEmbedding | None = embedding
        if group is not None and embedding is not None:
            self.embed_tokens = VocabParallelEmbedding(embedding, shards.vocabulary, group)
        self.norm: RMSNorm | None = None
        if self.part.is_last:
            self.norm = loader.norm("model.norm", config.hidden_size, config.norm_eps)

        def head() -> Linear | None:
            if not self.part.is_last:
                return None
            tied = TiedTable("model.embed_tokens", embedding, config.tied_head)
            return loader.head("lm_head", tied, vocabulary, shards.vocab_rows)

        def layer(layer_id: int) -> DecoderLayer:
            return DecoderLayer(shards, layer_id, stack[layer_id], loader, backend, mesh)

        # The head is the longest job, so it starts first.
        linear, self.layers = loader.head_and_layers(head, [partial(layer, i) for i in self.part])
        self.lm_head: Linear | ParallelHead | None = linear
        if group is not None and linear is not None:
            self.lm_head = ParallelHead(linear, config.vocab_size, group)
        self._rotary: RotaryTable = loader.rotary(config.rope, config.head_dim)

    @property
    def num_bytes(self) -> int:
        """Memory of the matrices: the table, and every copy each linear layer holds."""
        table = None if self.embed_tokens is None else self.embed_tokens.table
        total = 0 if table is None else table.nbytes
        if self.lm_head is not None and (table is None or self.lm_head.weight is not table):
            total += self.lm_head.num_bytes
        for layer in self.layers:
            attention, mlp = layer.self_attn, layer.mlp
            total += attention.qkv_proj.num_bytes + attention.o_proj.num_bytes
            total += mlp.gate_up_proj.num_bytes + mlp.down_proj.num_bytes
        return total

    @property
    def windows(self) -> frozenset[int | None]:
        """The attention windows of this stage's layers; None stands for full attention."""
        return frozenset(self.config.windows[layer_id] for layer_id in self.part)

    def bind_cache(self, layer_caches: Sequence[KVCache]) -> None:
        """Give each layer of this stage its cache, of this rank's key/value heads."""
        for layer, cache in zip(self.layers, layer_caches, strict=True):
            layer.self_attn.cache = cache

    @property
    def rope_is_dynamic(self) -> bool:
        """True when :meth:`rotations` needs the sequence lengths."""
        return self._rotary.is_dynamic

    def rotations(
        self, phase: StepPhase, positions: torch.Tensor, lengths: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [tokens, 1, head_dim] for ``positions`` [tokens], in heads' dtype."""
        dtype = self.layers[0].self_attn.qkv_proj.output_dtype(phase)
        cos, sin = self._rotary(positions, lengths)
        return cos.to(dtype), sin.to(dtype)

    def run_stage(
        self, entering: torch.Tensor | Mapping[str, torch.Tensor], forward_batch: ForwardBatch
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """This stage's part of a step.

        The first stage is given token ids [tokens] (int64), any other what the stage before it
        returned. The last returns normalised hidden states [tokens, hidden], any other the tensors
        that cross the cut: ``hidden_states`` and, while an update is pending, ``residual``.
        """
        if isinstance(entering, torch.Tensor):
            hidden_states = self._enter(entering, forward_batch)
        else:
            residual_batch.start(forward_batch)
            hidden_states = self.layers[0].attn_boundary.from_pp(entering, forward_batch)
        for layer in self.layers:
            hidden_states = layer(hidden_states, forward_batch)
        if self.norm is None:
            crossing: dict[str, torch.Tensor] = residual_batch.to_pp(hidden_states, forward_batch)
            return crossing
        normed: torch.Tensor = residual_batch.norm(
            hidden_states, forward_batch, self.norm, skip_empty=True
        )
        return normed

    def _enter(self, input_ids: torch.Tensor, forward_batch: ForwardBatch) -> torch.Tensor:
        assert self.embed_tokens is not None, "token ids enter the first stage"
        scattered = forward_batch.variant is BatchVariant.INPUT_SCATTERED
        if scattered and isinstance(self.embed_tokens, VocabParallelEmbedding):
            # The first boundary sums onto slices, so the embedding leaves its sum.
            residual_batch.start(forward_batch, partial=True)
            return self.embed_tokens.partial(input_ids)
        residual_batch.start(forward_batch)
        return self.embed_tokens(input_ids)

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Scores [rows, vocabulary], FP32 or the run's dtype; always by the decode kernel."""
        assert self.lm_head is not None, "the head is with the last stage"
        if hidden_states.shape[0] == 0:
            return hidden_states.new_empty(0, self.config.vocab_size)
        return self.lm_head(hidden_states, Phase.DECODE)
