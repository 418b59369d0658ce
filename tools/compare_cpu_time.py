"""Layline and llama.cpp on one thread each, by the CPU time of their processes.

Usage: LAYLINE_BENCH_LLAMA_PYTHON=PYTHON .venv/bin/python tools/compare_cpu_time.py

CPU time of one thread says little about a machine's cores together, but other work on the machine
changes it little; ``layline bench latency`` measures what a user waits for. The engines take turns;
medians of five repeats are shown.
"""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
import time
from importlib import util
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Prompts at once, tokens in each, and decode steps: the prefill alone where there are none.
JOBS = ((1, 64, 64), (8, 64, 32), (1, 512, 0))
REPEATS = 5


def serve(name: str, model: str) -> None:
    """Answer each job on stdin with its milliseconds; imports nothing of Layline itself."""
    spec = util.spec_from_file_location("worker", ROOT / "src/layline/cli/bench/worker.py")
    assert spec is not None
    assert spec.loader is not None
    worker = util.module_from_spec(spec)
    spec.loader.exec_module(worker)
    engine = worker.ENGINES[name]()
    engine.load(
        {
            "model": model,
            "threads": 1,
            "dtype": "auto",
            "device": "cpu",
            "context": 640,
            "batch": 8,
        }
    )
    numbers = random.Random(0)

    def seconds(batch: int, prompt: int, new: int) -> float:
        prompts = [numbers.choices(range(100, 40000), k=prompt) for _ in range(batch)]
        start = time.process_time()
        engine.generate(prompts, new)
        return time.process_time() - start

    for line in sys.stdin:
        batch, prompt, steps = map(int, line.split())
        took = seconds(batch, prompt, 1)
        if steps:
            took = (seconds(batch, prompt, steps + 1) - took) / steps
        print(took * 1e3, flush=True)


def compare() -> None:
    """Start both engines, hand them the jobs in turn, and print medians and ratios."""
    sys.path.insert(0, str(ROOT / "tests"))
    from support.model import smollm2_path

    pythons = {
        "layline": sys.executable,
        "llama.cpp": os.environ.get("LAYLINE_BENCH_LLAMA_PYTHON", sys.executable),
    }
    engines = {
        name: subprocess.Popen(
            [python, __file__, name, smollm2_path()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for name, python in pythons.items()
    }
    for batch, prompt, steps in JOBS:
        times: dict[str, list[float]] = {name: [] for name in engines}
        for _ in range(REPEATS + 1):  # The first round warms caches.
            for name, engine in engines.items():
                assert engine.stdin is not None
                assert engine.stdout is not None
                print(batch, prompt, steps, file=engine.stdin, flush=True)
                times[name].append(float(engine.stdout.readline()))
        ours, theirs = (statistics.median(found[1:]) for found in times.values())
        what = f"decode step, batch {batch}" if steps else f"prefill of {prompt} tokens"
        print(
            f"{what}: layline {ours:.1f} ms, llama.cpp {theirs:.1f} ms, {theirs / ours:.2f} times"
        )
    for engine in engines.values():
        engine.communicate()


if __name__ == "__main__":
    if len(sys.argv) == 3:
        serve(sys.argv[1], sys.argv[2])
    else:
        compare()
