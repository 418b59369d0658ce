"""How many blocks the cache gets, and the memory weights lie in."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from layline.config import EngineConfig
from layline.engine import kv
from layline.errors import UsageError
from layline.layers.arena import ALIGNMENT, CHUNK, WeightArena
from layline.models.registry import family_of
from layline.weights.opening import open_checkpoint
from support.tiny import save_tiny

CPU = torch.device("cpu")


def test_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny(tmp_path, "Llama")
    raw = open_checkpoint(tmp_path).config
    config = family_of(raw).parse(raw)
    slot = kv.slot_bytes(config, torch.float32)
    block = slot * kv.BLOCK_SIZE
    assert block == 16 * 3 * 2 * 2 * 8 * 4

    def blocks(length: int, **changes: object) -> int:
        return kv.num_blocks(EngineConfig(**changes), kv.Room(slot, length, CPU))  # type: ignore[arg-type]

    assert blocks(64, max_running=3) == 3 * 4 + 1
    assert blocks(65, max_running=1) == 5 + 1
    assert blocks(64, max_running=100, kv_memory=20 * block) == 20
    assert blocks(64, kv_memory=5 * block) == 5
    with pytest.raises(UsageError, match=f"kv_memory {5 * block - 1} bytes holds 48 tokens"):
        blocks(64, kv_memory=5 * block - 1)
    monkeypatch.setattr(kv, "_available", lambda _: 3 * block)
    with pytest.raises(
        UsageError, match=r"keys and values .* holds 32 tokens; .*: 1M, or max_model_len 32"
    ):
        blocks(64)


def test_a_cache_starts_zero() -> None:
    from layline.models.config import DecoderConfig

    config = DecoderConfig(
        architecture="LlamaForCausalLM",
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        max_position=8,
        norm_eps=1e-5,
        rope=None,  # type: ignore[arg-type]
    )
    scales = ((48, 2, 1), torch.bfloat16)
    for stored, besides in (
        (torch.bfloat16, []),
        (torch.int8, [scales]),
        (torch.float8_e4m3fn, [scales]),
    ):
        shape = kv.CacheShape(3, config.num_kv_heads, CPU, stored, torch.float32)
        caches = kv.allocate(config, shape)
        assert len(caches) == 2
        for cache in caches:
            assert [(each.shape, each.dtype) for each in cache.tensors] == [
                ((48, 2, 1, 4), stored),
                *besides,
            ]
            assert not cache.read(slice(None)).any()
            assert cache.num_slots == 48
        assert sum(cache.nbytes for cache in caches) == 48 * kv.slot_bytes(config, stored)


def test_arena_tensors_are_aligned_and_do_not_overlap() -> None:
    arena = WeightArena(CPU)
    shapes = [(3, 5), (1000, 7), (1,), (CHUNK // 4,), (CHUNK + 1,), (2, 2)]
    tensors = [arena.empty(shape, torch.float32) for shape in shapes]
    for number, tensor in enumerate(tensors):
        assert tensor.data_ptr() % ALIGNMENT == 0
        tensor.fill_(number)
    for number, tensor in enumerate(tensors):
        assert bool((tensor == number).all())
    kept = arena.keep(torch.arange(6).view(2, 3))
    assert kept.tolist() == [[0, 1, 2], [3, 4, 5]]
