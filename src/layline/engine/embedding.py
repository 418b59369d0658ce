"""From the hidden states that were read of a prompt to its embedding. No torch here."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from layline.engine.request import Request
from layline.errors import UsageError
from layline.weights.pooling import Pooling


def embedding_of(
    request: Request, pooling: Pooling, dimensions: int | None = None
) -> npt.NDArray[np.float32]:
    """The vector of a finished request, float32 [dimensions].

    Fewer than the model's dimensions are the first of them, brought to length one again where the
    model's vectors have it.
    """
    vector = np.array(request.hidden_sum, dtype=np.float64)
    if not pooling.last_only:
        vector /= len(request.prompt_ids)
    vector = vector[:dimensions]
    if pooling.normalised:
        length = math.sqrt(float(vector @ vector))
        vector /= max(length, 1e-12)
    return vector.astype(np.float32)


def check_dimensions(dimensions: object, most: int) -> None:
    """Raise UsageError unless ``dimensions`` is None or an integer from 1 to ``most``."""
    if dimensions is None:
        return
    if isinstance(dimensions, bool) or not isinstance(dimensions, int):
        raise UsageError(f"dimensions {dimensions!r} is not an integer; expected 1 to {most}")
    if not 1 <= dimensions <= most:
        raise UsageError(f"dimensions {dimensions} is out of range; expected 1 to {most}")
