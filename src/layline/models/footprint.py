"""Memory that one rank needs for a dense decoder, from its configuration alone. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from layline.models.config import DecoderConfig
from layline.models.parallel import Shards
from layline.topology import Topology


@dataclass(frozen=True)
class Footprint:
    """Bytes of one rank: its weights held plain in the run's dtype, and its cache for each token.

    Every rank has as many, except that biases of partial sums are on one rank of each group.
    """

    weights: int
    kv_per_token: int


@dataclass(frozen=True)
class PartValues:
    """What one rank holds by part: values of a layer, of the final norm, and of the token table at
    either end; and the heads' keys and values that a layer keeps of each token.
    """

    layer: int
    norm: int
    table: int
    cached_heads: int


def part_values(config: DecoderConfig, topology: Topology) -> PartValues:
    """What each part of a rank of ``topology`` holds."""
    shards = Shards(config, topology)
    hidden, size = config.hidden_size, shards.intermediate[1] - shards.intermediate[0]
    queries, keys = shards.q_size, shards.kv_size
    layer = hidden * (queries + 2 * keys) + queries * hidden + 3 * size * hidden
    layer += 2 * hidden
    if config.qkv_bias:
        layer += queries + 2 * keys
    if config.output_bias:
        layer += hidden
    if config.mlp_bias:
        layer += 2 * size + hidden
    if config.qk_norm:
        layer += 2 * config.head_dim
    return PartValues(layer, hidden, shards.vocab_rows * hidden, 2 * shards.num_kv_heads)


def footprint(
    config: DecoderConfig, topology: Topology, itemsize: int, cached_head_bytes: int
) -> Footprint:
    """The footprint of a rank of ``topology``.

    ``itemsize`` is of a weight, ``cached_head_bytes`` of one head's key or value of a token.
    """
    parts = part_values(config, topology)
    values = config.num_layers * parts.layer + parts.norm
    values += parts.table * (1 if config.tied_head else 2)
    cached = config.num_layers * parts.cached_heads * cached_head_bytes
    return Footprint(values * itemsize, cached)
