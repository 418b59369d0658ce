"""8-bit keys and values on a CUDA device: the bits that a CPU stores, and a model's logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from layline.config import EngineConfig
from layline.kernels.kv_rounding import SCALE_DTYPE
from layline.layers.kv_cache import QuantisedCache
from support.families import CASES, NEW_TOKENS, PROMPT_LENGTHS, prompts_of, reference
from support.run import run_greedy
from support.tiny import save_tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
STORED = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
LOGITS_OFF = {"int8": 0.04, "fp8": 0.15}
SLOTS, HEADS, SIZE = 32, 3, 64


@pytest.mark.parametrize("kv_dtype", STORED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_are_stored_as_on_the_cpu(kv_dtype: str, dtype: torch.dtype) -> None:
    kv = torch.randn(9, 2, HEADS, SIZE, generator=torch.Generator().manual_seed(0)).to(dtype)
    kv[2] = 0.0
    kv[4, 0, 1] *= 300.0
    slots = torch.tensor([4, 9, 1, 30, 7, 8, 20, 21, 2])
    found = []
    for device in ("cpu", "cuda"):
        values = torch.zeros(SLOTS, 2, HEADS, SIZE, dtype=STORED[kv_dtype], device=device)
        scales = torch.zeros(SLOTS, 2, HEADS, dtype=SCALE_DTYPE, device=device)
        cache = QuantisedCache(values, scales, dtype)
        cache.write(slots.to(device), kv.to(device))
        found.append([each.cpu() for each in (*cache.tensors, cache.read(slots.to(device)))])
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize("kv_dtype", STORED)
@pytest.mark.parametrize("case", ["llama", "llama-mqa", "mistral-window", "qwen3-window"])
def test_logits_are_close_to_transformers(tmp_path: Path, case: str, kv_dtype: str) -> None:
    family, changes = CASES[case]
    model = save_tiny(tmp_path, family, **changes).cuda()
    prompts = prompts_of(PROMPT_LENGTHS)
    truth = [reference(model, prompt, NEW_TOKENS) for prompt in prompts]
    config = EngineConfig(
        model=str(tmp_path), device="cuda", dtype="float32", kv_dtype=kv_dtype, prefill_tokens=24
    )
    logits, _, _ = run_greedy(config, prompts, NEW_TOKENS, [ids for _, ids in truth])
    worst = max(
        float((ours - wanted).abs().max() / wanted.abs().max())
        for ours, (wanted, _) in zip(logits, truth, strict=True)
    )
    assert 1e-4 < worst < LOGITS_OFF[kv_dtype]
