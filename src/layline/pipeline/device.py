"""Where a pipeline stage runs. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class StageDevice:
    """A device of one process. ``kind`` is "cpu" or "cuda".

    On the CPU an ordinal is a virtual device: all share one memory, and residency is what records
    say, so that placements can be told apart without a second device.
    """

    kind: str
    ordinal: int

    def __str__(self) -> str:
        return f"{self.kind}:{self.ordinal}"

    @property
    def torch_device(self) -> Any:
        """The torch.device where this one's tensors are."""
        import torch

        return torch.device("cpu") if self.kind == "cpu" else torch.device(self.kind, self.ordinal)
