"""One rank: what it does with each message, whatever part of the model it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from layline.config import EngineConfig
from layline.engine.executor import RowSpec, SamplingRows
from layline.engine.facts import read_tokenizer
from layline.engine.memory import peak_bytes
from layline.engine.rank_codec import spec_of
from layline.engine.wire import (
    Admit,
    Ask,
    AskCollectives,
    Bind,
    Bound,
    Collectives,
    Memory,
    Release,
    Step,
    Tokens,
)
from layline.text.constraint import ConstraintCompiler

if TYPE_CHECKING:
    from layline.comm.recording import Recorder

Answer = Callable[[], Tokens | None]
"""Waits for a step and gives what the rank says of it, None where another rank speaks."""


class RankModel(Protocol):
    """What a rank runs: its part of all layers, or of some pipeline stages.

    ``answers_later`` says that steps are only queued: the next one is taken on before the first is
    waited for.
    """

    answers_later: bool

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights here."""

    @property
    def cache_bytes(self) -> int:
        """Bytes of the cache here, once it is bound."""

    def fitting_blocks(self) -> int:
        """The largest cache that fits. Raises UsageError when that is too few blocks."""

    def bind_cache(self, num_blocks: int) -> None:
        """Allocate the cache."""

    def step(self, message: Step, rows: SamplingRows) -> Answer | None:
        """Take a step on; ``rows`` are the requests that this rank may have to sample."""

    def close(self) -> None:
        """End what runs in this process beside the caller."""


class Rank:
    """A part of the model, and the requests whose rows this rank samples."""

    def __init__(
        self, engine: EngineConfig, model: RankModel, recorder: Recorder | None = None
    ) -> None:
        self.model = model
        self._engine = engine
        self._recorder = recorder
        self._rows = SamplingRows()
        self._constraints: ConstraintCompiler | None = None

    def answer(self, message: Any) -> Any:
        """Carry out one message; the reply, a function that waits for it, or None.

        Raises what makes the rank unusable.
        """
        if isinstance(message, Step):
            return self.model.step(message, self._rows)
        if isinstance(message, Admit):
            self._rows.admit(message.request_id, self._constrained(spec_of(message)))
        elif isinstance(message, Release):
            self._rows.release(message.request_id)
        elif isinstance(message, Bind):
            self.model.bind_cache(message.num_blocks)
            return Bound(self.model.cache_bytes)
        elif isinstance(message, Ask):
            return Memory(peak_bytes())
        elif isinstance(message, AskCollectives):
            return self._collectives()
        return None

    def _constrained(self, spec: RowSpec) -> RowSpec:
        """The row with its grammar compiled; the driver has compiled it before and found it good.

        Only then does a rank read the vocabulary.
        """
        if spec.params.grammar is None:
            return spec
        if self._constraints is None:
            self._constraints = ConstraintCompiler(read_tokenizer(self._engine))
        return replace(spec, constraint=self._constraints.compile(spec.params.grammar))

    def _collectives(self) -> Collectives:
        records = [] if self._recorder is None else list(self._recorder.records)
        if self._recorder is not None:
            self._recorder.clear()
        return Collectives(
            [
                (
                    *(one.kind.value, one.group.value, one.rows, one.columns),
                    *(one.payload_bytes, one.in_compute, one.seconds),
                )
                for one in records
            ]
        )
