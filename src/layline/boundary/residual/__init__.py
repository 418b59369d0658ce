"""The residual's protocols: who updates it, who reads it, and in which order that is allowed.

Tensors are typed as ``Any`` here: the package is imported by the planner, which runs without torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


class StageUpdate(Protocol):
    """How a producer's output changes the residual; it travels with the contribution."""

    @property
    def plain(self) -> bool:
        """True for ``residual + output``, which may join a sum or a fused kernel."""

    @property
    def at_producer(self) -> bool:
        """True when the update must run at the producer's exit."""

    @property
    def outlives_producer(self) -> bool:
        """True when its parameters and state stay valid after the producer's exit."""

    def apply(self, output: Any, residual: Any) -> Any:
        """The new residual, [tokens, hidden]."""


class StageRead(Protocol):
    """How a consumer turns the residual into its compute input."""

    @property
    def plain(self) -> bool:
        """True when the read is the norm of the residual and nothing else."""

    @property
    def before_gather(self) -> bool:
        """True when the read must run on the source rows, before rows are gathered."""

    @property
    def keeps_residual(self) -> bool:
        """True when reading and updating never write into the residual they are given."""

    @property
    def formats_input(self) -> bool:
        """True when the compute input is :meth:`format` of the normalised rows."""

    def enter(self, hidden: Any) -> Any:
        """The residual a stack starts with, made from the embedding output."""

    def read(self, residual: Any, norm: Any) -> tuple[Any, Any]:
        """``(compute input, residual)``."""

    def update_and_read(
        self, update: StageUpdate, output: Any, residual: Any, norm: Any
    ) -> tuple[Any, Any]:
        """Apply ``update``, then read; an implementation may fuse the two."""

    def format(self, normed: Any) -> Any:
        """The compute input in this read's own format, made once rows are where they belong."""


@dataclass(frozen=True)
class LayerResidual:
    """A read and an update that belong together."""

    read: StageRead
    update: StageUpdate
