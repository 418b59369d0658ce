"""Make memory that nothing has written visible."""

from __future__ import annotations

from layline.engine.scheduler import BLOCK_SIZE
from layline.layers.kv_cache import KVCache


def poison(cache: KVCache) -> None:
    """Fill every row that no token has written with NaN; block 0 is the padding's, zero."""
    for stored in cache.tensors:
        assert not stored[:BLOCK_SIZE].float().any()
        # An int8 value has no NaN; its scale has.
        stored[BLOCK_SIZE:].fill_(float("nan") if stored.is_floating_point() else 127)
    assert cache.read(slice(BLOCK_SIZE, None)).isnan().all()
