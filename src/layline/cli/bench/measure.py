"""The measurements of ``bench latency``, engine by engine inside every repeat."""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from layline.cli.bench.client import Worker, first_output, workers
from layline.errors import RunError, UsageError

DECODE_PROMPT_TOKENS = 64
FIRST_TOKEN_PROMPT = "The capital of France is"
FIRST_TOKEN_LENGTH = 5
FIRST_TOKEN_METRICS = ("first_token_s", "peak_memory_bytes")
NO_TOKENIZER = "the model has no tokenizer files, and this runs layline generate on text"
MANY_PROCESSES = "the system tells the peak of one process, and every rank is one"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured; the same for every engine."""

    name: str
    path: str
    prompt_tokens: int
    new_tokens: int
    batches: tuple[int, ...]
    repeats: int
    compute: dict[str, Any]
    mesh: dict[str, Any] = field(default_factory=dict)
    has_tokenizer: bool = True

    @property
    def context(self) -> int:
        """Tokens of the longest sequence: a prefill with one token, or a decode with one more."""
        return max(self.prompt_tokens + 1, DECODE_PROMPT_TOKENS + self.new_tokens + 1)

    def check(self, context: int) -> None:
        """Raise UsageError when what is measured needs more than the model's ``context``."""
        room = context - 1 - DECODE_PROMPT_TOKENS
        if room < 1:
            raise UsageError(
                f"the model's context of {context} tokens is too short to measure decoding; "
                f"expected at least {DECODE_PROMPT_TOKENS + 2}"
            )
        if self.prompt_tokens > context - 1:
            raise UsageError(
                f"--prompt-tokens {self.prompt_tokens} and one token after them do not fit the "
                f"model's context of {context} tokens; the largest valid value is {context - 1}"
            )
        if self.new_tokens > room:
            raise UsageError(
                f"--new-tokens {self.new_tokens} after prompts of {DECODE_PROMPT_TOKENS} tokens do "
                f"not fit the model's context of {context} tokens; the largest valid value is "
                f"{room}"
            )

    @property
    def load(self) -> dict[str, Any]:
        """The load request without the model: room for the longest prompt and largest batch."""
        return {"op": "load", **self.compute, "context": self.context, "batch": max(self.batches)}

    def model_for(self, engine: str) -> str:
        """Layline knows pulled names; the others get the file."""
        return self.name if engine == "layline" else self.path


@dataclass
class Samples:
    """What was measured of one engine: metric name to one value a repeat.

    ``skipped`` says why a metric has no figure. One failed repeat is enough for that: the median
    of the others would be that of the lucky ones.
    """

    version: str = ""
    values: dict[str, list[float]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    def add(self, metric: str, value: float) -> None:
        """Record one value."""
        self.values.setdefault(metric, []).append(value)

    def skip(self, metric: str, reason: str) -> None:
        """Record that a metric could not be measured."""
        self.skipped.setdefault(metric, reason)

    def summary(self) -> dict[str, dict[str, float]]:
        """Median, least and greatest of every metric that was measured in all repeats."""
        return {
            metric: {"median": statistics.median(seen), "min": min(seen), "max": max(seen)}
            for metric, seen in self.values.items()
            if metric not in self.skipped
        }


def measure(
    settings: Settings, engines: list[str], progress: Callable[[str], None]
) -> tuple[dict[str, Samples], dict[str, str]]:
    """Measure ``engines``; returns the samples, and why an engine that failed has none.

    One engine works at a time, and they take turns within each repeat: machines drift while a
    benchmark runs, and turns spread that over the engines evenly. Raises RunError when Layline
    fails, or when another engine does after it has answered once.
    """
    samples = {engine: Samples() for engine in engines}
    failed: dict[str, str] = {}
    if not settings.has_tokenizer:
        for metric in FIRST_TOKEN_METRICS:
            samples["layline"].skip(metric, NO_TOKENIZER)
    for repeat in range(settings.repeats):
        for engine in list(samples):
            if FIRST_TOKEN_METRICS[0] in samples[engine].skipped:
                continue
            progress(f"first token {repeat + 1}/{settings.repeats}: {engine}")
            try:
                seconds, peak = first_token(settings, engine)
            except RunError as error:
                if engine == "layline" or repeat > 0:
                    raise
                failed[engine] = str(error)
                del samples[engine]
                continue
            for metric, value in zip(FIRST_TOKEN_METRICS, (seconds, peak), strict=True):
                samples[engine].add(metric, value)
            if engine == "layline" and settings.mesh:
                samples[engine].skip(FIRST_TOKEN_METRICS[1], MANY_PROCESSES)
    rounds(settings, samples, progress)
    return samples, failed


def rounds(
    settings: Settings, samples: dict[str, Samples], progress: Callable[[str], None]
) -> None:
    """Measure prefill and decode of every engine in ``samples``, all loaded at the same time."""
    with workers(list(samples)) as running:
        vocab_size = start(settings, running, samples, progress)
        # Every call gets a prompt of its own, so that no engine can reuse cached keys and values.
        tokens = random.Random(0)

        def prompts(count: int, length: int) -> list[list[int]]:
            return [[tokens.randrange(vocab_size) for _ in range(length)] for _ in range(count)]

        for repeat in range(settings.repeats + 1):
            for engine, worker in running.items():
                shown = f"{repeat}/{settings.repeats}" if repeat else "warm-up"
                progress(f"speed {shown}: {engine}")
                # The first round warms caches and is thrown away.
                into = samples[engine] if repeat else Samples()
                one_round(settings, worker, prompts, into)
        for engine, worker in running.items():
            samples[engine].add("loaded_peak_memory_bytes", worker.ask(op="memory")["peak_bytes"])


def start(
    settings: Settings,
    running: dict[str, Worker],
    samples: dict[str, Samples],
    progress: Callable[[str], None],
) -> int:
    """Load the model in every worker. Returns the smallest vocabulary, which all can read."""
    sizes = []
    for engine, worker in running.items():
        progress(f"loading: {engine}")
        request = {**settings.load, "model": settings.model_for(engine)}
        if engine == "layline":
            request["mesh"] = settings.mesh
        reply = worker.ask(**request)
        samples[engine].version = reply["version"]
        sizes.append(int(reply["vocab_size"]))
    return min(sizes)


def one_round(
    settings: Settings,
    worker: Worker,
    prompts: Callable[[int, int], list[list[int]]],
    into: Samples,
) -> None:
    """One prefill and one decode for every batch size.

    Decode is the difference between generating ``new_tokens + 1`` tokens and generating one, so
    the prefill of both cancels and every engine is measured through its ordinary call.
    """
    seconds = worker.generate(prompts(1, settings.prompt_tokens), 1)
    into.add("prefill_tokens_per_s", settings.prompt_tokens / seconds)
    for batch in settings.batches:
        short = worker.generate(prompts(batch, DECODE_PROMPT_TOKENS), 1)
        long = worker.generate(prompts(batch, DECODE_PROMPT_TOKENS), settings.new_tokens + 1)
        metric = f"decode_tokens_per_s_batch_{batch}"
        if long <= short:
            into.skip(
                metric,
                f"it took {short:.3f} s for 1 token and {long:.3f} s for "
                f"{settings.new_tokens + 1}, which is noise; give --new-tokens a larger value",
            )
            continue
        into.add(metric, batch * settings.new_tokens / (long - short))


def first_token(settings: Settings, engine: str) -> tuple[float, int]:
    """Seconds from process start to the first token, and the peak memory of that process.

    Layline runs its real command, tokenizer and text output included. The other engines get token
    ids of the same number in a fresh worker, which is the less work.
    """
    if engine == "layline":
        flags = [
            part
            for name, value in settings.compute.items()
            if value is not None
            for part in (f"--{name}", str(value))
        ]
        for name, value in settings.mesh.items():
            flags.append(f"--{name.replace('_', '-')}")
            flags += [] if value is True else [str(value)]
        command = [sys.executable, "-m", "layline.cli.main", "generate", "--model", settings.name]
        return first_output([*command, *flags, "--max-tokens", "8", FIRST_TOKEN_PROMPT])
    begin = time.perf_counter()
    with Worker(engine) as worker:
        request = {**settings.load, "batch": 1, "model": settings.model_for(engine)}
        vocab_size = worker.ask(**request)["vocab_size"]
        worker.generate([[i % vocab_size for i in range(1, FIRST_TOKEN_LENGTH + 1)]], 1)
        seconds = time.perf_counter() - begin
        return seconds, int(worker.ask(op="memory")["peak_bytes"])
