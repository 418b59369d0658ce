"""Which stages a rank runs, how it is named, and how overlap is counted."""

from __future__ import annotations

import pytest

from layline.engine.ranks import rank_title
from layline.engine.remote_stages import stages_of
from layline.engine.step_times import OverlapCount, PassTimes, StageUse, joined_passes
from layline.engine.wire import Pipeline
from layline.pipeline.placement import Inventory, place
from layline.topology import Topology


@pytest.mark.parametrize(
    ("num_stages", "num_processes", "runs"),
    [
        (2, 2, [[0], [1]]),
        (3, 2, [[0], [1, 2]]),
        (5, 2, [[0, 1], [2, 3, 4]]),
        (4, 1, [[0, 1, 2, 3]]),
    ],
)
def test_every_stage_is_on_one_process(
    num_stages: int, num_processes: int, runs: list[list[int]]
) -> None:  # pipeline G10
    placement = place(num_stages, Inventory(), None, num_processes)
    pipeline = Pipeline([0], list(placement.processes), list(placement.devices))
    mesh = Topology(tp=2, pp=num_processes)
    found = [stages_of(pipeline, mesh.at(rank)) for rank in range(mesh.world_size)]
    assert [list(each or ()) for each in found] == [run for run in runs for _ in range(2)]
    assert stages_of(None, mesh) is None


def test_a_stage_sees_the_mesh_of_its_own_ranks() -> None:
    mesh = Topology(tp=4, attn_dp=2, pp=3, dense_tp=1)
    for rank in range(mesh.world_size):
        own = mesh.at(rank).of_stage
        assert own == Topology(tp=4, attn_dp=2, dense_tp=1, rank=rank % 4)
        assert own.coordinates.attn_dp == mesh.at(rank).coordinates.attn_dp


def test_a_rank_is_named_with_its_stages() -> None:
    mesh = Topology(tp=2, attn_cp=2, pp=2, rank=3)
    assert rank_title(mesh) == "rank 3 (attention DP 0, CP 1, TP 0)"
    assert rank_title(mesh, range(1, 2)) == "rank 3 (stage 1, attention DP 0, CP 1, TP 0)"
    assert rank_title(mesh, range(2, 5)) == "rank 3 (stages 2 to 4, attention DP 0, CP 1, TP 0)"


def test_overlap_is_a_step_that_began_before_the_one_before_was_done() -> None:
    serial, overlapped = OverlapCount(), OverlapCount()
    for number in range(4):
        begin = 10.0 + number
        serial.note([(0, begin, begin + 0.4), (1, begin + 0.5, begin + 0.9)])
        overlapped.note([(0, begin, begin + 0.9), (1, begin + 1.0, begin + 1.8)])
    serial.note([])
    assert (serial.count, overlapped.count) == (0, 3)


def test_a_bubble_is_time_beside_steps_while_any_is_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use = StageUse()
    monkeypatch.setattr("layline.engine.step_times.perf_counter", lambda: 10.0)
    use.launched(alone=True)
    # The first stage begins at once; the second when the first is done.
    use.done([(0, 10.0, 11.0), (1, 11.0, 13.0)], [(1, 0.75)])
    use.launched(alone=False)
    use.done([(0, 11.5, 12.5), (1, 13.0, 15.0)], [(1, 0.75)])
    assert use.busy == {0: 2.0, 1: 4.0}
    assert use.bubble == {0: 0.5, 1: 1.0}
    assert use.slot_wait == {1: 0.75}
    # Nothing was under way for a while: that is no bubble.
    monkeypatch.setattr("layline.engine.step_times.perf_counter", lambda: 100.0)
    use.launched(alone=True)
    use.done([(0, 100.25, 101.0), (1, 101.0, 102.0)], [(1, 1.5)])
    assert use.bubble == {0: 0.75, 1: 2.0}
    assert use.slot_wait == {1: 1.5}


def test_passes_of_stages_add_up() -> None:
    passes = [PassTimes(1.0, 2.0, 0.0, [(0, 2.0)]), PassTimes(0.5, 3.0, 0.25, [(1, 3.0)])]
    assert joined_passes(passes) == PassTimes(1.5, 5.0, 0.25, [(0, 2.0), (1, 3.0)])
