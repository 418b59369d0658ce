"""How far a request's logits move with its company, without ``batch_invariant``: the figures of
docs/determinism.md. Where the texts part, at two nearly equal logits, the comparison ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from layline import LLM, SamplingParams
from layline.layers.invariance import same_bits
from support.families import CASES
from support.model import smollm2_path
from support.sampled import generate_watched
from support.tiny import save_tiny

TOKENS = 20
GREEDY = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
BASE = [5 + 7 * n % 150 for n in range(37)]
PROMPTS = [BASE, BASE[:32], [*BASE[:20], 9, 9, 9], [3], [44, 2, 8, 100, 17, 61]]
COMPANY: dict[str, dict[str, Any]] = {
    "in a batch": {"prefix_cache": False},
    "chunks of 1": {"prefill_tokens": 1},
    "chunks of 7": {"prefill_tokens": 7},
}
# The largest difference of a logit over the largest logit, and whether texts are equal throughout.
# Seen were 4e-6, 7e-3, 2e-2 and 2e-2.
CLAIMS: dict[str, tuple[str, dict[str, Any], float, bool]] = {
    "float32": ("llama", {}, 2e-5, True),
    "float32, SmolLM2": ("smollm2", {"dtype": "float32"}, 2e-5, True),
    "quantised matrices": ("smollm2", {}, 2e-2, True),
    "quantised matrices, int8 keys": ("smollm2", {"kv_dtype": "int8"}, 5e-2, False),
    "bfloat16": ("qwen3", {"dtype": "bfloat16"}, 4e-2, False),
    "bfloat16, SmolLM2": ("smollm2", {"dtype": "bfloat16"}, 4e-2, False),
}


def opened(name: str, folder: Path, **flags: Any) -> LLM:
    if name == "smollm2":
        return LLM(smollm2_path(), threads=1, max_model_len=64, **flags)
    if not (folder / "config.json").exists():
        family, changes = CASES[name]
        save_tiny(folder, family, **changes)
    return LLM(str(folder), threads=1, max_model_len=64, **flags)


def agreed(ids: list[int], others: list[int]) -> int:
    """Tokens before the first that differs."""
    pairs = enumerate(zip(ids, others, strict=True))
    return next((index for index, (one, other) in pairs if one != other), len(ids))


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_request_in_company(tmp_path: Path, claim: str) -> None:
    name, flags, tolerance, equal = CLAIMS[claim]
    alone = opened(name, tmp_path, prefix_cache=False, **flags)
    wanted = [generate_watched(alone, [prompt], GREEDY) for prompt in PROMPTS]
    for company, more in COMPANY.items():
        llm = opened(name, tmp_path, **more, **flags)
        found_ids, found, _ = generate_watched(llm, PROMPTS, GREEDY)
        for ids, rows, ((theirs,), (logits,), _) in zip(found_ids, found, wanted, strict=True):
            same = agreed(ids, theirs)
            compared = slice(0, same + 1)
            largest = float(logits.abs().max())
            assert float((rows[compared] - logits[compared]).abs().max()) < tolerance * largest
            if same < TOKENS:
                assert not equal, company
                gap = logits[same, theirs[same]] - logits[same, ids[same]]
                assert 0 <= float(gap) < 2 * tolerance * largest, "that was no close call"


def test_the_same_run_again(tmp_path: Path) -> None:
    """The same requests in the same configuration give the same bits, in another engine too."""
    found = []
    for _ in range(2):
        llm = opened("llama", tmp_path, prefill_tokens=7)
        found.append(generate_watched(llm, PROMPTS, GREEDY)[1])
    for one, other in zip(*found, strict=True):
        assert same_bits(one, other)
