"""A rank's part of all layers, run step by step in the thread that takes messages."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from time import perf_counter

import msgspec
import torch

from layline.config import EngineConfig
from layline.engine.drawing import DrawnRows, draw_rows
from layline.engine.executor import SamplingRows
from layline.engine.model import LoadedModel
from layline.engine.outcome import FailedRow
from layline.engine.pass_clock import TimedPass
from layline.engine.rank import Answer
from layline.engine.rank_codec import packed_tokens
from layline.engine.reading import Reading
from layline.engine.step_codec import StepDecoder
from layline.engine.wire import Step, Tokens
from layline.errors import RunError
from layline.layers.sampler import Sampler


class WholeModel:
    """Implements rank.RankModel; see there."""

    def __init__(self, engine: EngineConfig, loaded: LoadedModel, local_ranks: int) -> None:
        here = loaded.facts.spec.topology.coordinates
        self.answers_later = loaded.device.type == "cuda"
        self._engine = engine
        self._loaded = loaded
        self._local_ranks = local_ranks
        self._attn_dp = here.attn_dp
        self._leads = here.attn_cp == 0 and here.attn_tp == 0
        self._steps = StepDecoder()
        self._sampler = Sampler()
        # By step, what the last two gave.
        self._drawn: dict[int, DrawnRows] = {}

    @property
    def weight_bytes(self) -> int:
        """See RankModel."""
        return self._loaded.weight_bytes

    @property
    def cache_bytes(self) -> int:
        """See RankModel."""
        return self._loaded.cache_bytes

    def fitting_blocks(self) -> int:
        """See RankModel."""
        return self._loaded.fitting_blocks(self._engine, self._local_ranks)

    def bind_cache(self, num_blocks: int) -> None:
        """See RankModel."""
        self._loaded.bind_cache(num_blocks)

    def step(self, message: Step, rows: SamplingRows) -> Answer | None:
        """See RankModel."""
        runner = (self._loaded.draft_model() if message.draft else self._loaded).runner
        clock = runner.clock
        clock.start()
        step, sampled = self._steps.decode(message)
        part = step.parts[self._attn_dp]
        before = self._drawn.get(message.before)
        fed = None if before is None else before.token_ids
        with torch.inference_mode():
            logits, readings = runner.run_reading(step, fed)
            clock.lap("execute")
            if not self._leads:
                return None
            if before is None and message.before:
                raise RunError(f"step {message.before} has no tokens to go on from")
            read = None if before is None else before.read_ids
            states = rows.at(part, sampled[self._attn_dp], read)
            drawn = draw_rows(self._sampler, logits, states)
        clock.lap("sample")
        self._drawn[message.number] = drawn
        # A step refers to the one before it, and again if it has to be sent again.
        if len(self._drawn) > 2:
            del self._drawn[next(iter(self._drawn))]
        return partial(_tokens, message.number, drawn, readings, clock.take())

    def close(self) -> None:
        """See RankModel. All is done here when a step has been answered."""


def _tokens(
    number: int, drawn: DrawnRows, readings: Sequence[Reading | FailedRow], timed: TimedPass
) -> Tokens:
    """What a step gave, once it is there."""
    begin = perf_counter()
    reply = packed_tokens(number, drawn.read(), readings)
    timed.add("sample", perf_counter() - begin)
    return msgspec.structs.replace(reply, times=timed.times())
