"""Groups over NCCL between two GPUs: the simulated ranks' values."""

from __future__ import annotations

import pytest
import torch

from layline.comm.groups import Groups
from layline.comm.recording import Recorder, Timing, record_groups
from layline.comm.simulated import run_ranks
from layline.errors import CollectiveError
from layline.topology import GroupName, Topology
from support.ranks import Settings, run_processes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices"),
]

TWO = Topology(tp=2)
TP = GroupName.TP


def every_collective(topology: Topology, groups: Groups, device: str) -> dict[str, torch.Tensor]:
    """One rank's results of each collective, on the CPU, by a readable name."""
    group, results = groups[TP], {}

    def normal(rows: int, dtype: torch.dtype) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1 + topology.rank)
        x = torch.randn(rows, 6, generator=generator).to(dtype)
        return x.to(device, copy=True) if device == "cpu" else x.cuda()

    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        results[f"{dtype} all-reduce"] = group.all_reduce(normal(4, dtype))
        results[f"{dtype} all-gather"] = group.all_gather(normal(4, dtype))
        results[f"{dtype} reduce-scatter"] = group.reduce_scatter(normal(4, dtype))
        for counts in ([2, 2], [1, 4], [0, 3], [3, 0], [0, 0]):
            x = normal(sum(counts), dtype)
            results[f"{dtype} {counts}"] = group.reduce_scatter_v(x, counts)
        strided = normal(6, dtype).t()
        results[f"{dtype} strided gather"] = group.all_gather(strided)
        results[f"{dtype} strided scatter"] = group.reduce_scatter(strided)
        results[f"{dtype} empty"] = group.all_gather(normal(0, dtype))
    for dtype in (torch.int64, torch.int16, torch.uint8, torch.bool, torch.float8_e4m3fn):
        x = normal(3, torch.float32).abs().mul(4).to(dtype)
        results[f"{dtype} all-gather"] = group.all_gather(x)
    return {label: result.cpu() for label, result in results.items()}


@pytest.mark.parametrize("verified", [False, True])
def test_nccl_gives_the_simulated_ranks_values(verified: bool) -> None:
    settings = Settings(backend="nccl", verified=verified)
    real = run_processes(TWO, every_collective, "cuda", settings=settings)
    simulated = run_ranks(TWO, lambda here, groups: every_collective(here, groups, "cpu"))
    for rank in range(2):
        assert list(real[rank]) == list(simulated[rank])
        for label, value in simulated[rank].items():
            assert real[rank][label].dtype == value.dtype, label
            # A sum of two has one order.
            assert torch.equal(real[rank][label].float(), value.float()), (rank, label)


def refusals(topology: Topology, groups: Groups) -> list[str]:
    texts = []
    with pytest.raises(CollectiveError) as caught:
        groups[TP].all_reduce(torch.ones(2, 2))
    texts.append(str(caught.value))
    with pytest.raises(CollectiveError) as caught:
        groups[TP].all_reduce(torch.ones(2 + topology.rank, 2, device="cuda"))
    texts.append(str(caught.value))
    return texts


def test_refusals_on_a_gpu() -> None:
    texts = run_processes(TWO, refusals, settings=Settings(backend="nccl", verified=True))
    for rank, (device, rows) in enumerate(texts):
        assert device == f"all-reduce on TP: a tensor on cpu; expected cuda:{rank}"
        assert "rank 0 brings #0 TP all-reduce of [2, 2] float32" in rows
        assert "rank 1 brings #0 TP all-reduce of [3, 2] float32" in rows


def timed(topology: Topology, groups: Groups) -> list[float | None]:
    recorder = Recorder(Timing.SYNCHRONISED)
    boundary, _ = record_groups(groups, recorder)
    for _ in range(3):
        boundary[TP].all_reduce(torch.ones(4096, 4096, device="cuda"))
    return [record.seconds for record in recorder.records]


def test_synchronised_timing_waits_for_the_device() -> None:
    # 64 MiB take longer than 10 microseconds over any link; the launch alone may not.
    for seconds in run_processes(TWO, timed, settings=Settings(backend="nccl")):
        assert all(second is not None and second > 1e-5 for second in seconds)
