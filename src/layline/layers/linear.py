"""Linear layers. A layer may hold its weight plain, packed, or packed beside a plain copy.

Which kernel runs follows the phase of the rows, never their number, so that a chunk or batch
boundary does not change numbers. Where both phases use one kernel it runs once over all rows.
"""

from __future__ import annotations

from typing import ClassVar, Protocol

import torch

from layline.boundary.quantised import QuantisedRows
from layline.kernels.dense_matmul import dense_matmul, wide_bfloat16_is_slow
from layline.kernels.tiled_matmul import tiled_matmul
from layline.layers.spans import MixedPhase, Phase, StepPhase


class PackedWeight(Protocol):
    """A quantised matrix. One that ``serves_prefill`` needs no plain copy beside it."""

    serves_prefill: ClassVar[bool]

    def matmul(self, x_TK: torch.Tensor, /) -> torch.Tensor:
        """``x @ weight.T``, bfloat16 or FP32 [tokens, out features]."""

    @property
    def num_bytes(self) -> int:
        """Memory of the packed copy."""


class Linear:
    """``y = x @ weight.T + bias``; several projections of one input may be merged by rows.

    ``weight`` [out features, in features] serves prefill, and decode too unless ``packed`` is
    given. A layer whose packed weight serves prefill, or that runs in decode only (the head), comes
    without ``weight``; with ``keeps_accumulator`` it returns what its kernel accumulated in, FP32
    where that is wider. ``tiled`` computes each row alike in every batch and phase; a packed weight
    has to do so of its own.
    """

    __slots__ = ("_tiled", "_upcast", "bias", "keeps_accumulator", "packed", "weight")

    def __init__(
        self,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None = None,
        packed: PackedWeight | None = None,
        *,
        keeps_accumulator: bool = False,
        tiled: bool = False,
    ) -> None:
        if weight is None and packed is None:
            raise ValueError("a linear layer needs a weight")
        self.weight = weight
        self.bias = bias
        self.packed = packed
        self.keeps_accumulator = keeps_accumulator
        self._tiled = tiled
        self._upcast = (
            weight is not None
            and not tiled
            and weight.device.type == "cpu"
            and weight.dtype is torch.bfloat16
            and wide_bfloat16_is_slow()
        )

    def __call__(self, x: torch.Tensor | QuantisedRows, phase: StepPhase) -> torch.Tensor:
        """[tokens, in features] to [tokens, out features].

        The result has the run's dtype, or FP32 where the kernel computes in it and the caller
        keeps it: prefill on a CPU without bfloat16 tiles, or ``keeps_accumulator``. Rows of a mixed
        step have the wider of both phases' dtypes.
        """
        if isinstance(x, QuantisedRows):
            x = x.dequantised()
        if isinstance(phase, MixedPhase):
            return self._mixed(x, phase.num_decode)
        weight = self.weight
        if self.packed is not None and (phase is Phase.DECODE or weight is None):
            out = self.packed.matmul(x)
            if self.bias is not None:
                out.add_(self.bias)
            return out if self.keeps_accumulator else out.to(torch.bfloat16)
        assert weight is not None
        if self._tiled:
            return tiled_matmul(x, weight, self.bias)
        upcast = self._upcast and phase is Phase.PREFILL
        return dense_matmul(x, weight, self.bias, upcast=upcast)

    def _mixed(self, x: torch.Tensor, num_decode: int) -> torch.Tensor:
        packed_decode = self.packed is not None and self.weight is not None
        if not packed_decode and not self._upcast:
            return self(x, Phase.PREFILL)
        decoded = self(x[:num_decode], Phase.DECODE)
        # A concatenation has the wider of the two dtypes.
        return torch.cat([decoded, self(x[num_decode:], Phase.PREFILL)])

    def output_dtype(self, phase: StepPhase) -> torch.dtype:
        """The dtype this layer returns in ``phase``, where a packed weight accumulates in FP32."""
        if isinstance(phase, MixedPhase):
            decoded, prefilled = (self.output_dtype(each) for each in Phase)
            return torch.promote_types(decoded, prefilled)
        if self.weight is None or (self.packed is not None and phase is Phase.DECODE):
            return torch.float32 if self.keeps_accumulator else torch.bfloat16
        return torch.float32 if self._upcast and phase is Phase.PREFILL else self.weight.dtype

    @property
    def num_bytes(self) -> int:
        """Memory of all copies of the weight."""
        plain = 0 if self.weight is None else self.weight.nbytes
        return plain + (0 if self.packed is None else self.packed.num_bytes)
