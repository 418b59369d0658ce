"""What an engine holds at this moment, as plain numbers. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from layline.engine.core import Engine


@dataclass(frozen=True)
class CacheLoad:
    """Cache blocks over all attention DP ranks, and what the scheduler has counted so far.

    ``held`` of ``blocks`` belong to requests, ``idle`` ones only keep contents for later prompts.
    ``prefix_hits`` of ``prefix_lookups`` prompt tokens were found in the cache, ``accepted`` of
    ``drafted`` verified drafts became tokens.
    """

    blocks: int = 0
    held: int = 0
    idle: int = 0
    prefix_lookups: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    drafted: int = 0
    accepted: int = 0


@dataclass(frozen=True)
class EngineLoad:
    """Requests that wait for cache blocks, requests that hold some, and the cache."""

    waiting: int
    running: int
    cache: CacheLoad


def cache_load(engine: Engine) -> CacheLoad:
    """The cache of ``engine``; waits for a step that another thread runs."""
    found = engine.stats()
    return CacheLoad(
        found.blocks,
        found.blocks_held,
        found.blocks_idle,
        found.prefix_lookups,
        found.prefix_hits,
        found.preemptions,
        found.drafted,
        found.accepted,
    )
