"""The measurements of ``bench throughput``, in this process, around the engine's own steps."""

from __future__ import annotations

import os
import platform
import random
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from time import perf_counter
from typing import Any

from layline.cli.bench.client import Worker
from layline.config import EngineConfig
from layline.engine.balance import PREFILL_BESIDE_DECODES, MeshScheduler, SampleRow
from layline.engine.core import Engine
from layline.engine.executor import ForwardingExecutor, Launched
from layline.engine.facts import ServedModel
from layline.engine.launch import launch
from layline.engine.outcome import StepResult
from layline.engine.step import MeshStep
from layline.errors import UsageError
from layline.sampling import SamplingParams

PROMPT_TOKENS = 64


@dataclass(frozen=True, kw_only=True)
class Load:
    """What is measured; ``path`` is the model's file, for another engine."""

    model: str
    path: str
    batches: tuple[int, ...]
    new_tokens: int
    prefix_tokens: int
    repeats: int
    compute: dict[str, Any]
    rival: str | None = None

    @property
    def context(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.prefix_tokens + 2, PROMPT_TOKENS + self.most_tokens)

    @property
    def most_tokens(self) -> int:
        """Tokens of an answer: those measured, and those of the first until the last is prefilled.

        One more than that, so that no step that is measured ends a request.
        """
        chunks = -(-max(self.batches) * PROMPT_TOKENS // PREFILL_BESIDE_DECODES)
        return self.new_tokens + chunks + 2

    def check(self, context: int) -> None:
        """Raise UsageError when what is measured needs more than the model's ``context``."""
        needs = (
            ("--prefix-tokens", self.prefix_tokens, context - 2),
            (
                "--new-tokens",
                self.new_tokens,
                context - PROMPT_TOKENS - self.most_tokens + self.new_tokens,
            ),
        )
        for flag, value, largest in needs:
            if value > largest:
                raise UsageError(
                    f"{flag} {value} does not fit the model's context of {context} tokens beside "
                    f"what is measured with it; the largest valid value is {max(0, largest)}"
                )


@dataclass
class Samples:
    """Seconds: of whole decode steps and of their compute, by batch; to a first token."""

    steps: dict[int, list[float]] = field(default_factory=dict)
    computed: dict[int, list[float]] = field(default_factory=dict)
    rival: dict[int, list[float]] = field(default_factory=dict)
    cold: list[float] = field(default_factory=list)
    cached: list[float] = field(default_factory=list)


class TimedExecutor(ForwardingExecutor):
    """An executor that adds up the seconds of its steps."""

    seconds = 0.0

    def launch(
        self, step: MeshStep, rows: Sequence[Sequence[SampleRow]], before: Launched | None, /
    ) -> Launched:
        """See Executor."""
        begin = perf_counter()
        launched = super().launch(step, rows, before)
        self.seconds += perf_counter() - begin
        return launched

    def collect(self, launched: Launched, /) -> StepResult:
        """See Executor."""
        begin = perf_counter()
        result = super().collect(launched)
        self.seconds += perf_counter() - begin
        return result


class Bench:
    """One engine on one model, and prompts that were never used before."""

    def __init__(self, load: Load, model: ServedModel, executor: TimedExecutor) -> None:
        self._load = load
        self._executor = executor
        config = EngineConfig(max_running=max(load.batches))
        microbatches = model.microbatches(config)
        scheduler = MeshScheduler.of(config, executor.num_blocks, num_stages=microbatches)
        self._engine = Engine(model, scheduler, executor, in_flight=microbatches)
        self._draw = random.Random(0)
        self._vocabulary = model.valid_vocab

    def prompt(self, length: int) -> list[int]:
        """Random token ids."""
        return [self._draw.randrange(self._vocabulary) for _ in range(length)]

    def prompts(self, batch: int) -> list[list[int]]:
        """As many prompts to decode after."""
        return [self.prompt(PROMPT_TOKENS) for _ in range(batch)]

    def decode(self, batch: int, into: Samples) -> None:
        """Decode a batch; steps count from the first in which all of it decodes."""
        most = SamplingParams(temperature=0.0, max_tokens=self._load.most_tokens, ignore_eos=True)
        requests = [self._engine.submit(prompt, most) for prompt in self.prompts(batch)]
        while not all(request.output_ids for request in requests):
            self._engine.step()
        for _ in range(self._load.new_tokens):
            computed, begin = self._executor.seconds, perf_counter()
            self._engine.step()
            into.steps.setdefault(batch, []).append(perf_counter() - begin)
            into.computed.setdefault(batch, []).append(self._executor.seconds - computed)
        for request in requests:
            self._engine.abort(request)

    def first_token(self, prompt: Sequence[int]) -> float:
        """Seconds from submission to the first token."""
        once = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        begin = perf_counter()
        request = self._engine.submit(prompt, once)
        self._engine.run([request])
        return perf_counter() - begin

    def prefix(self, into: Samples) -> None:
        """A new prompt, and again after it with another last token."""
        prompt = self.prompt(self._load.prefix_tokens)
        into.cold.append(self.first_token([*prompt, *self.prompt(1)]))
        into.cached.append(self.first_token([*prompt, *self.prompt(1)]))


def measure_throughput(load: Load, progress: Callable[[str], None]) -> dict[str, Any]:
    """Measure, batch by batch in every repeat, after a first round that is thrown away.

    Raises UsageError where the model's context is too short.
    """
    config = EngineConfig(
        model=load.model,
        max_running=max(load.batches),
        max_model_len=load.context,
        **load.compute,
    )
    samples = Samples()
    with ExitStack() as stack:
        model, started = launch(config)
        executor = TimedExecutor(started)
        stack.callback(executor.close)
        bench = Bench(load, model, executor)
        rival = None
        if load.rival is not None:
            rival = stack.enter_context(Worker(load.rival))
            request = {**load.compute, "context": load.context, "batch": max(load.batches)}
            rival.ask(op="load", model=load.path, **request)
        for repeat in range(load.repeats + 1):
            progress(f"round {repeat}/{load.repeats}" if repeat else "warm-up")
            into = samples if repeat else Samples()
            bench.prefix(into)
            for batch in load.batches:
                bench.decode(batch, into)
                # Prefill of a large batch takes it long, and any batch warms it up.
                if rival is not None and (repeat or batch == min(load.batches)):
                    step = rival.decode_step(bench.prompts(batch), load.new_tokens)
                    into.rival.setdefault(batch, []).append(step)
    return as_data(load, samples)


def as_data(load: Load, samples: Samples) -> dict[str, Any]:
    """Medians, and ratios within the run."""
    median = statistics.median
    batches: dict[str, Any] = {}
    for batch in load.batches:
        steps, computed = samples.steps[batch], samples.computed[batch]
        batches[str(batch)] = {
            "step_s": median(steps),
            "tokens_per_s": batch / median(steps),
            "engine_overhead_s": median(
                [step - part for step, part in zip(steps, computed, strict=True)]
            ),
        }
        if batch in samples.rival:
            batches[str(batch)]["rival_tokens_per_s"] = batch / median(samples.rival[batch])
    cold, cached = median(samples.cold), median(samples.cached)
    return {
        "model": load.model,
        "settings": {**asdict(load), "prompt_tokens": PROMPT_TOKENS},
        "machine": {"platform": platform.platform(), "cpus": os.cpu_count()},
        "batches": batches,
        "first_token": {"cold_s": cold, "cached_prefix_s": cached, "ratio": cold / cached},
    }


def as_table(data: dict[str, Any]) -> str:
    """The same for people."""
    shown = data["settings"]
    rival, compute = shown["rival"], shown["compute"]
    lines = [
        f"{data['model']}: {shown['prompt_tokens']} prompt tokens, {shown['new_tokens']} steps, "
        f"medians of {shown['repeats']} repeats; {compute['device']}, dtype {compute['dtype']}, "
        f"threads {compute['threads'] or 'all'} of {data['machine']['cpus']}",
        f"{'batch':>6} {'tokens/s':>10} {'steps/s':>9} {'engine, ms a step':>18}"
        + (f" {f'times {rival}':>17}" if rival else ""),
    ]
    for batch, found in data["batches"].items():
        line = (
            f"{batch:>6} {found['tokens_per_s']:>10.1f} {1 / found['step_s']:>9.1f} "
            f"{found['engine_overhead_s'] * 1e3:>18.3f}"
        )
        if rival:
            line += f" {found['tokens_per_s'] / found['rival_tokens_per_s']:>17.2f}"
        lines.append(line)
    names = list(data["batches"])
    for less, more in pairwise(names):
        ratio = data["batches"][more]["tokens_per_s"] / data["batches"][less]["tokens_per_s"]
        lines.append(f"batch {more} makes {ratio:.2f} times the tokens of batch {less}")
    first = data["first_token"]
    lines.append(
        f"first token after {shown['prefix_tokens'] + 1} tokens: {first['cold_s'] * 1e3:.1f} ms, "
        f"with the first {shown['prefix_tokens']} cached {first['cached_prefix_s'] * 1e3:.1f} ms, "
        f"{first['ratio']:.1f} times quicker"
    )
    return "\n".join(lines)
