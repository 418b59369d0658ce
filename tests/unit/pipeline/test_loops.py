"""Every loop's split gives one stage's bits; its door leads back; its counter is alive."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import pytest
from torch import Tensor

from layline.errors import CellNotReadyError, RunError, UnsplitError
from layline.pipeline.controllers import ScriptedController, Seeded
from layline.pipeline.faults import Fault
from layline.pipeline.readback import PendingLogits
from layline.pipeline.streams import Streams, make_streams
from support.happens_before import HappensBefore
from support.toy_pipeline import (
    TIMEOUT_S,
    ToyDoors,
    ToyPipeline,
    ToyStage,
    ToyStep,
    one_stage,
    same_bits,
    toy_steps,
    with_faults,
)

FENCES = [None, (0, 1, 8), (0, 6, 8)]


@pytest.fixture
def streams() -> Iterator[Streams]:
    with make_streams("cpu") as made:
        yield made


def read(pending: list[PendingLogits]) -> list[Tensor]:
    return [each.wait(TIMEOUT_S) for each in pending]


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 8])
def test_eager_equals_one_stage(num_stages: int, streams: Streams) -> None:
    # pipeline G39, G53
    steps = toy_steps(1, 6)
    pipeline = ToyPipeline(streams, num_stages)
    found = [pipeline.loops.eager(step).wait(TIMEOUT_S) for step in steps]
    assert same_bits(found, one_stage(steps))
    assert pipeline.runtime.counters["eager_splits"] == len(steps)


@pytest.mark.parametrize("fence", FENCES[1:], ids=str)
@pytest.mark.parametrize("devices", [(0, 1), (1, 0), (0, 0)], ids=str)
def test_uneven_and_reversed_placements(
    fence: tuple[int, ...], devices: tuple[int, int], streams: Streams
) -> None:
    # pipeline G40
    steps = toy_steps(2, 5)
    pipeline = ToyPipeline(streams, 2, devices=devices, fence=fence)
    found = [pipeline.loops.eager(step).wait(TIMEOUT_S) for step in steps]
    assert same_bits(found, one_stage(steps))


@pytest.mark.parametrize("window", [1, 2, 3, 4])
@pytest.mark.parametrize("num_stages", [2, 4])
def test_deferred_windows_equal_serial(window: int, num_stages: int, streams: Streams) -> None:
    # pipeline G37, G35
    steps = toy_steps(3, 9)
    pipeline = ToyPipeline(streams, num_stages)
    pending: list[PendingLogits] = []
    found = []
    for step in steps:
        if len(pending) == window:
            found.append(pending.pop(0).wait(TIMEOUT_S))
        pending.append(pipeline.loops.deferred(step))
    found += read(pending)
    assert same_bits(found, one_stage(steps))
    assert pipeline.runtime.counters["deferred_splits"] == len(steps)


def test_deferred_is_refused_on_one_device_and_past_its_window() -> None:
    # pipeline G38
    script = ScriptedController()
    with make_streams("cpu", controller=script) as made:
        shared = ToyPipeline(made, 2, devices=(0, 0))
        with pytest.raises(UnsplitError, match="stages 0, 1 on device 0"):
            shared.loops.deferred(toy_steps(1, 1)[0])
        shared.doors.force_same_device_pipelined = True
        # Slots grow once, and a growth waits for the receiver.
        read([shared.loops.deferred(step) for step in toy_steps(1, 2)])
        script.hold("stage 1")
        for step in toy_steps(1, 4):
            shared.loops.deferred(step)
        with pytest.raises(RunError, match="4 steps are in flight"):
            shared.loops.deferred(toy_steps(1, 1)[0])


@pytest.mark.parametrize("rows", range(1, 17))
@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_microbatches_follow_each_other(num_stages: int, rows: int, streams: Streams) -> None:
    # pipeline G41, G53
    groups = [toy_steps(10 + group, 4, rows=rows) for group in range(num_stages)]
    pipeline = ToyPipeline(streams, num_stages)
    # Disjoint slots: each group has its own cache.
    wanted = [one_stage(group) for group in groups]
    apart = [
        [ToyStep(step.ids, tuple(range(rows * index, rows * index + rows))) for step in group]
        for index, group in enumerate(groups)
    ]
    found = [read(pipeline.loops.batch(list(round_))) for round_ in zip(*apart, strict=True)]
    for index, expected in enumerate(wanted):
        assert same_bits([each[index] for each in found], expected)
    assert pipeline.runtime.counters["batch_splits"] == 4 * num_stages


def test_doors_lead_back_and_are_read_in_every_call(streams: Streams) -> None:
    # pipeline G12, G54, G55
    steps = toy_steps(4, 4)
    pipeline = ToyPipeline(streams, 2, sharded=False)
    doors, counters = pipeline.doors, pipeline.runtime.counters
    found = read(pipeline.loops.batch(steps[:1]))
    doors.batch = False
    found += read(pipeline.loops.batch(steps[1:2]))
    doors.batch, doors.verify = True, False
    found.append(pipeline.loops.verify(steps[2]).wait(TIMEOUT_S))
    doors.verify = True
    found.append(pipeline.loops.verify(steps[3]).wait(TIMEOUT_S))
    assert same_bits(found, one_stage(steps))
    assert (counters["batch_splits"], counters["verify_splits"]) == (1, 1)


@pytest.mark.parametrize("loop", ["batch", "verify"])
def test_an_unsplit_loop_over_remote_weights_is_refused(loop: str, streams: Streams) -> None:
    # pipeline G54, G55
    step = toy_steps(5, 1)[0]
    pipeline = ToyPipeline(streams, 2, ToyDoors(batch=False, verify=False))
    with pytest.raises(UnsplitError, match="would read the weights of 4 of 8 layers"):
        pipeline.loops.batch([step]) if loop == "batch" else pipeline.loops.verify(step)
    pipeline.doors.allow_unsplit_batch = True
    assert same_bits(read(pipeline.loops.batch([step])), one_stage([step]))
    # Half of the layers were read from the other device.
    assert pipeline.runtime.counters["remote_reads"] == 1
    assert pipeline.runtime.counters["remote_read_bytes"] == 100


def test_split_loops_read_no_remote_weights(streams: Streams) -> None:
    # pipeline G56
    steps = toy_steps(6, 4)
    pipeline = ToyPipeline(streams, 4)
    pipeline.loops.eager(steps[0]).wait(TIMEOUT_S)
    read(pipeline.loops.batch(steps[1:2]))
    read(pipeline.loops.prime(steps[2:]))
    assert pipeline.runtime.counters["remote_reads"] == 0
    bring_up = ToyPipeline(_named(streams), 4, sharded=False)
    bring_up.loops.eager(steps[0]).wait(TIMEOUT_S)
    assert bring_up.runtime.counters["remote_reads"] == 3


def test_a_loop_without_a_split_warns_once_or_refuses(streams: Streams) -> None:
    # pipeline G54
    local = ToyPipeline(streams, 2, devices=(1, 1))
    for _ in range(3):
        local.loops.unwired("captured prime", "layline gate --loop prime")
    assert len(local.warnings) == 1
    assert "captured prime has no stage split" in local.warnings[0]
    remote = ToyPipeline(_named(streams), 2)
    with pytest.raises(UnsplitError, match="captured prime has no stage split"):
        remote.loops.unwired("captured prime", "layline gate --loop prime")


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_chunks_are_the_same_unsplit_serial_and_pipelined(num_stages: int) -> None:
    """And so is what is decoded after them, from the cache that they left."""
    # pipeline G45, G46, G53
    *chunks, after = toy_steps(7, 9, rows=5)
    wanted = one_stage([*chunks, after])
    arms = {
        "unsplit": ToyDoors(prime=False, prime_pipe=False),
        "serial": ToyDoors(prime_pipe=False),
        "pipelined": ToyDoors(),
    }
    for arm, doors in arms.items():
        with make_streams("cpu") as streams:
            pipeline = ToyPipeline(streams, num_stages, doors)
            found = read(pipeline.loops.prime(chunks))
            found.append(pipeline.loops.eager(after).wait(TIMEOUT_S))
            assert same_bits(found, wanted), arm
            split = pipeline.runtime.counters["prime_split_chunks"]
            assert split == (0 if arm == "unsplit" else len(chunks))
            if arm != "pipelined":
                assert pipeline.runtime.counters["prime_pipe_overlaps"] == 0


def meet(pipeline: ToyPipeline, chunks: list[ToyStep]) -> None:
    """Have the second stage's walk of a chunk and the first one's of the next wait for each other.

    Without it they may miss each other: a walk here takes some microseconds.
    """
    both = threading.Barrier(2)
    first, second = (stage.program for stage in pipeline.runtime.stages)
    assert isinstance(first, ToyStage)
    assert isinstance(second, ToyStage)
    first.at_start = lambda step: step is chunks[0] or both.wait(TIMEOUT_S)
    second.at_start = lambda step: step is chunks[-1] or both.wait(TIMEOUT_S)


@pytest.mark.parametrize("num_chunks", [2, 3, 6])
def test_every_chunk_but_the_last_overlaps_the_next(num_chunks: int, streams: Streams) -> None:
    # pipeline G47, G49, G21
    chunks = toy_steps(8, num_chunks, rows=4)
    pipeline = ToyPipeline(streams, 2)
    counters = pipeline.runtime.counters
    meet(pipeline, chunks)
    assert same_bits(read(pipeline.loops.prime(chunks)), one_stage(chunks))
    assert counters["prime_pipe_overlaps"] == num_chunks - 1
    # Both slots grew before the first chunk, and none after.
    assert counters["growth_events"] == counters["growth_syncs"] == 2


def test_slots_do_not_grow_twice(streams: Streams) -> None:
    # pipeline G21
    pipeline = ToyPipeline(streams, 2)
    for _ in range(3):
        read(pipeline.loops.prime(toy_steps(8, 4, rows=4)))
    assert pipeline.runtime.counters["growth_events"] == 2


@pytest.mark.parametrize("batch", range(4))
def test_random_interleavings_of_every_loop(batch: int) -> None:
    """With the race checker on; hundreds of seeds over the four batches."""
    # pipeline G26, G27, G32
    for seed in range(batch * 30, batch * 30 + 30):
        checker = HappensBefore(watched=False)
        controller = ScriptedController(Seeded(seed))
        with make_streams("cpu", controller=controller, recorder=checker) as streams:
            pipeline = ToyPipeline(streams, (2, 3, 4, 8)[seed % 4], ToyDoors(overlap=seed % 3 == 0))
            steps = toy_steps(seed, 8)
            found = [pipeline.loops.eager(steps[0]).wait(TIMEOUT_S)]
            found += read([pipeline.loops.deferred(step) for step in steps[1:4]])
            found += read(pipeline.loops.prime(steps[4:7]))
            found.append(pipeline.loops.verify(steps[7]).wait(TIMEOUT_S))
            assert same_bits(found, one_stage(steps)), seed
        checker.check()


def share_scratch(pipeline: ToyPipeline) -> None:
    read([pipeline.loops.deferred(step) for step in toy_steps(1, 4)])


def enter_from_the_caller(pipeline: ToyPipeline) -> None:
    runtime, (step,) = pipeline.runtime, toy_steps(1, 1)
    table = one_stage([step])[0]
    entering = runtime.caller.run(
        lambda: {"hidden_states": table.clone(), "residual": table.clone()}, label="embed"
    )
    result = runtime.walk(step, entering, overlap=False)
    runtime.pending(result, runtime.last.stream).wait(TIMEOUT_S)


def use_the_result(pipeline: ToyPipeline) -> None:
    runtime, (step,) = pipeline.runtime, toy_steps(1, 1)
    result = runtime.walk(step, overlap=False)
    runtime.publish_to(runtime.caller)
    runtime.caller.run(lambda: None, reads=result.buffers, label="use the result")


def admit_between_steps(pipeline: ToyPipeline) -> None:
    first, second = toy_steps(1, 2)
    pipeline.loops.deferred(first)
    pipeline.runtime.admit(lambda: None)
    pipeline.loops.deferred(second).wait(TIMEOUT_S)


def walk_after_loading(pipeline: ToyPipeline) -> None:
    runtime, (step,) = pipeline.runtime, toy_steps(1, 1)
    for stage in runtime.stages:
        runtime.caller.run(lambda: None, writes=(stage.weights,), label="load")
    runtime.load_barrier()
    # A stage that is walked by itself has no entry fence.
    runtime.turn(runtime.stages[0], step, None)


@pytest.mark.parametrize(
    ("fault", "case"),
    [
        pytest.param(Fault.SHARED_SCRATCH, share_scratch, id="shared_scratch"),
        pytest.param(Fault.DROP_ENTRY_FENCE, enter_from_the_caller, id="drop_entry_fence"),
        pytest.param(Fault.DROP_PUBLISH, use_the_result, id="drop_publish"),
        pytest.param(Fault.DROP_BIRTH_BARRIER, admit_between_steps, id="drop_birth_barrier"),
        pytest.param(Fault.DROP_LOAD_BARRIER, walk_after_loading, id="drop_load_barrier"),
    ],
)
def test_a_missing_order_is_a_race(fault: Fault, case: Callable[[ToyPipeline], None]) -> None:
    # pipeline G26, G28, G29, G30, G32, G33, G59
    for planted in (False, True):
        checker = HappensBefore(watched=False)
        options = with_faults(fault) if planted else with_faults()
        with make_streams("cpu", recorder=checker) as streams:
            pipeline = ToyPipeline(streams, 2, options=options)
            # A result that was read too early says so, if the timing lets it.
            early = contextlib.suppress(CellNotReadyError) if planted else contextlib.nullcontext()
            with early:
                case(pipeline)
                pipeline.runtime.drain()
        assert bool(checker.races) is planted, (fault, checker.races)


def test_publishing_on_the_same_stream_does_nothing(streams: Streams) -> None:
    # pipeline G31
    pipeline = ToyPipeline(streams, 2)
    last = pipeline.runtime.last.stream
    pipeline.runtime.publish_to(last)
    assert last.is_idle


@pytest.mark.parametrize("fault", [Fault.NEVER_SPLIT, Fault.SERIAL_CHUNKS], ids=str)
def test_bits_do_not_show_a_pipeline_that_is_not_there(fault: Fault, streams: Streams) -> None:
    """Which is why gates are to ask for counters."""
    chunks = toy_steps(9, 6)
    pipeline = ToyPipeline(streams, 2, options=with_faults(fault))
    assert same_bits(read(pipeline.loops.prime(chunks)), one_stage(chunks))
    counters = pipeline.runtime.counters
    if fault is Fault.NEVER_SPLIT:
        assert counters["prime_split_chunks"] == 0
    assert counters["prime_pipe_overlaps"] == 0


def test_growth_in_the_middle_of_a_prefill_is_counted(streams: Streams) -> None:
    # pipeline G21
    chunks = [step for rows in (2, 4, 8) for step in toy_steps(rows, 1, rows=rows)]
    late = []
    for faults in ((), (Fault.SKIP_PREWARM,)):
        pipeline = ToyPipeline(
            _named(streams) if faults else streams, 2, options=with_faults(*faults)
        )
        assert same_bits(read(pipeline.loops.prime(chunks)), one_stage(chunks))
        late.append(pipeline.runtime.counters["late_growths"])
    assert late == [0, 3]


def test_a_prefill_without_chunks_is_empty(streams: Streams) -> None:
    assert ToyPipeline(streams, 2).loops.prime([]) == []
    broken = ToyPipeline(_named(streams), 2, options=with_faults(Fault.EMPTY_UNDERFLOW))
    with pytest.raises(IndexError):
        broken.loops.prime([])


def test_several_prompts_are_counted_in_batches_and_chunks(streams: Streams) -> None:
    # pipeline G53
    chunks = toy_steps(3, 3, rows=4)
    pipeline = ToyPipeline(streams, 2)
    assert same_bits(read(pipeline.loops.prime(chunks, num_prompts=2)), one_stage(chunks))
    assert pipeline.runtime.counters["prime_batches"] == 1
    assert pipeline.runtime.counters["prime_batch_splits"] == 3


@pytest.mark.parametrize("num_stages", [2, 3, 8])
def test_a_captured_step_is_replayed_for_each_later_one(num_stages: int) -> None:
    """Several in flight: what a replay reads of its step is not the latest one's."""
    # pipeline G25, G53
    steps = toy_steps(4, 9)
    for seed in range(20):
        checker = HappensBefore(watched=False)
        controller = ScriptedController(Seeded(seed))
        with make_streams("cpu", controller=controller, recorder=checker) as streams:
            pipeline = ToyPipeline(streams, num_stages)
            found = [pipeline.loops.eager(steps[0]).wait(TIMEOUT_S)]
            found += read([pipeline.loops.graph(step, "three rows") for step in steps[1:5]])
            found.append(pipeline.loops.deferred(steps[5]).wait(TIMEOUT_S))
            found += read([pipeline.loops.graph(step, "three rows") for step in steps[6:]])
            assert same_bits(found, one_stage(steps)), seed
            counters = pipeline.runtime.counters
            assert (counters["graph_captures"], counters["graph_splits"]) == (1, 7)
        checker.check()


def test_a_capture_runs_nothing_and_an_error_in_a_replay_comes_out(streams: Streams) -> None:
    pipeline = ToyPipeline(streams, 2)
    first, second = toy_steps(5, 2)
    runs: list[ToyStep] = []
    program = pipeline.runtime.stages[0].program
    assert isinstance(program, ToyStage)
    program.at_start = runs.append
    pipeline.loops.graph(first, "shape").wait(TIMEOUT_S)
    assert runs == [first]

    def fail(step: ToyStep) -> None:
        raise ValueError("no such row")

    program.at_start = fail
    with pytest.raises(ValueError, match="no such row"):
        pipeline.loops.graph(second, "shape").wait(TIMEOUT_S)


class _Renamed:
    """The same streams under other names, for a second runtime on them."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self.log = streams.log

    def stream(self, name: str, ordinal: int = 0, *, num_threads: int = 1) -> object:
        return self._streams.stream(f"other {name}", ordinal, num_threads=num_threads)

    def event(self, name: str) -> object:
        return self._streams.event(name)


def _named(streams: Streams) -> Streams:
    return _Renamed(streams)  # type: ignore[return-value]
