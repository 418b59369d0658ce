"""Between the engine, which schedules and writes text, and the models, wherever they run.

No torch here: whoever drives models in other processes needs none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from layline.comm.groups import CollectiveRecord
from layline.engine.balance import SampleRow
from layline.engine.outcome import FailedRow, StepResult
from layline.engine.step import MeshStep, RankStep
from layline.errors import LaylineError
from layline.layers.sampling_state import RowState
from layline.sampling import SamplingParams
from layline.text.constraint import Constraint


@dataclass(frozen=True, kw_only=True)
class RowSpec:
    """What a RowState is made from, wherever the request's rows are sampled."""

    params: SamplingParams
    seed: int
    valid_vocab: int
    prompt_ids: Sequence[int]
    eos_ids: frozenset[int]
    banned_ids: frozenset[int]
    constraint: Constraint | None = None

    def state(self) -> RowState:
        """A fresh state. Raises SamplingError for parameters that name ids which do not exist.

        It follows a grammar where there is a ``constraint``: compiled in the process it is used in.
        """
        grammar = None
        if self.constraint is not None:
            grammar = self.constraint.follow(self.params.stop_token_ids)
        return RowState(
            self.params,
            seed=self.seed,
            valid_vocab=self.valid_vocab,
            prompt_ids=self.prompt_ids,
            eos_ids=self.eos_ids,
            banned_ids=self.banned_ids,
            grammar=grammar,
        )


@dataclass(frozen=True)
class MemoryUse:
    """Bytes over all ranks, and the ranks' processes beside this one: peaks of resident memory."""

    weights: int
    kv_cache: int
    worker_peaks: tuple[int, ...] = ()


class Executor(Protocol):
    """Runs steps on every rank of a mesh. Calls come from one thread at a time."""

    num_blocks: int
    """Cache blocks of each attention DP rank, block 0 included."""

    def admit(self, request_id: int, attn_dp: int, spec: RowSpec, /) -> None:
        """Make a request known before its first sampled row. Raises SamplingError."""

    def release(self, request_id: int, attn_dp: int, /) -> None:
        """Forget a request; one that is not known is no error."""

    def execute(self, step: MeshStep, rows: Sequence[Sequence[SampleRow]], /) -> StepResult:
        """Run a step, sample its rows and read what it says.

        A step may be given again: as long as its rows' indices are the same, so are its tokens.
        A row that has none is told in the result. Raises RunError when a rank failed.
        """

    def draft(self, step: MeshStep, rows: Sequence[Sequence[SampleRow]], /) -> StepResult:
        """Run a step of the draft model, where there is one; otherwise as ``execute``."""

    def memory(self) -> MemoryUse:
        """What the ranks hold."""

    def collectives(self) -> list[list[CollectiveRecord]]:
        """By rank, the collectives since the last call, in order; recorded where asked for."""

    def failure(self) -> LaylineError | None:
        """Why the ranks are gone, or None while they run; never waits."""

    def close(self, status: int = 0, /) -> None:
        """End what runs elsewhere, which exits with ``status``; a second call does nothing."""


class SamplingRows:
    """The requests of one DP rank as its sampler sees them."""

    def __init__(self) -> None:
        self._states: dict[int, RowState | FailedRow] = {}
        # By request and place in its output: ids that were fed and are not in its state yet.
        self._fed: dict[int, dict[int, int]] = {}

    def admit(self, request_id: int, spec: RowSpec) -> None:
        """Add a request. Raises SamplingError."""
        self._states[request_id] = spec.state()
        self._fed[request_id] = {}

    def release(self, request_id: int) -> None:
        """Drop a request, if it is there."""
        self._states.pop(request_id, None)
        self._fed.pop(request_id, None)

    def at(self, part: RankStep, rows: Sequence[SampleRow]) -> list[RowState | FailedRow]:
        """The states for this step's draws; one that cannot take its latest token has failed.

        A request's latest token is the one that its sampled row is fed, so a state follows the
        plan and not the draws: a step that is run a second time draws the same. Tokens before it
        that came more than one at a time were fed as drafts, to this row's model or to its draft
        model; a row of a draft is drawn as if that draft and those before it were tokens.
        """
        states: list[RowState | FailedRow] = []
        for row, latest in zip(rows, _sampled_inputs(part), strict=True):
            state = self._states[row.request_id]
            if isinstance(state, RowState):
                try:
                    state = _fed(state, self._fed[row.request_id], row, latest)
                except Exception as error:
                    state = self._states[row.request_id] = FailedRow.of(error)
            states.append(state)
        return states


def _fed(state: RowState, fed: dict[int, int], row: SampleRow, latest: int) -> RowState:
    """The state for ``row``, which was fed ``latest``; ``fed`` are ids that it has not taken."""
    known = row.index - row.ahead
    if row.index > state.num_produced:
        fed[row.index - 1] = latest
    while state.num_produced < known:
        state.append(fed.pop(state.num_produced))
    assert state.num_produced == known, "a request's tokens are fed in order"
    return state.ahead([fed[place] for place in range(known, row.index)]) if row.ahead else state


def _sampled_inputs(part: RankStep) -> list[int]:
    """The token ids of the rows that are sampled: the last of each span that samples."""
    inputs, row = [], -1
    for span, samples in zip(part.spans, part.samples, strict=True):
        row += span.count
        if samples:
            inputs.append(part.token_ids[row])
    return inputs
