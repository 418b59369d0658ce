"""Every family and rope variant against transformers: all logits, then greedy ids."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from layline.config import EngineConfig
from layline.layers import attention
from support.families import CASES, NEW_TOKENS, PROMPT_LENGTHS, ROPES, prompts_of, reference
from support.run import run_greedy
from support.tiny import save_tiny


def assert_close(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float = 1e-4) -> None:
    assert ours.shape == theirs.shape
    error = (ours - theirs).abs().max() / theirs.abs().max()
    assert error < tolerance, f"relative error {error:.2e}"


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("query_rows", [128, 8])
@pytest.mark.parametrize("prefill_tokens", [2048, 11], ids=["whole", "chunked"])
def test_logits_and_greedy_ids_match_transformers(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    case: str,
    prefill_tokens: int,
    query_rows: int,
) -> None:
    monkeypatch.setattr(attention, "QUERY_ROWS", query_rows)
    family, changes = CASES[case]
    model = save_tiny(tmp_path, family, **changes)
    prompts = prompts_of(PROMPT_LENGTHS)
    config = EngineConfig(model=str(tmp_path), prefill_tokens=prefill_tokens, threads=1)
    logits, ids, recorder = run_greedy(config, prompts, NEW_TOKENS)
    assert any(len(plan.entries) == len(prompts) for plan in recorder.plans), "no common decode"
    for prompt, ours, our_ids in zip(prompts, logits, ids, strict=True):
        theirs, their_ids = reference(model, prompt, NEW_TOKENS)
        assert_close(ours, theirs)
        assert our_ids == their_ids


def test_old_rope_spelling_is_the_same_model(tmp_path: Path) -> None:
    """rope_theta beside rope_scaling with "type", as configurations before rope_parameters had."""
    import json

    model = save_tiny(tmp_path, "Llama", rope_parameters=ROPES["linear"])
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    rope = raw.pop("rope_parameters")
    raw["rope_theta"] = rope["rope_theta"]
    raw["rope_scaling"] = {"type": "linear", "factor": rope["factor"]}
    path.write_text(json.dumps(raw))
    prompt = prompts_of((9,))[0]
    logits, _, _ = run_greedy(EngineConfig(model=str(tmp_path)), [prompt], 2)
    assert_close(logits[0], reference(model, prompt, 2)[0])


def test_dynamic_rope_scales_past_the_trained_context(tmp_path: Path) -> None:
    """Beyond the stated context each step's length sets the base, as transformers does.

    transformers keeps rotated keys in its cache, so its cached decode is the reference here.
    """
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 3.0}
    save_tiny(tmp_path, "Llama", rope_parameters=rope, max_position_embeddings=16)
    for length in (10, 25):
        prompt = prompts_of((length,))[0]
        logits, ids, _ = run_greedy(EngineConfig(model=str(tmp_path)), [prompt], 12)
        fresh = save_tiny(
            tmp_path / "again", "Llama", rope_parameters=rope, max_position_embeddings=16
        )
        rows, past, step = [], None, prompt
        with torch.inference_mode():
            for _ in range(12):
                out = fresh(torch.tensor([step]), past_key_values=past, use_cache=True)
                past, step = out.past_key_values, [int(out.logits[0, -1].argmax())]
                rows.append(out.logits[0])
        assert_close(logits[0], torch.cat(rows))
        assert ids[0][-1] == step[0]
