"""Models over pipeline stages beside the same model on one, and what was in flight meanwhile."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from layline import LLM
from layline.engine.balance import SampleRow
from layline.engine.executor import Executor, ForwardingExecutor, Launched
from layline.engine.outcome import StepResult
from layline.engine.output import GenerationOutput
from layline.engine.pipelined import PipelinedExecutor
from layline.engine.step import MeshStep
from support.families import CASES
from support.tiny import save_tiny

LAYERS = 8
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
BASE = [5 + 7 * n % 150 for n in range(37)]
PROMPTS = [BASE, BASE[:32], [*BASE[:20], 9, 9, 9], [3], [44, 2, 8, 100, 17, 61], [7] * 5, BASE[3:]]


def save_deep(directory: Path, name: str) -> str:
    """A checkpoint of one of families.CASES with enough layers for eight stages."""
    if name == "llama-dynamic":
        family, changes = "Llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": 32}
    else:
        family, changes = CASES[name]
    if "layer_types" in changes:
        kinds = ["full_attention", "sliding_attention"]
        changes = {**changes, "layer_types": kinds * (LAYERS // 2)}
    save_tiny(directory, family, **{"num_hidden_layers": LAYERS, **changes})
    return str(directory)


class InFlight(ForwardingExecutor):
    """Counts the steps that were launched and not collected yet, and keeps all that were.

    ``rows`` are the requests whose tokens a step draws, ``shared`` those of them that another step
    in flight drew for, unless that was the oldest: ``fed`` counts their tokens, which the plan
    does not know.
    """

    def __init__(self, executor: Executor) -> None:
        super().__init__(executor)
        self.steps: list[MeshStep] = []
        self.rows: list[list[int]] = []
        self.shared: set[int] = set()
        self.most = 0
        self.fed = 0
        # By the identity of what was launched.
        self._open: dict[int, set[int]] = {}

    def launch(
        self, step: MeshStep, rows: Sequence[Sequence[SampleRow]], before: Launched | None, /
    ) -> Launched:
        """See Executor."""
        launched = super().launch(step, rows, before)
        asked = [row.request_id for row in rows[0]]
        self.steps.append(step)
        self.rows.append(asked)
        self.fed += step.parts[0].num_fed
        for others in list(self._open.values())[1:]:
            self.shared |= others.intersection(asked)
        self._open[id(launched)] = set(asked)
        self.most = max(self.most, len(self._open))
        return launched

    def collect(self, launched: Launched, /) -> StepResult:
        """See Executor."""
        try:
            return super().collect(launched)
        finally:
            del self._open[id(launched)]


def watched(llm: LLM) -> InFlight:
    """Stand between an LLM's engine and its executor."""
    watch = InFlight(llm._engine._executor)
    engine: Any = llm._engine
    engine._executor = engine._steps._executor = watch
    return watch


def staged(llm: LLM) -> PipelinedExecutor:
    """The executor of an LLM over stages."""
    executor = llm._executor
    assert isinstance(executor, PipelinedExecutor)
    return executor


def count(llm: LLM, name: str) -> int:
    """A counter of the pipeline's runtime."""
    return staged(llm).loops.runtime.counters[name]


def found_in(outputs: Sequence[GenerationOutput]) -> list[tuple[Any, ...]]:
    """All of the answers but how long they took."""
    return [
        (each.token_ids, each.text, each.finish_reason, each.logprobs, each.prompt_logprobs)
        for each in outputs
    ]


def stream_threads() -> list[str]:
    """The threads of streams that are there, by name."""
    return [each.name for each in threading.enumerate() if each.name.startswith("stream ")]


@contextmanager
def ended_streams() -> Iterator[None]:
    """What runs within leaves no thread of a stream behind."""
    gc.collect()  # Those of other tests, if any: what is left to the collector here is to be seen.
    assert stream_threads() == []
    yield
    assert stream_threads() == []
