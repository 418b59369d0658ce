"""The part of a request that scheduling looks at, without text."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from layline.engine.request import Request
from layline.sampling import SamplingParams

_IDS = itertools.count()


def fake_request(
    prompt: int | Sequence[int], most: int, *, priority: int = 0, salt: str = ""
) -> Request:
    """A request for ``most`` tokens after a prompt: ids, or how many ids that no other has."""
    number = next(_IDS)
    unused: Any = None
    if isinstance(prompt, int):
        prompt = [number * 1000 + token for token in range(prompt)]
    return Request(
        request_id=number,
        prompt_ids=tuple(prompt),
        params=SamplingParams(max_tokens=most),
        decoder=unused,
        stops=unused,
        end_ids=frozenset(),
        most_tokens=most,
        priority=priority,
        cache_salt=salt,
    )
