"""The token ids of a step on a device, those that the step before samples among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from layline.boundary.mesh import Mesh
from layline.layers.parallel import compute_group
from layline.layers.transfer import upload
from layline.topology import GroupName


@dataclass(frozen=True, slots=True)
class PlacedIds:
    """A step's ids, int64 [tokens], and which of them are sampled in which row of another step."""

    whole: torch.Tensor
    places: torch.Tensor | None = None
    rows: torch.Tensor | None = None


class InputIds:
    """Puts sampled ids where the plan refers to them, without the host ever knowing them.

    One rank of each attention DP rank draws, and the others take its ids from it: they could draw
    the same from the same logits, but a last bit between two ranks would then feed them different
    tokens, and nothing would tell.
    """

    def __init__(self, device: torch.device, mesh: Mesh) -> None:
        self._device = device
        # The drawing rank is the first of both groups.
        names = (GroupName.ATTN_TP, GroupName.ATTN_CP)
        groups = [compute_group(mesh, name) for name in names]
        self._groups = [group for group in groups if group is not None]

    def of(self, token_ids: Sequence[int], sampled: torch.Tensor | None) -> torch.Tensor:
        """As :meth:`fill` gives, of ids that were not prepared before."""
        return self.fill(self.prepare(token_ids), sampled)

    def prepare(self, token_ids: Sequence[int]) -> PlacedIds:
        """What can be done before the sampled ids are there."""
        ids = np.array(token_ids, dtype=np.int64)
        (places,) = np.nonzero(ids < 0)
        whole = upload(ids, self._device)
        if not len(places):
            return PlacedIds(whole)
        # As step_plan.sampled_row.
        return PlacedIds(
            whole, upload(places, self._device), upload(-1 - ids[places], self._device)
        )

    def fill(self, ids: PlacedIds, sampled: torch.Tensor | None) -> torch.Tensor:
        """The ids with those below zero replaced from ``sampled``, int64 [tokens].

        ``sampled`` [sampled rows of the step before] is None on ranks that do not draw. Every rank
        of an attention DP rank calls it with equal ids.
        """
        if ids.places is None or ids.rows is None:
            return ids.whole
        if sampled is None:
            fed = torch.zeros_like(ids.rows)
        else:
            # A row without any token has -1; its request ends before what follows is of use.
            fed = sampled.index_select(0, ids.rows).clamp_min(0)
        for group in self._groups:
            joined: torch.Tensor = group.all_gather(fed.unsqueeze(1))
            fed = joined[: len(ids.places)].squeeze(1)
        return ids.whole.index_copy_(0, ids.places, fed)
