"""What one rank of a mesh holds of a dense decoder, and which degrees fit it. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from layline.errors import UsageError
from layline.models.config import DecoderConfig
from layline.topology import GroupName, Topology

Span = tuple[int, int]
"""Rows or columns ``first`` .. ``stop - 1`` of a weight."""


@dataclass(frozen=True)
class Shards:
    """The part of every weight that ``topology``'s rank holds.

    Attention and the vocabulary are divided over attention TP, a dense FFN over all of ``tp``, or
    not at all when ``dense_tp`` is 1. Raises UsageError for degrees that do not fit; see
    :func:`check_degrees`.
    """

    config: DecoderConfig
    topology: Topology

    def __post_init__(self) -> None:
        check_degrees(self.config, self.topology)

    @property
    def num_heads(self) -> int:
        """Query heads of this rank."""
        return self.config.num_heads // self.topology.attn_tp

    @property
    def num_kv_heads(self) -> int:
        """Key and value heads of this rank, replicas included."""
        return max(1, self.config.num_kv_heads // self.topology.attn_tp)

    @property
    def q_size(self) -> int:
        """Columns of this rank's query heads."""
        return self.num_heads * self.config.head_dim

    @property
    def kv_size(self) -> int:
        """Columns of this rank's key heads (value heads are as many)."""
        return self.num_kv_heads * self.config.head_dim

    @property
    def heads(self) -> Span:
        """This rank's query heads."""
        first = self._attn_tp_rank * self.num_heads
        return first, first + self.num_heads

    @property
    def kv_heads(self) -> Span:
        """This rank's key and value heads: those that its query heads attend with."""
        first = self._attn_tp_rank * self.config.num_kv_heads // self.topology.attn_tp
        return first, first + self.num_kv_heads

    @property
    def q_span(self) -> Span:
        """Rows of the query projection, and columns of the output projection."""
        return self._features(self.heads)

    @property
    def kv_span(self) -> Span:
        """Rows of the key projection and of the value projection."""
        return self._features(self.kv_heads)

    @property
    def intermediate(self) -> Span:
        """Rows of gate and up, and columns of down."""
        if self.topology.dense_tp == 1:
            return 0, self.config.intermediate_size
        size = self.config.intermediate_size // self.topology.tp
        first = self.topology.index_in(GroupName.TP) * size
        return first, first + size

    @property
    def vocab_rows(self) -> int:
        """Rows of the embedding and the head on every rank, padding included."""
        return -(-self.config.vocab_size // self.topology.attn_tp)

    @property
    def vocabulary(self) -> Span:
        """Token ids whose rows this rank holds; the last ranks may have fewer, or none."""
        first = min(self._attn_tp_rank * self.vocab_rows, self.config.vocab_size)
        return first, min(first + self.vocab_rows, self.config.vocab_size)

    @property
    def _attn_tp_rank(self) -> int:
        return self.topology.coordinates.attn_tp

    def _features(self, heads: Span) -> Span:
        size = self.config.head_dim
        return heads[0] * size, heads[1] * size


def check_degrees(config: DecoderConfig, topology: Topology) -> None:
    """Raise UsageError, listing the degrees that fit, when a model cannot be divided like this.

    Attention TP must divide the query heads, and divide the KV heads or be a multiple of them:
    then each KV head is replicated. ``tp`` must divide the intermediate size where the FFN is
    divided. The vocabulary is padded and so fits every degree.
    """
    tp, attn_tp = topology.tp, topology.attn_tp
    if topology.ep > 1:
        raise UsageError(f"ep {topology.ep} needs experts; {config.architecture} has none, so ep 1")
    if not _heads_fit(config, attn_tp):
        shown = f"tp {tp} (attention TP {attn_tp})"
        raise UsageError(
            f"{shown} does not fit {config.num_heads} heads and {config.num_kv_heads} KV heads; "
            f"expected attention TP {_attention_degrees(config, topology)}"
            f"{_attn_dp_hint(config, topology)}"
        )
    if not _ffn_fits(config, topology, tp):
        outer = tp // attn_tp
        fitting = [outer * degree for degree in _fitting_heads(config)]
        known = _either([degree for degree in fitting if config.intermediate_size % degree == 0])
        raise UsageError(
            f"tp {tp} does not divide the intermediate size {config.intermediate_size}; expected "
            + (f"tp {known}, or --dense-tp 1" if known else "--dense-tp 1")
        )


def _heads_fit(config: DecoderConfig, attn_tp: int) -> bool:
    heads, kv_heads = config.num_heads, config.num_kv_heads
    return heads % attn_tp == 0 and (kv_heads % attn_tp == 0 or attn_tp % kv_heads == 0)


def _ffn_fits(config: DecoderConfig, topology: Topology, tp: int) -> bool:
    divided = topology.tp > 1 and topology.dense_tp == topology.tp
    return not divided or config.intermediate_size % tp == 0


def _fitting_heads(config: DecoderConfig) -> list[int]:
    return [degree for degree in range(1, config.num_heads + 1) if _heads_fit(config, degree)]


def _attention_degrees(config: DecoderConfig, topology: Topology) -> str:
    """Every attention TP the heads allow, and which of them need an undivided FFN."""
    outer = topology.tp // topology.attn_tp
    degrees = _fitting_heads(config)
    whole = [n for n in degrees if n > 1 and not _ffn_fits(config, topology, outer * n)]
    return _either(degrees) + (f" ({_either(whole)} with --dense-tp 1)" if whole else "")


def _attn_dp_hint(config: DecoderConfig, topology: Topology) -> str:
    """The least attention DP with which this ``tp`` fits, where there is one."""
    if not _ffn_fits(config, topology, topology.tp):
        return ""
    inner = topology.tp // topology.attn_cp
    for attn_dp in range(topology.attn_dp + 1, inner + 1):
        if inner % attn_dp == 0 and _heads_fit(config, inner // attn_dp):
            return f", or --attn-dp {attn_dp}"
    return ""


def _either(numbers: list[int]) -> str:
    if len(numbers) < 2:
        return "".join(map(str, numbers))
    return f"{', '.join(map(str, numbers[:-1]))} or {numbers[-1]}"
