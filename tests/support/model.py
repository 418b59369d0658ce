"""Where tests find the one real model."""

from __future__ import annotations

import pytest

from layline.errors import LaylineError
from layline.weights.opening import open_checkpoint


def smollm2_path() -> str:
    """The pulled SmolLM2 file; skips where it has not been pulled."""
    try:
        checkpoint = open_checkpoint("smollm2-135m")
    except LaylineError as error:
        pytest.skip(f"smollm2-135m is not here ({error}); run layline pull")
    path = str(checkpoint.path)
    checkpoint.close()
    return path
