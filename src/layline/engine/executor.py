"""Between the engine, which schedules and writes text, and the models, wherever they run.

No torch here: whoever drives models in other processes needs none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from layline.comm.groups import CollectiveRecord
from layline.engine.balance import SampleRow
from layline.engine.outcome import FailedRow, StepResult
from layline.engine.step import MeshStep, RankStep
from layline.engine.step_plan import sampled_row
from layline.errors import LaylineError, RequestError, RunError
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


@dataclass(frozen=True)
class Crossed:
    """One tensor that crossed a cut in a step; ``num_bytes`` are those of all its rows."""

    name: str
    rows: int
    num_bytes: int


class Launched:
    """A step that an executor has taken on; what more it is only that executor knows."""

    __slots__ = ()

    @property
    def crossed(self) -> Sequence[Sequence[Crossed]]:
        """By cut, what crossed it; known once the step is collected, empty on one stage."""
        return ()


class Executor(Protocol):
    """Runs steps on every rank of a mesh, in order. Calls come from one thread at a time."""

    num_blocks: int
    """Cache blocks of each attention DP rank, block 0 included."""

    def admit(self, request_id: int, attn_dp: int, spec: RowSpec, /) -> None:
        """Make a request known before its first sampled row. Raises SamplingError."""

    def release(self, request_id: int, attn_dp: int, /) -> None:
        """Forget a request; one that is not known is no error."""

    def launch(
        self, step: MeshStep, rows: Sequence[Sequence[SampleRow]], before: Launched | None, /
    ) -> Launched:
        """Have a step run after those that are under way; waits for none of it where it need not.

        ``before`` is the oldest step under way, whose tokens the plan may not know. A step may be
        given again: as long as its rows' indices are the same, so are its tokens. Raises RunError
        as collect.
        """

    def collect(self, launched: Launched, /) -> StepResult:
        """Wait for a step: what its sampled rows and its reads gave.

        Steps are asked for in their order, perhaps not all of them; one may be asked for again
        when the wait was interrupted. A row that has no token is told in the result.
        Raises RunError when a rank failed.
        """

    def draft(self, step: MeshStep, rows: Sequence[Sequence[SampleRow]], /) -> StepResult:
        """Run a step of the draft model, where there is one, and wait for it."""

    def memory(self) -> MemoryUse:
        """What the ranks hold."""

    def collectives(self) -> list[list[CollectiveRecord]]:
        """By rank, the collectives since the last call, in order; recorded where asked for."""

    def failure(self) -> LaylineError | None:
        """Why the ranks are gone, or None while they run; never waits."""

    def close(self, status: int = 0, /) -> None:
        """End what runs elsewhere, which exits with ``status``; a second call does nothing."""


class ForwardingExecutor:
    """An executor that has another one do everything; those that look on derive from it."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.num_blocks = executor.num_blocks

    def admit(self, request_id: int, attn_dp: int, spec: RowSpec, /) -> None:
        """See Executor."""
        self._executor.admit(request_id, attn_dp, spec)

    def release(self, request_id: int, attn_dp: int, /) -> None:
        """See Executor."""
        self._executor.release(request_id, attn_dp)

    def launch(
        self, step: MeshStep, rows: Sequence[Sequence[SampleRow]], before: Launched | None, /
    ) -> Launched:
        """See Executor."""
        return self._executor.launch(step, rows, before)

    def collect(self, launched: Launched, /) -> StepResult:
        """See Executor."""
        return self._executor.collect(launched)

    def draft(self, step: MeshStep, rows: Sequence[Sequence[SampleRow]], /) -> StepResult:
        """See Executor."""
        return self._executor.draft(step, rows)

    def memory(self) -> MemoryUse:
        """See Executor."""
        return self._executor.memory()

    def collectives(self) -> list[list[CollectiveRecord]]:
        """See Executor."""
        return self._executor.collectives()

    def failure(self) -> LaylineError | None:
        """See Executor."""
        return self._executor.failure()

    def close(self, status: int = 0, /) -> None:
        """See Executor."""
        self._executor.close(status)


ReadBefore = Callable[[], Sequence[int]]
"""The tokens of the step that this one is fed from, below zero for a row that had none."""


@dataclass(slots=True)
class SampledRequest:
    """A request as its sampler sees it.

    ``fed`` has, by place in its output, ids that were fed and are not in its state yet.
    """

    state: RowState | FailedRow
    fed: dict[int, int]

    def at(
        self, row: SampleRow, latest: int, read_before: ReadBefore | None
    ) -> RowState | FailedRow:
        """The state for the draw of ``row``, which is fed ``latest``."""
        state = self.state
        if isinstance(state, FailedRow):
            return state
        try:
            waits = latest < 0 and state.needs_history
            token_id = _read(read_before, latest) if waits else latest
            return _fed(state, self.fed, row, token_id)
        except RunError:
            raise
        except Exception as error:
            self.state = FailedRow.of(error)
            return self.state


@dataclass(frozen=True, slots=True)
class TakenRows:
    """A step's sampled rows, to be drawn by whoever draws, in the order of steps.

    Their requests may be released meanwhile.
    """

    rows: Sequence[tuple[SampledRequest, SampleRow, int]]

    def states(self, read_before: ReadBefore | None = None) -> list[RowState | FailedRow]:
        """The states for the draws; one that cannot take its latest token has failed.

        A request's latest token is the one that its sampled row is fed, so a state follows the
        plan and not the draws: a step that is run a second time draws the same. Where the plan does
        not know that token it is waited for, but only for a state that depends on it. Tokens before
        it that came more than one at a time were fed as drafts, to this row's model or to its draft
        model; a row of a draft is drawn as if that draft and those before it were tokens.
        """
        return [request.at(row, latest, read_before) for request, row, latest in self.rows]


class SamplingRows:
    """The requests of one DP rank as its sampler sees them."""

    def __init__(self) -> None:
        self._requests: dict[int, SampledRequest] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def admit(self, request_id: int, spec: RowSpec) -> None:
        """Add a request. Raises SamplingError."""
        self._requests[request_id] = SampledRequest(spec.state(), {})

    def release(self, request_id: int) -> None:
        """Drop a request, if it is there."""
        self._requests.pop(request_id, None)

    def take(self, part: RankStep, rows: Sequence[SampleRow]) -> TakenRows:
        """The step's sampled rows, for a draw later."""
        inputs = _sampled_inputs(part)
        pairs = zip(rows, inputs, strict=True)
        return TakenRows([(self._requests[row.request_id], row, fed) for row, fed in pairs])

    def at(
        self, part: RankStep, rows: Sequence[SampleRow], read_before: ReadBefore | None = None
    ) -> list[RowState | FailedRow]:
        """The states for this step's draws, now; see TakenRows."""
        return self.take(part, rows).states(read_before)


def _fed(state: RowState, fed: dict[int, int], row: SampleRow, latest: int) -> RowState:
    """The state for ``row``, which was fed ``latest``; ``fed`` are ids that it has not taken."""
    known = row.index - row.ahead
    if not state.needs_history:
        state.num_produced = known
        return state.ahead((latest,) * row.ahead) if row.ahead else state
    if row.index > state.num_produced:
        fed[row.index - 1] = latest
    while state.num_produced < known:
        state.append(fed.pop(state.num_produced))
    assert state.num_produced == known, "a request's tokens are fed in order"
    return state.ahead([fed[place] for place in range(known, row.index)]) if row.ahead else state


def _read(read_before: ReadBefore | None, fed: int) -> int:
    assert read_before is not None, "the plan refers to a step that is not there"
    token_id = read_before()[sampled_row(fed)]
    if token_id < 0:
        raise RequestError("the step before gave this request no token")
    return token_id


def _sampled_inputs(part: RankStep) -> list[int]:
    """The token ids of the rows that are sampled: the last of each span that samples."""
    inputs, row = [], -1
    for span, samples in zip(part.spans, part.samples, strict=True):
        row += span.count
        if samples:
            inputs.append(part.token_ids[row])
    return inputs
