"""What a pipeline refuses and what it warns of, by what is really where."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layline.errors import UnsplitError
from layline.pipeline.counters import LOOPS
from layline.pipeline.guards import (
    UNSPLIT_ALLOWED,
    UnwiredLoops,
    refuse_chunk_pipeline,
    refuse_deferred,
    refuse_unsplit_if_remote,
)
from layline.pipeline.placement import Placement, Residency

relaxed = settings(max_examples=200, deadline=None, database=None)

LOCAL = Residency((1, 1, 1, 1), 1)
REMOTE = Residency((0, 0, 1, 1), 1)
UNWIRED = (*sorted(set(LOOPS) - UNSPLIT_ALLOWED), "lockstep", "beam search")


@pytest.mark.parametrize("loop", UNWIRED)
def test_a_loop_without_a_split_refuses_remote_weights(loop: str) -> None:  # pipeline G54
    reports: list[str] = []
    loops = UnwiredLoops(reports.append)
    for _ in range(2):
        with pytest.raises(UnsplitError) as error:
            loops.enter(loop, "--loop eager", REMOTE)
        message = str(error.value)
        assert message.startswith(f"{loop} has no stage split")
        assert "2 of 4 layers from device 0" in message
        assert "runs on device 1" in message
        assert "expected --loop eager" in message
        assert "LAYLINE_PP_ALLOW_UNSPLIT_BATCH=1" in message
        assert error.value.exit_status == 2
    assert reports == []


@pytest.mark.parametrize("loop", UNWIRED)
def test_a_loop_without_a_split_warns_once_over_local_weights(loop: str) -> None:  # pipeline G54
    reports: list[str] = []
    loops = UnwiredLoops(reports.append)
    for _ in range(3):
        loops.enter(loop, "--loop eager", LOCAL)
    (message,) = reports
    assert message.startswith(f"{loop} has no stage split")
    assert "--loop eager uses the pipeline" in message
    loops.enter("another", "--loop eager", LOCAL)
    assert len(reports) == 2
    UnwiredLoops(reports.append).enter(loop, "--loop eager", LOCAL)
    assert len(reports) == 3, "what was warned of belongs to one runtime"


def test_prime_may_walk_unsplit() -> None:
    reports: list[str] = []
    UnwiredLoops(reports.append).enter("prime", "the split", REMOTE)
    assert reports == []


def test_the_measuring_door_lifts_the_refusal() -> None:
    reports: list[str] = []
    UnwiredLoops(reports.append).enter("batch", "LAYLINE_BATCH_PP=1", REMOTE, allowed=True)
    assert len(reports) == 1
    refuse_unsplit_if_remote("batch", "x", REMOTE, allowed=True)


@relaxed
@given(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.integers(0, 2))
def test_refusals_look_at_residency_and_primary_alone(layers: list[int], primary: int) -> None:
    # pipeline G55
    residency = Residency(tuple(layers), primary)
    elsewhere = [device for device in layers if device != primary]
    if not elsewhere:
        refuse_unsplit_if_remote("batch", "the split", residency)
        return
    several = "s" if len(set(elsewhere)) > 1 else ""
    with pytest.raises(
        UnsplitError, match=f"{len(elsewhere)} of {len(layers)} .* device{several} "
    ):
        refuse_unsplit_if_remote("batch", "the split", residency)


def test_weights_on_one_device_that_is_not_the_primary_are_remote() -> None:  # pipeline G55
    with pytest.raises(UnsplitError, match="3 of 3 layers from device 1"):
        refuse_unsplit_if_remote("batch", "the split", Residency((1, 1, 1), 0))


APART = Placement((0, 1), (0, 0))
TOGETHER = Placement((0, 1, 0), (0, 0, 0))


def test_deferred_decode_needs_a_device_for_each_stage() -> None:
    refuse_deferred(APART)
    with pytest.raises(UnsplitError, match="stages 0, 2 on device 0"):
        refuse_deferred(TOGETHER)
    refuse_deferred(TOGETHER, forced=True)
    for forced in (False, True):
        with pytest.raises(UnsplitError, match="needs an open pipeline; expected pp_stages"):
            refuse_deferred(None, forced=forced)
        with pytest.raises(UnsplitError, match="expected LAYLINE_PP_STREAMS unset"):
            refuse_deferred(APART, streams=False, forced=forced)


def test_the_chunk_pipeline_needs_a_device_for_each_stage() -> None:
    refuse_chunk_pipeline(APART)
    with pytest.raises(UnsplitError, match="LAYLINE_PRIME_PIPE=0 for one chunk at a time"):
        refuse_chunk_pipeline(TOGETHER)
    refuse_chunk_pipeline(Placement((0, 0), (0, 1)))
