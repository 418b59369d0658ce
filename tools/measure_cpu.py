"""Measure what docs/cpu.md says: kernel times, and what each form of weights costs in logits.

Usage: .venv/bin/python tools/measure_cpu.py    (after layline pull; takes about two minutes)

With OMP_NUM_THREADS=1 times are the process's own CPU time, which other work on the machine changes
little.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from layline import LLM, SamplingParams  # noqa: E402
from layline.config import EngineConfig  # noqa: E402
from layline.engine.model import load_model  # noqa: E402
from layline.kernels.native.library import native_kernels  # noqa: E402
from layline.kernels.native.pack import pack_native  # noqa: E402
from layline.kernels.native.weight import NativeWeight  # noqa: E402
from layline.kernels.packed_matmul import (  # noqa: E402
    Int8Weight,
    pack_int4,
    pack_int8,
    quantise_rows,
)
from layline.layers.linear import Linear  # noqa: E402
from layline.layers.spans import Phase  # noqa: E402
from layline.weights.quantized import QuantizedTensor, block_layout  # noqa: E402
from support.model import smollm2_path  # noqa: E402
from support.run import run_greedy  # noqa: E402

CASES: list[dict[str, Any]] = json.loads((ROOT / "tests/golden/smollm2.json").read_text())["cases"]
COPIES = 4  # Weights take turns, so that none stays in the nearer caches.


def now() -> float:
    """Seconds of this process where it has one thread, else of the clock."""
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def best_ms(calls: list[Callable[[], object]]) -> float:
    """The best of five rounds over all ``calls``, in ms a call."""
    rounds = []
    for _ in range(5):
        start = now()
        for call in calls:
            call()
        rounds.append((now() - start) / len(calls) * 1e3)
    return min(rounds)


def random_matrix(encoding: str, rows: int, columns: int) -> QuantizedTensor:
    """Random values with scales of 1 and, where there are minima, of 0."""
    layout = block_layout(encoding)
    size = (rows, columns // layout.values, layout.bytes)
    blocks = torch.randint(0, 256, size, dtype=torch.uint8)
    blocks[..., :4] = torch.tensor([0, 0x3C, 0, 0], dtype=torch.uint8)
    return QuantizedTensor(encoding, blocks.view(rows, -1), (rows, columns))


def native(encoding: str, rows: int, columns: int, copies: int) -> list[NativeWeight]:
    library = native_kernels().library
    if library is None:
        return []
    matrix = random_matrix(encoding, rows, columns)
    allocate = lambda shape, dtype: torch.empty(shape, dtype=dtype)
    return [pack_native(library, [matrix], allocate) for _ in range(copies)]


def timed(name: str, products: list[Callable[[torch.Tensor], object]], x: torch.Tensor) -> None:
    """Print what one of ``products`` takes for ``x``, where there are any."""
    if products:
        ms = best_ms([lambda product=product: product(x) for product in products])
        print(f"{name}, {x.shape[0]} rows: {ms:.3f} ms")


def four_bit() -> None:
    """Products with 4-bit matrices as a layer of the model has them."""
    for rows, columns in ((960, 576), (576, 576), (3072, 576), (576, 1536)):
        # More copies than the nearer caches hold, as in a model.
        copies = 40_000_000 // (rows * columns)
        ours = [weight.matmul for weight in native("Q4_1", rows, columns, copies)]
        parts = random_matrix("Q4_1", rows, columns).q4_parts()
        theirs = [pack_int4(*parts).matmul for _ in range(copies)]
        wide = [torch.randn(rows, columns) for _ in range(COPIES)]
        for tokens in (1, 8):
            x = torch.randn(tokens, columns)
            timed(f"4-bit {rows} x {columns}, native", ours, x)
            timed(f"4-bit {rows} x {columns}, torch", theirs, x.to(torch.bfloat16))
        x = torch.randn(512, columns)
        timed(f"4-bit {rows} x {columns}, native", ours[:COPIES], x)
        products = [lambda x, w=weight: F.linear(x, w) for weight in wide]
        timed(f"FP32 {rows} x {columns}, torch", products, x)
        narrow = [weight.to(torch.bfloat16) for weight in wide]
        products = [lambda x, w=weight: F.linear(x, w) for weight in narrow]
        timed(f"bfloat16 {rows} x {columns}, torch", products, x.to(torch.bfloat16))


def head_products() -> None:
    """The head's kernels: native Q8_0, and torch's two for int8 by row."""
    values = [torch.randint(-127, 128, (49152, 576), dtype=torch.int8) for _ in range(COPIES)]
    scales = torch.rand(49152).to(torch.bfloat16)
    kinds = {
        "native": [weight.matmul for weight in native("Q8_0", 49152, 576, COPIES)],
        "oneDNN": [pack_int8(value, scales).matmul for value in values],
        "_weight_int8pack_mm": [Int8Weight(value, scales).matmul for value in values],
    }
    for tokens in (1, 8):
        for name, products in kinds.items():
            timed(f"head, {name}", products, torch.randn(tokens, 576))


def engines() -> None:
    """Whole steps with the native kernels and with torch's, in turn: medians of five repeats."""
    loaded = {}
    for kernels in ("auto", "torch"):
        os.environ["LAYLINE_CPU_KERNELS"] = kernels
        start = now()
        loaded[kernels] = LLM("smollm2-135m", threads=torch.get_num_threads())
        print(f"load, kernels {kernels}: {now() - start:.2f} s")
    del os.environ["LAYLINE_CPU_KERNELS"]
    numbers = random.Random(0)

    def seconds(llm: LLM, batch: int, prompt: int, new: int) -> float:
        prompts = [numbers.choices(range(100, 40000), k=prompt) for _ in range(batch)]
        params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
        start = now()
        llm.generate(prompts, params)
        return now() - start

    def milliseconds(llm: LLM, batch: int, prompt: int, new: int) -> float:
        """Of ``new`` decode steps, or of the prefill where there are none."""
        first = seconds(llm, batch, prompt, 1)
        step = (seconds(llm, batch, prompt, new + 1) - first) / new if new else first
        return step * 1e3

    for batch, prompt, new in ((1, 64, 32), (8, 64, 16), (1, 512, 0)):
        rounds: dict[str, list[float]] = {kernels: [] for kernels in loaded}
        for _ in range(6):
            for kernels, llm in loaded.items():
                rounds[kernels].append(milliseconds(llm, batch, prompt, new))
        ours, theirs = (statistics.median(times[1:]) for times in rounds.values())
        what = f"decode step, batch {batch}" if new else f"prefill of {prompt} tokens"
        print(f"{what}: native {ours:.1f} ms, torch {theirs:.1f} ms, {theirs / ours:.2f} times")


def describe(error: torch.Tensor) -> str:
    return f"rms {error.pow(2).mean().sqrt():.3f} max {error.abs().max():.2f}"


def rounded(x: torch.Tensor, steps: int) -> torch.Tensor:
    """``x`` with each 32 values rounded to ``steps`` steps of their largest magnitude."""
    groups = x.float().view(-1, 32)
    step = groups.abs().amax(-1, keepdim=True).clamp_min(1e-30) / steps
    return ((groups / step).round() * step).view(x.shape)


def activations() -> None:
    """Logits of the float32 run where every linear layer but the head rounds its input."""
    plain = Linear.__call__
    config = EngineConfig(model=smollm2_path(), dtype="float32")
    prompts = [case["prompt_ids"] for case in CASES]
    forced = [case["greedy_ids"] + [2] * 64 for case in CASES]
    exact, _, _ = run_greedy(config, prompts, 64, forced)
    for bits in (8, 16):
        steps = (1 << bits - 1) - 1

        def call(self: Linear, x: torch.Tensor, phase: Phase, steps: int = steps) -> torch.Tensor:
            is_head = self.weight is not None and self.weight.shape[0] > 40000
            return plain(self, x if is_head else rounded(x, steps), phase)

        Linear.__call__ = call
        ours, _, _ = run_greedy(config, prompts, 64, forced)
        Linear.__call__ = plain
        error = torch.cat(
            [
                (theirs - rows)[: len(case["prompt_ids"])].flatten()
                for case, theirs, rows in zip(CASES, exact, ours, strict=True)
            ]
        )
        print(f"float32 with {bits}-bit activations: prefill {describe(error)}")


def runs() -> None:
    """Logits of the default, of torch's kernels and of bfloat16 against float32, ids given."""
    prompts = [case["prompt_ids"] for case in CASES]
    forced = [case["greedy_ids"] + [2] * 64 for case in CASES]
    exact, _, _ = run_greedy(
        EngineConfig(model=smollm2_path(), dtype="float32"), prompts, 64, forced
    )
    for dtype, kernels in (("auto", "auto"), ("auto", "torch"), ("bfloat16", "torch")):
        config = EngineConfig(model=smollm2_path(), dtype=dtype)
        os.environ["LAYLINE_CPU_KERNELS"] = kernels
        ours, _, _ = run_greedy(config, prompts, 64, forced)
        del os.environ["LAYLINE_CPU_KERNELS"]
        errors: dict[str, list[torch.Tensor]] = {"prefill": [], "decode": []}
        same = steps = 0
        for case, theirs, rows in zip(CASES, exact, ours, strict=True):
            first, last = len(case["prompt_ids"]), len(case["prompt_ids"]) + len(case["greedy_ids"])
            errors["prefill"].append((theirs - rows)[:first].flatten())
            errors["decode"].append((theirs - rows)[first : last - 1].flatten())
            agree = theirs[first : last - 1].argmax(-1) == rows[first : last - 1].argmax(-1)
            same, steps = same + int(agree.sum()), steps + len(agree)
        text = ", ".join(f"{name} {describe(torch.cat(part))}" for name, part in errors.items())
        print(f"{dtype}, kernels {kernels}: {text}, same best id in {same} of {steps} decode steps")


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
    four_bit()
    head_products()
    engines()
    runs()
    activations()
    heads()
