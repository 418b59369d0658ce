"""SmolLM2-135M-Instruct against the recorded transformers run on its dequantised weights.

``tests/golden/smollm2.json``: prompt ids, greedy ids with the gap between the two best logits at
every step, and the five best raw logits after the prompt, in float32.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from layline.config import EngineConfig
from layline.kernels.native.library import native_kernels
from layline.layers.spans import MixedPhase
from support.model import smollm2_path
from support.run import run_greedy

pytestmark = pytest.mark.smollm2
GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "smollm2.json").read_text())
CASES: list[dict[str, Any]] = GOLDEN["cases"]

# What torch's kernels (bfloat16 activations and group scales, the int8 head) may move a leading
# logit by. On a CPU with VNNI and without AMX 0.14 was seen, and no other best id where the gap was
# above 0.09. The native kernels round activations to 16 bits and no weight; 0.04 was seen.
REDUCED_LOGIT_ERROR = 0.3
NATIVE_LOGIT_ERROR = 0.1


def by_name(case: dict[str, Any]) -> str:
    return case["name"]


@pytest.mark.parametrize("case", CASES, ids=by_name)
def test_float32_logits_and_greedy_ids(case: dict[str, Any]) -> None:
    config = EngineConfig(model=smollm2_path(), dtype="float32", threads=1)
    wanted = case["greedy_ids"]
    logits, ids, _ = run_greedy(config, [case["prompt_ids"]], len(wanted))
    last = logits[0][len(case["prompt_ids"]) - 1]
    largest = max(abs(entry["logit"]) for entry in case["top5"])
    for entry in case["top5"]:
        assert abs(float(last[entry["id"]]) - entry["logit"]) < 1e-4 * largest
    assert last.topk(5).indices.tolist() == [entry["id"] for entry in case["top5"]]
    assert abs(float(torch.logsumexp(last, 0)) - case["logsumexp"]) < 1e-3
    assert ids[0] == wanted


@pytest.mark.parametrize(
    ("dtype", "kernels", "chunk"),
    [
        ("auto", "auto", 2048),
        ("auto", "auto", 16),
        ("auto", "torch", 2048),
        ("auto", "torch", 16),
        ("bfloat16", "torch", 2048),
    ],
)
def test_reduced_precision_by_teacher_forcing(
    dtype: str, kernels: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fed the recorded ids, every step agrees unless the recorded gap is within the error.

    In small chunks prompts are computed beside decodes.
    """
    monkeypatch.setenv("LAYLINE_CPU_KERNELS", kernels)
    if kernels == "auto" and native_kernels().library is None:
        pytest.skip(native_kernels().reason)
    bound = NATIVE_LOGIT_ERROR if kernels == "auto" else REDUCED_LOGIT_ERROR
    config = EngineConfig(model=smollm2_path(), dtype=dtype, threads=1, prefill_tokens=chunk)
    prompts = [case["prompt_ids"] for case in CASES]
    forced = [case["greedy_ids"] + [2] * 64 for case in CASES]
    steps = max(len(case["greedy_ids"]) for case in CASES)
    logits, _, recorder = run_greedy(config, prompts, steps, forced)
    mixed = sum(isinstance(plan.phase, MixedPhase) for plan in recorder.plans)
    assert (mixed > 0) == (chunk == 16)
    checked = agreed = 0
    for case, rows in zip(CASES, logits, strict=True):
        first = len(case["prompt_ids"]) - 1
        for entry in case["top5"]:
            assert abs(float(rows[first, entry["id"]]) - entry["logit"]) < bound
        for step, (wanted, gap) in enumerate(
            zip(case["greedy_ids"], case["step_gaps"], strict=True)
        ):
            checked += 1
            chosen = int(rows[first + step].argmax())
            agreed += chosen == wanted
            if chosen != wanted:
                assert gap < bound, f"{case['name']} step {step} gap {gap}"
                short = float(rows[first + step, chosen] - rows[first + step, wanted])
                assert short < bound
    assert checked == sum(len(case["greedy_ids"]) for case in CASES)
    assert agreed >= 0.9 * checked, f"{agreed} of {checked} steps agree"


def test_a_case_with_a_tiny_gap_is_among_them() -> None:
    assert min(min(case["step_gaps"]) for case in CASES) < 0.03
