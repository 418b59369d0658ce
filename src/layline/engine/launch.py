"""Where a model runs: in this process, in workers started here, or in torchrun's processes.

Whatever can be refused is refused before a worker starts or a weight is read.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from layline.boundary.layout import BatchVariant
from layline.config import (
    AUTO_SPLITS,
    LOOPBACK,
    EngineConfig,
    door_environment,
    threads_of_rank,
)
from layline.cores import CoreKeeper, allowed_cores, cores_of_rank
from layline.engine.executor import Executor
from layline.engine.facts import ServedModel, open_model
from layline.engine.remote import RemoteExecutor
from layline.engine.remote_stages import StagedRanks, stages_of
from layline.engine.speculation.draft_facts import with_draft
from layline.engine.step_times import StepTimes
from layline.engine.wire import Pipeline
from layline.errors import UsageError
from layline.pipeline.doors import SHARD, STREAMS, Doors, PipelineFlags
from layline.pipeline.fence import Fence
from layline.pipeline.placement import Inventory


def launch(engine: EngineConfig, times: StepTimes | None = None) -> tuple[ServedModel, Executor]:
    """Open a model and start what runs it.

    Where ``times`` are given, its passes are added to them.
    Under torchrun it returns on rank 0 only; on the others it is the rank until rank 0 is done,
    and then leaves with SystemExit. Raises UsageError or CheckpointError with a one-line message,
    RunError when a rank fails.
    """
    from layline.engine import elastic

    joined = elastic.joined_world()
    if joined is not None:
        joined.check(engine.topology())
        if not joined.leads:
            raise SystemExit(elastic.follow(joined))
    model, checkpoint = open_model(engine)
    try:
        doors = open_doors(engine)
        fence = doors.fence(model.facts.config.num_layers)
        if fence is not None:
            refuse_beside_stages(engine, len(fence) - 1, doors)
        model = replace(with_draft(engine, model), fence=fence, doors=doors)
        if fence is not None and engine.topology().is_single:
            from layline.engine.pipeline_load import load_pipeline

            return model, load_pipeline(engine, model.facts, checkpoint, fence, doors, times)
        if engine.topology().is_single:
            from layline.engine.local import LocalExecutor
            from layline.engine.model import load_alone

            return model, LocalExecutor(load_alone(engine, model.facts, checkpoint), times)
    finally:
        checkpoint.close()
    pipeline = None
    if fence is not None:
        placement = doors.placement(model.num_stages, Inventory(), engine.pp_processes)
        doors.freeze(placement)
        pipeline = Pipeline(list(fence), list(placement.processes), list(placement.devices))
    if joined is not None:
        executor = elastic.lead(engine, joined, times, pipeline)
    else:
        binds = pipeline is not None and engine.device == "cpu" and doors.bind
        executor = spawn(engine, times, pipeline, binds=binds)
    return model, executor if fence is None else StagedRanks(executor, doors)


def open_doors(engine: EngineConfig) -> Doors:
    """The pipeline's doors, with warnings to the log: where none is set up, that is stderr."""
    log = logging.getLogger("layline.pipeline")

    def balanced(num_stages: int) -> Fence:
        from layline.engine.pipeline_plan import plan_pipeline
        from layline.engine.planned import open_plan

        flags = {**asdict(engine), "pp_stages": num_stages, "pp_splits": AUTO_SPLITS}
        planned = open_plan(engine.model, flags, BatchVariant.ORDINARY.value)
        found = plan_pipeline(planned, EngineConfig(**flags), {}, log.warning)
        assert found is not None, "several stages were asked for"
        return found.fence

    return Doors(door_environment(), PipelineFlags.of(engine), log.warning, balanced)


def refuse_beside_stages(engine: EngineConfig, num_stages: int, doors: Doors) -> None:
    """Raise UsageError for what does not run over several pipeline stages yet."""
    if engine.speculative == "draft":
        raise UsageError(
            f"speculative draft does not run with {num_stages} pipeline stages in this version; "
            "expected ngram, or pp_stages 1"
        )
    if engine.topology().is_single:
        return
    for name, degree in (("pp_processes", engine.pp_processes), ("tp", engine.tp)):
        if degree > 1 and engine.device != "cpu":
            raise UsageError(
                f"{name} {degree} does not run with {num_stages} pipeline stages on device "
                f"{engine.device!r} in this version; expected {name} 1, pp_stages 1 or device cpu"
            )
        if degree > 1 and not doors.streams:
            raise UsageError(
                f"{name} {degree} does not go with {STREAMS}=0, which has one stream for all "
                f"{num_stages} stages; expected {STREAMS} unset, or {name} 1"
            )
        if degree > 1 and not doors.shard:
            raise UsageError(
                f"{name} {degree} does not go with {SHARD}=0: each process has the weights of its "
                f"own stages; expected {SHARD} unset, or {name} 1"
            )


def spawn(
    engine: EngineConfig,
    times: StepTimes | None = None,
    pipeline: Pipeline | None = None,
    *,
    binds: bool = False,
) -> RemoteExecutor:
    """Start a worker for every rank on this machine and load the model in them.

    ``binds`` has each keep to its share of the cores, if its threads take all of that.
    """
    from layline.engine.ranks import RankLink, rank_title
    from layline.engine.supervisor import Supervisor
    from layline.engine.wire import Start

    topology = engine.topology()
    ranks = topology.world_size
    require_devices(engine, ranks)
    threads = threads_of_rank(engine.threads, ranks)
    # Ranks find each other through a file without a name, which they inherit: no port, no address,
    # and nothing that stays if all are killed.
    meeting = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the ranks have it
    descriptor = meeting.fileno()

    def open_ranks() -> Iterator[RankLink]:
        with meeting:
            for rank in range(ranks):
                log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with its rank
                ours, process = start_rank(
                    worker_command(rank), worker_environment(threads), log.fileno(), [descriptor]
                )
                title = rank_title(topology.at(rank), stages_of(pipeline, topology.at(rank)))
                yield RankLink(rank, title, ours, process, log)

    # When a step's tokens are handed out the last stage is done with it, and the first one may
    # begin another: so they are handed out on the last one's cores.
    cores = [cores_of_rank(rank, ranks, threads) if binds else [] for rank in range(ranks)]
    keeper = CoreKeeper(cores[-1], allowed_cores()) if binds else None
    executor = RemoteExecutor(Supervisor(open_ranks, keeper=keeper), topology, times)
    executor.start(
        [
            Start(
                engine=asdict(engine),
                rank=rank,
                host=LOOPBACK,
                meeting=f"/proc/self/fd/{descriptor}",
                threads=threads,
                device=rank,
                local_ranks=ranks,
                pipeline=pipeline,
                cores=cores[rank],
            )
            for rank in range(ranks)
        ]
    )
    return executor


def require_devices(engine: EngineConfig, local_ranks: int) -> None:
    """Raise UsageError when this machine has fewer CUDA devices than ranks."""
    if engine.device == "cuda":
        from layline.engine.model import resolve_device

        resolve_device(engine.device, 0, local_ranks)


def worker_command(rank: int) -> list[str]:
    """The command of a rank's process, without the descriptor of its connection and our id."""
    # -P: the folder one happens to be in must not shadow a library.
    return [sys.executable, "-P", "-m", "layline.engine.worker", str(rank)]


def start_rank(
    command: list[str],
    environment: Mapping[str, str],
    log: int,
    inherited: Sequence[int] = (),
) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Start a rank's process; our end of its connection, and the process.

    It gets the descriptor of its end and our process id as further arguments, and keeps the
    ``inherited`` descriptors under their numbers. It is in a process
    group of its own, so that Ctrl-C reaches the driver alone, which then ends the ranks in order.
    """
    ours, theirs = socket.socketpair()
    try:
        process = subprocess.Popen(
            [*command, str(theirs.fileno()), str(os.getpid())],
            pass_fds=[theirs.fileno(), *inherited],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            process_group=0,
        )
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return ours, process


def worker_environment(threads: int) -> dict[str, str]:
    """Our environment, with this package to be found and a rank's threads."""
    environment = dict(os.environ)
    package = str(Path(__file__).parents[2])
    known = environment.get("PYTHONPATH", "")
    environment["PYTHONPATH"] = f"{known}{os.pathsep}{package}" if known else package
    environment["OMP_NUM_THREADS"] = str(threads)
    return environment
