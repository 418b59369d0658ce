"""The measurements of ``bench pipeline``: one stage in this process, several in their own."""

from __future__ import annotations

import os
import platform
import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import Any

from layline.config import EngineConfig
from layline.engine.balance import MeshScheduler
from layline.engine.core import Engine
from layline.engine.executor import Executor
from layline.engine.facts import ServedModel
from layline.engine.launch import launch
from layline.engine.request import Request
from layline.engine.step_times import StageUse, StepTimes
from layline.errors import UsageError
from layline.pipeline.handovers import Handover
from layline.pipeline.trace import Timeline
from layline.sampling import SamplingParams

PROMPT_TOKENS = 16
MEASURES = ("decode", "serial", "prime")


@dataclass(frozen=True, kw_only=True)
class PipelineLoad:
    """What is measured: ``batch`` is one stage's, and each microbatch's of several."""

    model: str
    stages: int
    splits: str | None
    batch: int
    new_tokens: int
    chunks: int
    chunk_tokens: int
    repeats: int
    compute: dict[str, Any]

    @property
    def context(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.chunks * self.chunk_tokens + 2, PROMPT_TOKENS + 4 * self.new_tokens + 64)

    def check(self, context: int) -> None:
        """Raise UsageError when that is more than the model's ``context``."""
        if self.context > context:
            raise UsageError(
                f"what is measured needs {self.context} tokens and the model's context has "
                f"{context}; expected fewer --chunks, --chunk-tokens or --new-tokens"
            )


@dataclass
class Samples:
    """Seconds by measure: of one stage, or of chunks one at a time, and of the pipeline."""

    alone: dict[str, list[float]] = field(default_factory=dict)
    staged: dict[str, list[float]] = field(default_factory=dict)

    def add(self, measure: str, alone: float, staged: float) -> None:
        """One repeat of a measure."""
        self.alone.setdefault(measure, []).append(alone)
        self.staged.setdefault(measure, []).append(staged)

    def ratio(self, measure: str) -> float:
        """How many times as fast the pipeline is, of medians."""
        return statistics.median(self.alone[measure]) / statistics.median(self.staged[measure])


class DrawnUse(StageUse):
    """Draws each stage's part of every step on a timeline, and its transfers and waits."""

    def __init__(self, timeline: Timeline) -> None:
        super().__init__()
        self._timeline = timeline
        self._run = timeline.new_run("stages in processes")
        self._steps = 0

    def done(
        self, spans: Iterable[tuple[int, float, float]], waits: Iterable[tuple[int, float]]
    ) -> None:
        """See StageUse."""
        found = list(spans)
        super().done(found, waits)
        for stage, begin, end in found:
            self._timeline.add(self._run, f"stage {stage}", f"step {self._steps}", begin, end)
        self._steps += 1

    def handed(self, handovers: Sequence[Handover]) -> None:
        """See StageUse."""
        for stage, what, begin, end in handovers:
            self._timeline.add(self._run, f"stage {stage}'s cuts", what, begin, end)


class Arm:
    """One executor, and a new engine for each measurement."""

    def __init__(
        self, load: PipelineLoad, config: EngineConfig, timeline: Timeline | None = None
    ) -> None:
        self._load = load
        self._config = config
        times = StepTimes()
        if timeline is not None:
            times.use = DrawnUse(timeline)
        self.model, self.executor = launch(config, times)
        self._draw = random.Random(0)

    def decode(self, batch: int) -> float:
        """Seconds of a token of one request, when ``batch`` requests decode together."""
        with self._engine(self._config) as engine:
            requests = [self._submit(engine, PROMPT_TOKENS) for _ in range(batch)]
            while not all(request.output_ids for request in requests):
                engine.step()
            before = _generated(requests)
            begin = perf_counter()
            while _generated(requests) - before < batch * self._load.new_tokens:
                engine.step()
            seconds, tokens = perf_counter() - begin, _generated(requests) - before
            _stop(engine, requests)
        return seconds / tokens

    def prime(self, *, overlap: bool) -> float:
        """Seconds until a prompt of all chunks has its first token."""
        load = self._load
        config = EngineConfig(**{**asdict(self._config), "overlap": overlap})
        with self._engine(config) as engine:
            begin = perf_counter()
            request = self._submit(engine, load.chunks * load.chunk_tokens)
            while not request.output_ids:
                engine.step()
            seconds = perf_counter() - begin
            _stop(engine, [request])
        return seconds

    @contextmanager
    def _engine(self, config: EngineConfig) -> Iterator[Engine]:
        yield new_engine(self.model, self.executor, config)

    def _submit(self, engine: Engine, length: int) -> Request:
        vocabulary = self.model.valid_vocab
        prompt = [self._draw.randrange(vocabulary) for _ in range(length)]
        most = self._load.context - length
        params = SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True)
        return engine.submit(prompt, params)


def new_engine(model: ServedModel, executor: Executor, config: EngineConfig) -> Engine:
    """An engine with an empty cache on an executor that has nothing to do."""
    microbatches = model.microbatches(config)
    scheduler = MeshScheduler.of(
        config,
        executor.num_blocks,
        shares=False,
        num_stages=microbatches,
        divide=model.divide(config),
    )
    return Engine(model, scheduler, executor, in_flight=model.in_flight(config))


def _generated(requests: list[Request]) -> int:
    return sum(len(request.output_ids) for request in requests)


def _stop(engine: Engine, requests: list[Request]) -> None:
    """End them, and wait for the steps under way: the next engine begins with none."""
    for request in requests:
        engine.abort(request)
    while engine.has_work:
        engine.step()


def measure_pipeline(
    load: PipelineLoad, progress: Callable[[str], None], timeline: Timeline | None = None
) -> dict[str, Any]:
    """Measure all in turn, after a first round that is thrown away; ``timeline`` gets all steps."""
    common = {
        "model": load.model,
        "max_model_len": load.context,
        "prefill_tokens": load.chunk_tokens,
        "prefix_cache": False,
        **load.compute,
    }
    alone = EngineConfig(**common, threads=1, max_running=load.batch)
    staged = EngineConfig(
        **common,
        threads=load.stages,
        max_running=load.batch * load.stages,
        pp_stages=load.stages,
        pp_processes=load.stages,
        pp_splits=load.splits,
    )
    samples = Samples()
    with ExitStack() as stack:
        one, several = Arm(load, alone), Arm(load, staged, timeline)
        stack.callback(one.executor.close)
        stack.callback(several.executor.close)
        for repeat in range(load.repeats + 1):
            progress(f"round {repeat}/{load.repeats}" if repeat else "warm-up")
            into = samples if repeat else Samples()
            into.add("decode", one.decode(load.batch), several.decode(load.batch * load.stages))
            into.add("serial", one.decode(1), several.decode(1))
            into.add("prime", several.prime(overlap=False), several.prime(overlap=True))
        fence = list(several.model.fence or ())
    return as_data(load, samples, fence)


def as_data(load: PipelineLoad, samples: Samples, fence: list[int]) -> dict[str, Any]:
    """Medians, and ratios within the run."""
    median = statistics.median
    return {
        "model": load.model,
        "settings": asdict(load),
        "fence": fence,
        "machine": {"platform": platform.platform(), "cpus": os.cpu_count()},
        "measures": {
            name: {
                "alone_s": median(samples.alone[name]),
                "staged_s": median(samples.staged[name]),
                "ratio": samples.ratio(name),
            }
            for name in MEASURES
        },
    }


def as_table(data: dict[str, Any]) -> str:
    """The same for people."""
    shown, found = data["settings"], data["measures"]
    stages, batch = shown["stages"], shown["batch"]
    decode, serial, prime = (found[name] for name in MEASURES)
    cuts = ", ".join(map(str, data["fence"][1:-1]))
    return "\n".join(
        [
            f"{data['model']}: {stages} stages, each a process with one thread, cut before layer "
            f"{cuts}; one stage has one thread; medians of {shown['repeats']} repeats",
            f"decode, {stages} microbatches of {batch}: {1 / decode['staged_s']:.1f} tokens/s, "
            f"{decode['ratio']:.2f} times one stage with {batch} ({1 / decode['alone_s']:.1f})",
            f"decode, one request: {1 / serial['staged_s']:.1f} tokens/s, {serial['ratio']:.3f} "
            f"times one stage ({1 / serial['alone_s']:.1f})",
            f"prefill, {shown['chunks']} chunks of {shown['chunk_tokens']}: "
            f"{prime['staged_s'] * 1e3:.0f} ms, {prime['ratio']:.2f} times as fast as one chunk "
            f"at a time ({prime['alone_s'] * 1e3:.0f} ms)",
        ]
    )
