"""Layers divided over ranks: partial sums, parts of the vocabulary, and slices of the tokens.

Shape suffixes: T token rows, C columns, H hidden, V vocabulary, P vocabulary rows of one rank.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from layline.boundary.exit import get_forward
from layline.boundary.layout import BatchVariant
from layline.boundary.mesh import Mesh
from layline.boundary.quantised import QuantisedRows
from layline.boundary.rows import RankRows
from layline.comm.groups import Group
from layline.layers.embedding import Embedding
from layline.layers.forward_batch import ContextRows, ForwardBatch
from layline.layers.linear import Linear
from layline.layers.spans import StepPhase
from layline.topology import GroupName
from layline.weights.quantized import QuantizedTensor


class RowParallelLinear:
    """A linear layer that holds some input columns of its weight, so that ranks' outputs add up.

    ``linear`` has the bias on rank 0 of ``group`` only. With ``reduce_results`` a call returns the
    whole sum, unless the open exit scope leaves it to the boundary; without, always the part. What
    is summed has ``sum_dtype``, the linear layer's own by default.
    """

    __slots__ = ("_group", "_sum_dtype", "linear", "reduces")

    def __init__(
        self,
        linear: Linear,
        group: Group,
        reduce_results: bool = True,
        sum_dtype: torch.dtype | None = None,
    ) -> None:
        self.linear = linear
        self.reduces = reduce_results
        self._group = group
        self._sum_dtype = sum_dtype

    def __call__(self, x: torch.Tensor | QuantisedRows, phase: StepPhase) -> torch.Tensor:
        """[tokens, this rank's in features] to [tokens, out features], whole or partial.

        Every rank of the group calls it with as many rows, except where all have none.
        """
        part = self.partial(x, phase)
        if not self.reduces or part.shape[0] == 0:
            return part
        flags = get_forward()
        if flags.fuse_mlp_allreduce or flags.mlp_reduce_scatter:
            return part
        whole: torch.Tensor = self._group.all_reduce(part)
        return whole

    def partial(self, x: torch.Tensor | QuantisedRows, phase: StepPhase) -> torch.Tensor:
        """This rank's part of the sum, [tokens, out features]; no communication."""
        part = self.linear(x, phase)
        return part if self._sum_dtype is None else part.to(self._sum_dtype)

    @property
    def num_bytes(self) -> int:
        """Memory of all copies of this rank's weight."""
        return self.linear.num_bytes


class VocabParallelEmbedding:
    """Token embedding whose table is divided over ``group`` by rows.

    ``embedding`` holds the rows of ids ``first`` .. ``stop - 1``, and perhaps padding after them.
    """

    __slots__ = ("_embedding", "_first", "_group", "_stop")

    def __init__(self, embedding: Embedding, vocabulary: tuple[int, int], group: Group) -> None:
        self._embedding = embedding
        self._first, self._stop = vocabulary
        self._group = group

    @property
    def table(self) -> torch.Tensor | QuantizedTensor:
        """This rank's rows, [padded rows, hidden]."""
        return self._embedding.table

    def __call__(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[tokens] int64 to [tokens, hidden]; every rank of the group calls it with equal ids."""
        part = self.partial(input_ids)
        if part.shape[0] == 0:
            return part
        whole: torch.Tensor = self._group.all_reduce(part)
        return whole

    def partial(self, input_ids: torch.Tensor) -> torch.Tensor:
        """The embedding of this rank's ids and zeros for others, [tokens, hidden]."""
        outside = (input_ids < self._first) | (input_ids >= self._stop)
        rows = self._embedding((input_ids - self._first).masked_fill(outside, 0))
        return rows.masked_fill_(outside.unsqueeze(1), 0.0)


class ParallelHead:
    """Output projection whose rows, one for each token id, are divided over ``group``.

    ``linear`` has equally many rows on every rank; those past ``vocab_size`` are padding.
    """

    __slots__ = ("_group", "_vocab_size", "linear")

    def __init__(self, linear: Linear, vocab_size: int, group: Group) -> None:
        self.linear = linear
        self._vocab_size = vocab_size
        self._group = group

    @property
    def weight(self) -> torch.Tensor | None:
        """This rank's plain rows, [padded rows, hidden], where they are held plain."""
        return self.linear.weight

    @property
    def num_bytes(self) -> int:
        """Memory of all copies of this rank's weight."""
        return self.linear.num_bytes

    def __call__(self, x_TH: torch.Tensor, phase: StepPhase) -> torch.Tensor:
        """[tokens, hidden] to [tokens, vocabulary] on every rank of the group.

        Every rank of the group calls it with equal rows; with none there is no communication.
        """
        if x_TH.shape[0] == 0:
            return x_TH.new_empty(0, self._vocab_size)
        part_TP = self.linear(x_TH, phase)
        joined: torch.Tensor = self._group.all_gather(part_TP)
        # A gather joins rows: each rank's block of logits follows the one before.
        by_rank = joined.view(self._group.size, *part_TP.shape)
        logits_TV = by_rank.transpose(0, 1).reshape(x_TH.shape[0], -1)
        return logits_TV[:, : self._vocab_size]


def compute_group(mesh: Mesh, name: GroupName) -> Group | None:
    """The group as compute uses it, None where it is this rank alone."""
    return mesh.compute_groups[name] if mesh.topology.size(name) > 1 else None


def sliced_rows(forward_batch: ForwardBatch) -> RankRows | None:
    """The step's rows where compute arrives on slices of them, else None."""
    if forward_batch.variant is not BatchVariant.SEQUENCE_PARALLEL:
        return None
    assert forward_batch.rows is not None, "a sequence-parallel batch carries its row counts"
    return forward_batch.rows


def gather_shards(
    shard: torch.Tensor | QuantisedRows, rows: RankRows, group: Group
) -> torch.Tensor:
    """Every real row, [rows.own, columns], of slices [rows.shard, columns] over ``group``."""
    if isinstance(shard, QuantisedRows):
        packed: torch.Tensor = group.all_gather(shard.packed)
        return QuantisedRows(packed[: rows.own]).dequantised()
    joined: torch.Tensor = group.all_gather(shard)
    return joined[: rows.own]


def scatter_shards(part: torch.Tensor, rows: RankRows, group: Group) -> torch.Tensor:
    """This rank's slice, [rows.shard, columns], of the sum of every rank's [rows.own, columns].

    Rows past the real ones are zero.
    """
    padding = rows.shard * group.size - part.shape[0]
    shard: torch.Tensor = group.reduce_scatter(F.pad(part, (0, 0, 0, padding)))
    return shard


def gather_context(rows_TC: torch.Tensor, context: ContextRows, group: Group) -> torch.Tensor:
    """The rows of all context-parallel ranks, [tokens, columns] in the slots' order.

    Every rank of ``group`` calls it, those without rows too.
    """
    padded = F.pad(rows_TC, (0, 0, 0, context.width - rows_TC.shape[0]))
    joined: torch.Tensor = group.all_gather(padded)
    return joined.index_select(0, context.order)
