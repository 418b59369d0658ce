"""The mesh a stack is built for: what the planner needs of it, and the groups that carry it out.

:class:`MeshSpec` is pure data and the key of every plan. :class:`Mesh` adds this rank's groups.
Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from layline.boundary.policy import DEFAULT, ReductionPolicy
from layline.comm.groups import Group, Groups
from layline.errors import UsageError
from layline.topology import GroupName, Topology


class CpRows(Enum):
    """How a context-parallel batch divides a prompt: MLA and DSA style, or GQA style."""

    EQUAL = "equal shards"
    CHUNKS = "unequal chunks"


@dataclass(frozen=True, kw_only=True)
class MeshSpec:
    """Topology, policy and the batch variants a run allows.

    Raises UsageError for a policy that is not resolved, and for sequence-parallel or
    input-scattered batches on a mesh that is not plain tensor parallelism: they divide rows over
    attention TP, which must then be all of TP.
    """

    topology: Topology = field(default_factory=Topology)
    policy: ReductionPolicy = DEFAULT
    cp_rows: CpRows = CpRows.CHUNKS
    sequence_parallel: bool = False
    input_scattered: bool = False
    quantised_all_reduce: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.policy, ReductionPolicy):
            raise UsageError(
                f"policy {self.policy!r} is not resolved; expected a ReductionPolicy, as "
                "resolve_policy gives one"
            )
        mesh = self.topology
        plain = mesh.tp > 1 and mesh.attn_tp == mesh.tp and mesh.dense_tp == mesh.tp
        for name in ("sequence_parallel", "input_scattered"):
            if getattr(self, name) and not plain:
                raise UsageError(
                    f"{name} needs plain tensor parallelism (tp above 1, attn_dp 1, attn_cp 1, "
                    f"dense_tp as tp); this mesh has tp {mesh.tp}, attn_dp {mesh.attn_dp}, "
                    f"attn_cp {mesh.attn_cp}, dense_tp {mesh.dense_tp}"
                )


class ReductionTally:
    """Counts the sums that compute itself runs, so that a boundary can tell whether one did."""

    __slots__ = ("reductions",)

    def __init__(self) -> None:
        self.reductions = 0


@dataclass(frozen=True)
class Mesh:
    """One rank's mesh.

    ``groups`` are the boundary's ends of each group, ``compute_groups`` those that compute modules
    use for their own collectives; ``tally`` counts the sums among the latter.
    """

    spec: MeshSpec = field(default_factory=MeshSpec)
    groups: Groups = field(default_factory=dict)
    compute_groups: Groups = field(default_factory=dict)
    tally: ReductionTally = field(default_factory=ReductionTally)
    plans: dict[object, object] = field(default_factory=dict, repr=False)

    @property
    def topology(self) -> Topology:
        """Degrees and this rank's place."""
        return self.spec.topology

    @property
    def is_single(self) -> bool:
        """True when one rank holds everything."""
        return self.topology.is_single


class ComputeGroup:
    """A group as compute modules see it: the same collectives, with sums counted."""

    __slots__ = ("_group", "_tally", "name", "rank", "ranks")

    def __init__(self, group: Group, tally: ReductionTally) -> None:
        self._group = group
        self._tally = tally
        self.name = group.name
        self.ranks = group.ranks
        self.rank = group.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def all_reduce(self, x: Any, /) -> Any:
        """See Group.all_reduce."""
        self._tally.reductions += 1
        return self._group.all_reduce(x)

    def all_gather(self, x: Any, /) -> Any:
        """See Group.all_gather."""
        return self._group.all_gather(x)

    def reduce_scatter(self, x: Any, /) -> Any:
        """See Group.reduce_scatter."""
        self._tally.reductions += 1
        return self._group.reduce_scatter(x)

    def reduce_scatter_v(self, x: Any, counts: Sequence[int], /) -> Any:
        """See Group.reduce_scatter_v."""
        self._tally.reductions += 1
        return self._group.reduce_scatter_v(x, counts)


def make_mesh(spec: MeshSpec, groups: Groups, compute: Groups | None = None) -> Mesh:
    """A mesh over ``groups``; ``compute`` are the ends that compute uses, if they are others."""
    tally = ReductionTally()
    inner: Mapping[GroupName, Group] = groups if compute is None else compute
    counted: dict[GroupName, Group] = {
        name: ComputeGroup(group, tally) for name, group in inner.items()
    }
    return Mesh(spec, groups, counted, tally)
