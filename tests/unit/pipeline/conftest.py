from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _no_stream_outlives_its_test() -> Iterator[None]:
    yield
    left = [each.name for each in threading.enumerate() if each.name.startswith("stream ")]
    assert left == []
