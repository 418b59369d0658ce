"""Bring one rank into its mesh and load what it runs of the model."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from typing import Any

import torch

from layline.boundary.mesh import Mesh, MeshSpec, make_mesh
from layline.comm.groups import Groups
from layline.comm.recording import Recorder, Timing, record_groups
from layline.config import EngineConfig
from layline.cores import CoreKeeper, allowed_cores
from layline.engine.facts import ModelFacts, resolve
from layline.engine.meeting import VERIFIED_CALLS, StageGroups, join_groups, join_stages
from layline.engine.model import load_draft, load_part, resolve_device
from layline.engine.pipeline_load import StagePlan, load_stages
from layline.engine.rank import Rank, RankModel
from layline.engine.rank_stages import StagedModel
from layline.engine.rank_whole import WholeModel
from layline.engine.wire import Pipeline, Start
from layline.pipeline.doors import Doors, PipelineFlags
from layline.pipeline.placement import Placement
from layline.topology import Topology
from layline.weights.checkpoint import Checkpoint
from layline.weights.opening import open_checkpoint

LOG = logging.getLogger("layline.engine")


def load_rank(start: Start, store: Any = None) -> Rank:
    """Join the mesh and load this rank's weights. Every rank must call it."""
    engine = EngineConfig(**start.engine)
    keeper = CoreKeeper(start.cores, allowed_cores())
    keeper.keep(True)  # And so do threads that are born from here on.
    torch.set_num_threads(start.threads)
    recorder = Recorder(Timing.SYNCHRONISED) if engine.record_collectives else None
    checkpoint = open_checkpoint(engine.model, seed=engine.seed)
    try:
        facts = resolve(engine, checkpoint).on_rank(start.rank)
        model: RankModel
        if start.pipeline is None:
            model = _load_whole(start, facts, checkpoint, store, recorder)
        else:
            plan = _stage_plan(start, start.pipeline, facts)
            ends = _join_stages(start, plan, facts.spec.topology, store, recorder)
            model = _load_stages(plan, ends, checkpoint, recorder, keeper)
    finally:
        checkpoint.close()
    return Rank(engine, model, recorder)


def _load_whole(
    start: Start, facts: ModelFacts, checkpoint: Checkpoint, store: Any, recorder: Recorder | None
) -> WholeModel:
    engine = EngineConfig(**start.engine)
    device = resolve_device(engine.device, start.device, start.local_ranks)
    groups = join_groups(
        facts.spec.topology,
        device,
        host=start.host,
        meeting=start.meeting,
        store=store,
        verified_calls=_verified_calls(recorder),
    )
    loaded = load_part(facts, checkpoint, _mesh(facts.spec, groups, recorder), device)
    load_draft(engine, loaded, groups, device)
    return WholeModel(engine, loaded, start.local_ranks)


def _join_stages(
    start: Start, plan: StagePlan, topology: Topology, store: Any, recorder: Recorder | None
) -> StageGroups:
    return join_stages(
        topology,
        plan.most_stages,
        plan.device(plan.stages.start),
        host=start.host,
        meeting=start.meeting,
        store=store,
        verified_calls=_verified_calls(recorder),
    )


def _load_stages(
    plan: StagePlan,
    ends: StageGroups,
    checkpoint: Checkpoint,
    recorder: Recorder | None,
    keeper: CoreKeeper,
) -> StagedModel:
    of_stages = ends.of_stages[: len(plan.stages)]
    meshes = [_mesh(plan.facts.spec, groups, recorder) for groups in of_stages]
    doors = Doors(os.environ, PipelineFlags(), LOG.warning)
    stages = load_stages(plan, checkpoint, meshes)
    return StagedModel(plan, stages, ends, keeper=keeper, shares=doors.shared_memory)


def _stage_plan(start: Start, pipeline: Pipeline, facts: ModelFacts) -> StagePlan:
    """The rank's run of stages; to each of them the mesh is that of one stage."""
    topology = facts.spec.topology
    return StagePlan(
        EngineConfig(**start.engine),
        replace(facts, spec=replace(facts.spec, topology=topology.of_stage)),
        tuple(pipeline.fence),
        Placement(tuple(pipeline.devices), tuple(pipeline.processes)),
        process=topology.coordinates.pp,
        num_threads=start.threads,
        local_ranks=start.local_ranks,
    )


def _mesh(spec: MeshSpec, groups: Groups, recorder: Recorder | None) -> Mesh:
    if recorder is None:
        return make_mesh(spec, groups)
    return make_mesh(spec, *record_groups(groups, recorder))


def _verified_calls(recorder: Recorder | None) -> int | None:
    return VERIFIED_CALLS if recorder is None else None
