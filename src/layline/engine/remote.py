"""Running steps on ranks in other processes. No torch here."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, fields
from time import perf_counter
from typing import Any

from layline.comm.groups import CollectiveKind, CollectiveRecord
from layline.engine import wire
from layline.engine.balance import SampleRow
from layline.engine.executor import Launched, MemoryUse, RowSpec
from layline.engine.outcome import FailedRow, Outcome, StepResult
from layline.engine.reading import Reading, RowRead
from layline.engine.step import MeshStep
from layline.engine.step_codec import StepEncoder, in_series
from layline.engine.step_times import OverlapCount, StepTimes, joined_passes
from layline.engine.supervisor import Supervisor
from layline.errors import LaylineError, RunError
from layline.sampling import SamplingParams, TokenLogprobs
from layline.topology import GroupName, Topology

LOG = logging.getLogger("layline.engine")


@dataclass(frozen=True, slots=True)
class _RemoteStep(Launched):
    number: int
    launched_at: float
    step: MeshStep


class RemoteExecutor:
    """Drives the ranks of a mesh; the leader of each attention DP rank samples its rows.

    Over pipeline stages in several processes those of the last one do, and the others answer a
    step when they have handed it on. ``num_overlapped`` counts the steps that the first stage began
    before the last stage was done with the step before.
    """

    def __init__(
        self, supervisor: Supervisor, topology: Topology, times: StepTimes | None = None
    ) -> None:
        self._supervisor = supervisor
        self._times = times or StepTimes()
        self._ranks = range(topology.world_size)
        self._answering = self._ranks[:: topology.attn_cp * topology.attn_tp]
        self._leaders = self._answering[-topology.attn_dp :]
        self._overlap = OverlapCount()
        self._steps = StepEncoder()
        self._number = 0
        self._in_series = False
        self._collected_at = 0.0
        self._weight_bytes = 0
        self._cache_bytes = 0
        self.num_blocks = 0

    @property
    def num_overlapped(self) -> int:
        """Steps that began on the first stage while the one before was on others."""
        return self._overlap.count

    def start(self, messages: Sequence[wire.Start]) -> None:
        """Load the model on every rank and give all the same number of cache blocks.

        Raises what a rank says it failed with, or RunError for one that is gone; all ranks are
        ended then, and when it is interrupted.
        """
        try:
            self._load(messages)
        except BaseException:
            # A rank that loads reads no messages: there is nothing to wait for.
            self._supervisor.close(RunError.exit_status, patience_s=0.0)
            raise

    def _load(self, messages: Sequence[wire.Start]) -> None:
        for message in messages:
            self._supervisor.post(message, message.rank)
        loaded = self._supervisor.collect((wire.Loaded,), self._ranks)
        self._weight_bytes = sum(one.weight_bytes for one in loaded)
        self.num_blocks = min(one.fitting_blocks for one in loaded)
        for rank, one in zip(self._ranks, loaded, strict=True):
            LOG.info(
                "loaded %.0f MiB of weights; there is room for %d cache blocks",
                *(one.weight_bytes / (1 << 20), one.fitting_blocks),
                extra={"fields": {"rank": rank}},
            )
        self._supervisor.post(wire.Bind(self.num_blocks))
        bound = self._supervisor.collect((wire.Bound,), self._ranks)
        self._cache_bytes = sum(one.cache_bytes for one in bound)

    def admit(self, request_id: int, attn_dp: int, spec: RowSpec, /) -> None:
        """See Executor."""
        spec.state()  # Refuses here what its rank would refuse too late.
        message = wire.Admit(
            request_id=request_id,
            params=params_fields(spec.params),
            seed=spec.seed,
            valid_vocab=spec.valid_vocab,
            prompt_ids=list(spec.prompt_ids) if spec.params.needs_repetition else [],
            eos_ids=sorted(spec.eos_ids),
            banned_ids=sorted(spec.banned_ids),
        )
        self._supervisor.post(message, self._leaders[attn_dp])

    def release(self, request_id: int, attn_dp: int, /) -> None:
        """See Executor. Nothing is left to release where the ranks are gone."""
        if self._supervisor.is_running:
            self._supervisor.post(wire.Release(request_id), self._leaders[attn_dp])

    def launch(
        self, step: MeshStep, rows: Sequence[Sequence[SampleRow]], before: Launched | None, /
    ) -> Launched:
        """See Executor. Ranks find the step in their connection when they are done with others."""
        self._times.use.launched(alone=before is None)
        fed = before.number if isinstance(before, _RemoteStep) else 0
        launched = self._post(step, rows, before=fed)
        self._in_series = in_series(launched.number, fed, step)
        return launched

    def draft(self, step: MeshStep, rows: Sequence[Sequence[SampleRow]], /) -> StepResult:
        """See Executor."""
        result, _ = self._replies(self._post(step, rows, draft=True))
        return result

    def collect(self, launched: Launched, /) -> StepResult:
        """See Executor."""
        assert isinstance(launched, _RemoteStep)
        result, replies = self._replies(launched)
        # Ranks begin with it once they are done with the step before.
        now, begin = perf_counter(), max(launched.launched_at, self._collected_at)
        self._collected_at = now
        size = len(self._leaders)
        of_ranks = [replies[rank::size] for rank in range(size)]
        passes = [joined_passes([reply.times for reply in each]) for each in of_ranks]
        self._times.add_passes(passes, now - begin)
        spans = [span for reply in of_ranks[0] for span in reply.spans]
        self._overlap.note(spans)
        self._times.use.done(spans, [wait for reply in of_ranks[0] for wait in reply.waits])
        self._times.use.handed([each for reply in of_ranks[0] for each in reply.handovers])
        return result

    def _post(
        self,
        step: MeshStep,
        rows: Sequence[Sequence[SampleRow]],
        *,
        before: int = 0,
        draft: bool = False,
    ) -> _RemoteStep:
        self._number += 1
        self._supervisor.post(self._steps.encode(self._number, step, rows, before, draft=draft))
        self._steps.sent()
        return _RemoteStep(self._number, perf_counter(), step)

    def _replies(self, launched: _RemoteStep) -> tuple[StepResult, list[wire.Tokens]]:
        replies = self._supervisor.collect(
            (wire.Tokens,), self._answering, launched.number, kept=self._in_series
        )
        leaders = replies[-len(self._leaders) :]
        pairs = zip(launched.step.parts, leaders, strict=True)
        result = StepResult(
            [tokens_of(reply) for reply in leaders],
            [readings_of(part.reads, reply) for part, reply in pairs],
        )
        return result, replies

    def memory(self) -> MemoryUse:
        """See Executor."""
        self._supervisor.post(wire.Ask())
        peaks = self._supervisor.collect((wire.Memory,), self._ranks)
        return MemoryUse(
            self._weight_bytes, self._cache_bytes, tuple(peak.peak_bytes for peak in peaks)
        )

    def collectives(self) -> list[list[CollectiveRecord]]:
        """See Executor."""
        self._supervisor.post(wire.AskCollectives())
        replies = self._supervisor.collect((wire.Collectives,), self._ranks)
        return [[record_of(packed) for packed in reply.records] for reply in replies]

    def failure(self) -> LaylineError | None:
        """See Executor."""
        return self._supervisor.failure

    def close(self, status: int = 0, /) -> None:
        """See Executor."""
        self._supervisor.close(status)


def params_fields(params: SamplingParams) -> dict[str, Any]:
    """The fields as a message carries them."""
    return {each.name: getattr(params, each.name) for each in fields(params)}


def record_of(packed: tuple[str, str, int, int, int, bool, float | None]) -> CollectiveRecord:
    """A record as a message carries it."""
    return CollectiveRecord(CollectiveKind(packed[0]), GroupName(packed[1]), *packed[2:])


def tokens_of(reply: wire.Tokens) -> list[Outcome]:
    """A reply's ids, each with its log-probabilities where they were asked for, or a failure."""
    found: list[Outcome] = []
    for token_id, packed in zip(reply.ids, reply.logprobs, strict=True):
        found.append((token_id, None if packed is None else logprobs_of(token_id, packed)))
    for row, message, places in reply.failed:
        found[row] = FailedRow(message, places)
    return found


def readings_of(reads: Sequence[RowRead], reply: wire.Tokens) -> list[Reading | FailedRow]:
    """What a reply says of the step's reads."""
    found: list[Reading | FailedRow] = []
    for read, packed in zip(reads, reply.reads, strict=True):
        if packed.failed is not None:
            found.append(FailedRow(*packed.failed))
        elif read.next_ids:
            pairs = zip(read.next_ids, packed.logprobs, strict=True)
            found.append(tuple(logprobs_of(token_id, one) for token_id, one in pairs))
        else:
            found.append(tuple(packed.values))
    return found


def logprobs_of(token_id: int, packed: tuple[float, list[tuple[int, float]]]) -> TokenLogprobs:
    """Log-probabilities as a message carries them."""
    return TokenLogprobs(token_id, packed[0], tuple(packed[1]))
