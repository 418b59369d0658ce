"""The same code on a CUDA device: every family against transformers there, and the real model."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from layline import LLM, SamplingParams
from layline.config import EngineConfig
from support.families import CASES, NEW_TOKENS, PROMPT_LENGTHS, prompts_of, reference
from support.model import smollm2_path
from support.run import run_greedy
from support.tiny import save_tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_families_match_transformers_on_the_device(tmp_path: Path, case: str, dtype: str) -> None:
    """In float32 within 1e-4; below it, no further from float32 than twice transformers is."""
    family, changes = CASES[case]
    exact = save_tiny(tmp_path, family, **changes).cuda()
    prompts = prompts_of(PROMPT_LENGTHS)
    truth = [reference(exact, prompt, NEW_TOKENS) for prompt in prompts]
    config = EngineConfig(model=str(tmp_path), device="cuda", dtype=dtype, prefill_tokens=24)
    forced = [ids for _, ids in truth]
    logits, ids, _ = run_greedy(config, prompts, NEW_TOKENS, forced if dtype != "float32" else ())
    rounded = copy.deepcopy(exact).to(DTYPES[dtype])
    rounded.model.rotary_emb = exact.model.rotary_emb  # Frequencies in float32, as when loaded.
    for prompt, ours, our_ids, (wanted, wanted_ids) in zip(
        prompts, logits, ids, truth, strict=True
    ):
        assert torch.isfinite(ours).all()
        error = float((ours - wanted).abs().max() / wanted.abs().max())
        if dtype == "float32":
            assert error < 1e-4
            assert our_ids == wanted_ids
            continue
        with torch.inference_mode():
            whole = torch.tensor([prompt + wanted_ids[:-1]], device="cuda")
            theirs = rounded(whole).logits[0].float()
        assert error < 2 * float((theirs - wanted).abs().max() / wanted.abs().max()) + 1e-3


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "auto"])
@pytest.mark.smollm2
def test_smollm2_answers(dtype: str) -> None:
    llm = LLM(smollm2_path(), device="cuda", dtype=dtype)
    outputs = llm.generate(
        ["The capital of France is", "The opposite of hot is"],
        SamplingParams(temperature=0.0, max_tokens=8),
    )
    assert "Paris" in outputs[0].text
    assert outputs[1].text.strip()
