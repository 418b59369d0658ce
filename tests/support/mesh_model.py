"""A tiny checkpoint with sequences at home on several DP ranks, and what transformers says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from support.mesh import MeshRun, TextSequence
from support.tiny import VOCAB, save_tiny

# Eight query heads and two key heads, so that attention TP 4 has replicas.
SHAPE = {"num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 2}
LENGTH = 12
MAX_ROWS_OFF = 2e-4


class MeshModel:
    """The checkpoint's path, token ids, and transformers' logits for all of their rows."""

    def __init__(self, directory: Path, family: str, **changes: Any) -> None:
        self.path = str(directory)
        model = save_tiny(directory, family, **{**SHAPE, **changes})
        generator = torch.Generator().manual_seed(3)
        ids = torch.randint(3, VOCAB, (8, LENGTH), generator=generator)
        self.ids = [tuple(row) for row in ids.tolist()]
        with torch.inference_mode():
            self.logits = model(ids).logits

    def sequences(self, attn_dp: int) -> list[TextSequence]:
        """Two on the first DP rank, one on each other."""
        homes = [0, *range(attn_dp)]
        return [TextSequence(self.ids[i], dp, 1 + 4 * i) for i, dp in enumerate(homes)]


def check_rows(model: MeshModel, runs: list[MeshRun], sequences: list[TextSequence]) -> None:
    """Every row that every rank computed, against the reference."""
    by_blocks = {tuple(sequence.blocks): index for index, sequence in enumerate(sequences)}
    checked = 0
    for rank, run in enumerate(runs):
        for rows, logits in zip(run.rows, run.logits, strict=True):
            assert logits.shape[0] == len(rows)
            for (blocks, position), found in zip(rows, logits, strict=True):
                wanted = model.logits[by_blocks[blocks], position]
                torch.testing.assert_close(
                    found, wanted, atol=MAX_ROWS_OFF, rtol=1e-4, msg=f"rank {rank}"
                )
                checked += 1
    assert checked > 20
