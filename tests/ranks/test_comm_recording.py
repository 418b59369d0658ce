"""What ran, as the recorder has it: equal on all ranks, and only what sent something."""

from __future__ import annotations

import time

import pytest
import torch

from layline.boundary.mesh import MeshSpec, make_mesh
from layline.comm.groups import CollectiveKind, CollectiveRecord, Groups
from layline.comm.recording import Recorder, RecordingGroup, Timing, record_groups
from layline.comm.simulated import run_ranks
from layline.errors import CollectiveError
from layline.topology import GroupName, Topology
from support.ranks import run_processes

TP, ATTN_TP = GroupName.TP, GroupName.ATTN_TP
MESH = Topology(tp=4, attn_dp=2)

EXPECTED = [
    CollectiveRecord(CollectiveKind.ALL_REDUCE, ATTN_TP, 4, 6, 96, True),
    CollectiveRecord(CollectiveKind.ALL_GATHER, TP, 16, 6, 192, False),
    CollectiveRecord(CollectiveKind.REDUCE_SCATTER, TP, 8, 6, 192, False),
    CollectiveRecord(CollectiveKind.REDUCE_SCATTER_V, TP, 5, 6, 120, False),
    CollectiveRecord(CollectiveKind.ALL_REDUCE, ATTN_TP, 4, 6, 96, False),
]


def recorded_step(topology: Topology, groups: Groups) -> list[CollectiveRecord]:
    """A few collectives of a boundary and one of compute, through a mesh's groups."""
    recorder = Recorder()
    mesh = make_mesh(MeshSpec(topology=topology), *record_groups(groups, recorder))
    boundary, compute = mesh.groups, mesh.compute_groups
    compute[ATTN_TP].all_reduce(torch.ones(4, 6))
    boundary[TP].all_gather(torch.ones(4, 6, dtype=torch.bfloat16))
    boundary[TP].reduce_scatter(torch.ones(8, 6))
    boundary[TP].reduce_scatter_v(torch.ones(5, 6), [0, 5, 0, 0])
    boundary[ATTN_TP].all_reduce(torch.ones(4, 6))
    for group in (boundary[TP], compute[TP]):
        group.all_gather(torch.ones(0, 6))
        group.all_reduce(torch.ones(0, 6))
        group.reduce_scatter(torch.ones(0, 6))
        group.reduce_scatter_v(torch.ones(0, 6), [0] * 4)
    assert mesh.tally.reductions == 4
    return recorder.records


def test_every_rank_records_the_same_sequence_without_the_empty() -> None:
    # boundary G21
    assert run_ranks(MESH, recorded_step) == [EXPECTED] * 4
    assert run_processes(MESH, recorded_step) == [EXPECTED] * 4


class SlowGroup:
    """A group of one whose gather takes a while."""

    name, ranks, rank, size = TP, (0,), 0, 1

    def all_gather(self, x: torch.Tensor, /) -> torch.Tensor:
        time.sleep(0.02)
        return x


@pytest.mark.parametrize("timing", Timing)
def test_seconds_are_there_when_asked_for(timing: Timing) -> None:
    recorder = Recorder(timing)
    group = RecordingGroup(SlowGroup(), recorder, in_compute=False)  # type: ignore[arg-type]
    group.all_gather(torch.ones(1, 2))
    group.all_gather(torch.ones(1, 2))
    seconds = [record.seconds for record in recorder.records]
    if timing is Timing.OFF:
        assert seconds == [None, None]
    else:
        assert min(second for second in seconds if second is not None) >= 0.02


def test_a_refused_collective_is_not_recorded() -> None:
    def run(here: Topology, groups: Groups) -> int:
        recorder = Recorder()
        group = RecordingGroup(groups[TP], recorder, in_compute=False)
        assert (group.name, group.ranks, group.rank, group.size) == (TP, (0, 1), here.rank, 2)
        for refused in (torch.ones(3, 2), torch.ones(3)):
            with pytest.raises(CollectiveError):
                group.reduce_scatter(refused)
        return len(recorder.records)

    assert run_ranks(Topology(tp=2), run) == [0, 0]
