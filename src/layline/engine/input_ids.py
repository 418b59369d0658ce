"""The token ids of a step on a device, those that the step before samples among them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from layline.boundary.mesh import Mesh
from layline.layers.parallel import compute_group
from layline.layers.transfer import upload
from layline.topology import GroupName


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
        """``token_ids`` with the ids below zero replaced from ``sampled``, int64 [tokens].

        ``sampled`` [sampled rows of the step before] is None on ranks that do not draw. Every rank
        of an attention DP rank calls it with equal ``token_ids``.
        """
        ids = np.array(token_ids, dtype=np.int64)
        (places,) = np.nonzero(ids < 0)
        whole = upload(ids, self._device)
        if not len(places):
            return whole
        rows = upload(-1 - ids[places], self._device)  # As step_plan.sampled_row.
        if sampled is None:
            fed = torch.zeros_like(rows)
        else:
            # A row without any token has -1; its request ends before what follows is of use.
            fed = sampled.index_select(0, rows).clamp_min(0)
        for group in self._groups:
            joined: torch.Tensor = group.all_gather(fed.unsqueeze(1))
            fed = joined[: len(places)].squeeze(1)
        return whole.index_copy_(0, upload(places, self._device), fed)
