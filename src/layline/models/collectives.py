"""Collectives that a dense decoder's compute runs besides the sums its boundaries plan. No torch.

What is here must be what models.decoder, layers.parallel and the runner call; ``layline plan
--analyze`` compares the two.
"""

from __future__ import annotations

from layline.boundary.layout import BatchVariant
from layline.boundary.mesh import MeshSpec
from layline.boundary.planning.cost import Collective, Element, Extent
from layline.boundary.planning.show import ComputeCollectives
from layline.boundary.planning.walk import enters_partial
from layline.boundary.rows import BatchKind
from layline.comm.groups import CollectiveKind
from layline.layers.kv_types import columns
from layline.models.config import DecoderConfig
from layline.models.parallel import Shards
from layline.topology import GroupName

PROMPTS_ONLY = (BatchVariant.SEQUENCE_PARALLEL, BatchVariant.CONTEXT_PARALLEL)
"""Kinds of batch without decodes."""


def compute_collectives(
    config: DecoderConfig,
    spec: MeshSpec,
    kind: BatchKind,
    kv_dtype: str,
    *,
    overlaps: bool = False,
) -> ComputeCollectives:
    """The collectives of the embedding, of each attention and FFN, and of the head.

    Keys and values travel as they are cached, with the scales that ``kv_dtype`` has. Where steps
    overlap, ranks first take what the step before sampled from the one that draws.
    """
    hidden = config.hidden_size
    shards = Shards(config, spec.topology)
    divided = spec.topology.attn_tp > 1
    fed: list[Collective] = []
    if overlaps and kind.variant not in PROMPTS_ONLY:
        fed = [
            _compute(CollectiveKind.ALL_GATHER, name, Extent.FED, 1, Element.IDS)
            for name in (GroupName.ATTN_TP, GroupName.ATTN_CP)
            if spec.topology.size(name) > 1
        ]
    entry: list[Collective] = []
    if divided and not enters_partial(spec, kind):
        # Each rank looks up the ids whose rows of the table it holds.
        entry.append(_compute(CollectiveKind.ALL_REDUCE, GroupName.ATTN_TP, Extent.OWN, hidden))
    gathers: tuple[Collective, ...] = ()
    if kind.variant is BatchVariant.SEQUENCE_PARALLEL:
        gathers = (
            _compute(CollectiveKind.ALL_GATHER, GroupName.TP, Extent.SLICES, hidden, Element.INPUT),
        )
    context: tuple[Collective, ...] = ()
    head: list[Collective] = []
    if kind.variant is BatchVariant.CONTEXT_PARALLEL:
        context = (
            _compute(
                CollectiveKind.ALL_GATHER,
                GroupName.ATTN_CP,
                Extent.CONTEXT,
                2 * shards.num_kv_heads * columns(kv_dtype, config.head_dim),
                Element.CACHED,
            ),
        )
        # A sampled row is on one CP rank; all of them need its scores.
        head.append(
            _compute(
                CollectiveKind.ALL_REDUCE, GroupName.ATTN_CP, Extent.SAMPLED, hidden, Element.INPUT
            )
        )
    if divided:
        head.append(
            _compute(
                CollectiveKind.ALL_GATHER,
                GroupName.ATTN_TP,
                Extent.SCORES,
                shards.vocab_rows,
                Element.SCORES,
            )
        )
    return ComputeCollectives(
        hidden, tuple(fed), tuple(entry), (*gathers, *context), gathers, tuple(head)
    )


def _compute(
    kind: CollectiveKind,
    group: GroupName,
    extent: Extent,
    columns: int,
    element: Element = Element.SUMMED,
) -> Collective:
    return Collective(kind, group, extent, columns, element, in_compute=True)
