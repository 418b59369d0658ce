"""Measure what docs/cpu.md says: kernel times, and what each form of weights costs in logits.

Usage: .venv/bin/python tools/measure_cpu.py    (after layline pull; takes about a minute)
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from layline.config import EngineConfig  # noqa: E402
from layline.engine.model import load_model  # noqa: E402
from layline.kernels.packed_matmul import Int8Weight, pack_int8, quantise_rows  # noqa: E402
from support.model import smollm2_path  # noqa: E402
from support.run import run_greedy  # noqa: E402

CASES: list[dict[str, Any]] = json.loads((ROOT / "tests/golden/smollm2.json").read_text())["cases"]
COPIES = 4  # Weights take turns, so that none stays in the nearer caches.


def best_ms(calls: list[Callable[[], object]]) -> float:
    """The best of five rounds over all ``calls``, in ms a call."""
    rounds = []
    for _ in range(5):
        start = time.perf_counter()
        for call in calls:
            call()
        rounds.append((time.perf_counter() - start) / len(calls) * 1e3)
    return min(rounds)


def kernels() -> None:
    """The head's int8 kernels, and a prefill product in both dtypes."""
    values = [torch.randint(-127, 128, (49152, 576), dtype=torch.int8) for _ in range(COPIES)]
    scales = torch.rand(49152).to(torch.bfloat16)
    packed = [pack_int8(value, scales) for value in values]
    plain = [Int8Weight(value, scales) for value in values]
    for rows in (1, 8):
        x = torch.randn(rows, 576).to(torch.bfloat16)
        for kind in (packed, plain):
            ms = best_ms([lambda w=weight, x=x: w.matmul(x) for weight in kind])
            print(f"int8 head, {rows} rows, {type(kind[0]).__name__}: {ms:.2f} ms")
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(512, 576).to(dtype)
        weights = [torch.randn(3072, 576).to(dtype) for _ in range(COPIES)]
        ms = best_ms([lambda w=weight, x=x: F.linear(x, w) for weight in weights])
        print(f"3072 x 576, 512 rows, {dtype}: {ms:.1f} ms")


def describe(error: torch.Tensor) -> str:
    return f"rms {error.pow(2).mean().sqrt():.3f} max {error.abs().max():.2f}"


def runs() -> None:
    """Logits of the default and of bfloat16 against float32, fed the recorded ids."""
    prompts = [case["prompt_ids"] for case in CASES]
    forced = [case["greedy_ids"] + [2] * 64 for case in CASES]
    exact, _, _ = run_greedy(
        EngineConfig(model=smollm2_path(), dtype="float32"), prompts, 64, forced
    )
    for dtype in ("auto", "bfloat16"):
        config = EngineConfig(model=smollm2_path(), dtype=dtype)
        ours, _, _ = run_greedy(config, prompts, 64, forced)
        errors: dict[str, list[torch.Tensor]] = {"prefill": [], "decode": []}
        same = steps = 0
        for case, theirs, rows in zip(CASES, exact, ours, strict=True):
            first, last = len(case["prompt_ids"]), len(case["prompt_ids"]) + len(case["greedy_ids"])
            errors["prefill"].append((theirs - rows)[:first].flatten())
            errors["decode"].append((theirs - rows)[first : last - 1].flatten())
            agree = theirs[first : last - 1].argmax(-1) == rows[first : last - 1].argmax(-1)
            same, steps = same + int(agree.sum()), steps + len(agree)
        text = ", ".join(f"{name} {describe(torch.cat(part))}" for name, part in errors.items())
        print(f"{dtype}: {text}, same best id in {same} of {steps} decode steps")


@torch.inference_mode()
def heads() -> None:
    """The head alone, as int8 rows and as int4 groups, on the recorded prompts' hidden states."""
    model = load_model(EngineConfig(model=smollm2_path(), dtype="float32")).runner.model
    weight = model.lm_head.weight
    assert weight is not None
    hidden: list[torch.Tensor] = []
    score = type(model).logits
    type(model).logits = lambda self, rows: (hidden.append(rows), score(self, rows))[1]
    prompts = [case["prompt_ids"] for case in CASES]
    forced = [case["greedy_ids"] + [2] * 64 for case in CASES]
    run_greedy(EngineConfig(model=smollm2_path(), dtype="float32"), prompts, 64, forced)
    type(model).logits = score
    states = torch.cat(hidden)[:300]
    values = torch.empty(weight.shape, dtype=torch.int8)
    scales = quantise_rows(weight, values)
    rows = values.float() * scales.float()[:, None]
    groups = weight.view(weight.shape[0], -1, 32)
    low = groups.amin(-1, keepdim=True)
    step = (groups.amax(-1, keepdim=True) - low) / 15
    four_bit = (((groups - low) / step).round() * step + low).view(weight.shape)
    exact = states @ weight.T
    for name, matrix in (("int8 by row", rows), ("int4 groups", four_bit)):
        ours = states @ matrix.T
        same = int((ours.argmax(-1) == exact.argmax(-1)).sum())
        print(f"head {name}: {describe(ours - exact)}, same best id in {same} of {len(states)}")


if __name__ == "__main__":
    kernels()
    runs()
    heads()
