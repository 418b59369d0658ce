"""Token embedding. A quantised table stays quantised; only the rows looked up are expanded."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from layline.weights.quantized import QuantizedTensor


class Embedding:
    """Rows of a [vocabulary, hidden] table, in ``dtype``: that of the residual they start."""

    __slots__ = ("_dtype", "table")

    def __init__(self, table: torch.Tensor | QuantizedTensor, dtype: torch.dtype) -> None:
        self.table = table
        self._dtype = dtype

    def __call__(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[tokens] int64 to [tokens, hidden]."""
        if isinstance(self.table, QuantizedTensor):
            return self.table.rows(input_ids).dequantize(self._dtype)
        return F.embedding(input_ids, self.table).to(self._dtype)
