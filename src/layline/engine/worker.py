"""One rank: loads its part of the model, runs the steps it is sent, and samples if it leads.

As a process, ``python -m layline.engine.worker RANK DESCRIPTOR PARENT``; under torchrun inside a
process that is there already. Imports of torch happen after the heartbeat has begun.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

import msgspec

from layline.config import EngineConfig
from layline.engine.executor import RowSpec, SamplingRows
from layline.engine.facts import read_tokenizer
from layline.engine.memory import peak_bytes
from layline.engine.outcome import FailedRow, Outcome
from layline.engine.reading import Reading
from layline.engine.replies import Replies
from layline.engine.step_codec import StepDecoder
from layline.engine.wire import (
    Admit,
    Ask,
    AskCollectives,
    Beat,
    Bind,
    Bound,
    Collectives,
    Connection,
    Failed,
    Hello,
    Loaded,
    Memory,
    Read,
    Release,
    Start,
    Step,
    Stop,
    Tokens,
    WireError,
)
from layline.errors import RunError
from layline.grammar import Grammar
from layline.sampling import SamplingParams, TokenLogprobs
from layline.text.constraint import ConstraintCompiler

if TYPE_CHECKING:
    from layline.comm.groups import Groups
    from layline.comm.recording import Recorder
    from layline.engine.drawing import DrawnRows
    from layline.engine.model import LoadedModel
    from layline.engine.pass_clock import TimedPass

BEAT_S = 1.0
LOST = 3
"""Exit status of a rank whose driver is gone, or that cannot go on."""
_PR_SET_PDEATHSIG = 1
_HANGUP = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR


class Heart(threading.Thread):
    """Sends heartbeats, and ends the process when its driver is gone.

    A step may be stuck in a collective then, so nothing but the end of the process helps;
    ``owns_process`` False leaves that to whoever runs the rank inside a process of their own.
    """

    def __init__(self, connection: Connection, *, owns_process: bool) -> None:
        super().__init__(name="layline-heart", daemon=True)
        self._connection = connection
        self._owns_process = owns_process
        self._over = threading.Event()

    def run(self) -> None:
        """Beat until the driver is gone or :meth:`stop` is called."""
        poll = select.poll()
        poll.register(self._connection.socket, _HANGUP)
        while not self._over.is_set():
            try:
                self._connection.send(Beat())
                gone = bool(poll.poll(BEAT_S * 1000))
            except (OSError, ValueError):
                gone = True
            if gone:
                # What was sent before the end is still read: a stop carries the exit status.
                if not self._over.wait(BEAT_S) and self._owns_process:
                    os._exit(LOST)
                return

    def stop(self) -> None:
        """No heartbeat any more."""
        self._over.set()


class Rank:
    """The model's part of one rank and the requests it samples."""

    def __init__(
        self,
        start: Start,
        groups: Groups,
        loaded: LoadedModel,
        recorder: Recorder | None = None,
    ) -> None:
        from layline.layers.sampler import Sampler

        topology = loaded.facts.spec.topology
        here = topology.coordinates
        self.loaded = loaded
        self._start = start
        self._groups = groups
        self._recorder = recorder
        self._attn_dp = here.attn_dp
        self.leads = here.attn_cp == 0 and here.attn_tp == 0
        self._rows = SamplingRows()
        self._steps = StepDecoder()
        self._sampler = Sampler()
        # By step, what the last two gave.
        self._drawn: dict[int, DrawnRows] = {}
        self._constraints: ConstraintCompiler | None = None

    def answer(self, message: Any) -> Any:
        """Carry out one message; the reply, a function that waits for it, or None.

        Raises what makes the rank unusable.
        """
        if isinstance(message, Step):
            return self._step(message)
        if isinstance(message, Admit):
            self._rows.admit(message.request_id, self._constrained(spec_of(message)))
        elif isinstance(message, Release):
            self._rows.release(message.request_id)
        elif isinstance(message, Bind):
            self.loaded.bind_cache(message.num_blocks)
            return Bound(self.loaded.cache_bytes)
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
            engine = EngineConfig(**self._start.engine)
            self._constraints = ConstraintCompiler(read_tokenizer(engine))
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

    def _step(self, message: Step) -> Any:
        import torch

        from layline.engine.drawing import draw_rows

        runner = (self.loaded.draft_model() if message.draft else self.loaded).runner
        clock = runner.clock
        clock.start()
        step, rows = self._steps.decode(message)
        part = step.parts[self._attn_dp]
        before = self._drawn.get(message.before)
        fed = None if before is None else before.token_ids
        with torch.inference_mode():
            if part.reads:
                logits, readings = runner.run_reading(step, fed)
            else:
                logits, readings = runner.run(step, fed), []
            clock.lap("execute")
            if not self.leads:
                return None
            if before is None and message.before:
                raise RunError(f"step {message.before} has no tokens to go on from")
            read = None if before is None else before.read_ids
            states = self._rows.at(part, rows[self._attn_dp], read)
            drawn = draw_rows(self._sampler, logits, states)
        clock.lap("sample")
        self._drawn[message.number] = drawn
        # A step refers to the one before it, and again if it has to be sent again.
        if len(self._drawn) > 2:
            del self._drawn[next(iter(self._drawn))]
        return partial(tokens_reply, message.number, drawn, readings, clock.take())


def load_rank(start: Start, store: Any = None) -> Rank:
    """Join the mesh and load this rank's weights. Every rank must call it."""
    import torch

    from layline.boundary.mesh import make_mesh
    from layline.comm.recording import Recorder, Timing, record_groups
    from layline.engine.facts import resolve
    from layline.engine.meeting import VERIFIED_CALLS, join_groups
    from layline.engine.model import load_draft, load_part, resolve_device
    from layline.weights.opening import open_checkpoint

    engine = EngineConfig(**start.engine)
    device = resolve_device(engine.device, start.device, start.local_ranks)
    torch.set_num_threads(start.threads)
    checkpoint = open_checkpoint(engine.model, seed=engine.seed)
    try:
        facts = resolve(engine, checkpoint).on_rank(start.rank)
        groups = join_groups(
            facts.spec.topology,
            device,
            host=start.host,
            meeting=start.meeting,
            store=store,
            verified_calls=None if engine.record_collectives else VERIFIED_CALLS,
        )
        mesh, recorder = make_mesh(facts.spec, groups), None
        if engine.record_collectives:
            recorder = Recorder(Timing.SYNCHRONISED)
            mesh = make_mesh(facts.spec, *record_groups(groups, recorder))
        loaded = load_part(facts, checkpoint, mesh, device)
    finally:
        checkpoint.close()
    load_draft(engine, loaded, groups, device)
    return Rank(start, groups, loaded, recorder)


def serve(connection: Connection, hello: Hello, *, owns_process: bool, store: Any = None) -> int:
    """Be a rank until told to stop. Returns the exit status."""
    heart = Heart(connection, owns_process=owns_process)
    heart.start()
    try:
        import torch  # noqa: F401 - the driver allows it more time than a step

        connection.send(hello)
        start = connection.receive()
        if start is None:
            return LOST
        if not isinstance(start, Start):
            raise WireError(f"{type(start).__name__} came first; expected Start")
        rank = load_rank(start, store)
        blocks = rank.loaded.fitting_blocks(EngineConfig(**start.engine), start.local_ranks)
        connection.send(Loaded(blocks, rank.loaded.weight_bytes))
        return obey(connection, rank)
    except Exception as error:
        report(connection, error)
        return LOST
    finally:
        heart.stop()


def obey(connection: Connection, rank: Rank) -> int:
    """Carry out messages until one says stop, or none can come any more."""
    # Where steps are only queued, the next one is queued too before the first is waited for.
    with Replies(connection, queues=rank.loaded.device.type == "cuda") as replies:
        while True:
            message = connection.receive()
            if message is None:
                return LOST
            if isinstance(message, Stop):
                return message.status
            reply = rank.answer(message)
            if reply is not None:
                replies.put(reply)


def report(connection: Connection, error: Exception) -> None:
    """Tell the driver why this rank cannot go on, and wait: the driver ends all of them."""
    try:
        text = "".join(traceback.format_exception(error))
        connection.send(Failed(type(error).__name__, str(error), text))
        while not isinstance(connection.receive(), Stop | None):
            pass
    except (OSError, WireError):
        return


def spec_of(message: Admit) -> RowSpec:
    """The row of an admitted request."""
    return RowSpec(
        params=params_of(message.params),
        seed=message.seed,
        valid_vocab=message.valid_vocab,
        prompt_ids=message.prompt_ids,
        eos_ids=frozenset(message.eos_ids),
        banned_ids=frozenset(message.banned_ids),
    )


def tokens_reply(
    number: int, drawn: DrawnRows, readings: Sequence[Reading | FailedRow], timed: TimedPass
) -> Tokens:
    """What a step gave, once it is there."""
    begin = perf_counter()
    reply = packed_tokens(number, drawn.read(), readings)
    timed.add("sample", perf_counter() - begin)
    return msgspec.structs.replace(reply, times=timed.times())


def params_of(fields: Mapping[str, Any]) -> SamplingParams:
    """Parameters from their fields as a message carries them."""
    grammar = fields.get("grammar")
    return SamplingParams(**{**fields, "grammar": grammar and Grammar(**grammar)})


def packed_tokens(
    number: int, drawn: Sequence[Outcome], readings: Sequence[Reading | FailedRow]
) -> Tokens:
    """What came of step ``number``, as it travels."""
    ids: list[int] = []
    logprobs: list[tuple[float, list[tuple[int, float]]] | None] = []
    failed: list[tuple[int, str, str]] = []
    for row, one in enumerate(drawn):
        if isinstance(one, FailedRow):
            failed.append((row, one.message, one.places))
            ids.append(-1)
            logprobs.append(None)
        else:
            ids.append(one[0])
            logprobs.append(None if one[1] is None else packed_logprobs(one[1]))
    reads = [packed_reading(one) for one in readings]
    return Tokens(number, ids, logprobs, failed=failed, reads=reads)


def packed_reading(reading: Reading | FailedRow) -> Read:
    """One reading as it travels; the ids of its tokens are known where it goes."""
    if isinstance(reading, FailedRow):
        return Read(failed=(reading.message, reading.places))
    logprobs = [packed_logprobs(one) for one in reading if isinstance(one, TokenLogprobs)]
    return Read(logprobs, [one for one in reading if isinstance(one, float)])


def packed_logprobs(found: TokenLogprobs) -> tuple[float, list[tuple[int, float]]]:
    """Log-probabilities without the id, which travels beside them."""
    return found.logprob, list(found.top)


def die_with(parent: int) -> None:
    """Have the system kill this process when its driver ends, however it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(LOST)


def main(arguments: list[str]) -> None:
    """Entry of a rank's own process."""
    rank, descriptor, parent = map(int, arguments)
    die_with(parent)
    connection = Connection(socket.socket(fileno=descriptor))
    status = serve(connection, Hello(rank), owns_process=True)
    # Without the interpreter's slow end: nothing here is worth more than the caller's time.
    os._exit(status)


if __name__ == "__main__":
    main(sys.argv[1:])
