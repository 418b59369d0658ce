"""Fixtures for the checkpoint tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from layline.errors import LaylineError
from layline.weights.cache import DEFAULT_MODEL, find_model


@pytest.fixture(scope="session")
def smollm2_file() -> Path:
    """The real SmolLM2 GGUF from the cache."""
    try:
        return find_model(DEFAULT_MODEL)
    except LaylineError as error:
        pytest.skip(f"needs the real checkpoint: {error}")
