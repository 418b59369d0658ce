"""What the status page says and draws of a served model, from its plan alone. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from layline.boundary.planning.show import LEGEND, Line
from layline.config import EngineConfig
from layline.engine.pipeline_plan import PipelinePlan
from layline.engine.planned import ModelPlan
from layline.models.footprint import footprint
from layline.pipeline.fence import even_fence, stage_of
from layline.topology import GroupName, Topology

ATTENTION_GROUPS = (GroupName.TP, GroupName.ATTN_DP, GroupName.ATTN_CP, GroupName.ATTN_TP)


def describe(
    planned: ModelPlan, engine: EngineConfig, staged: PipelinePlan | None = None
) -> dict[str, Any]:
    """Plain data that JSON can hold: the model, the mesh, the pipeline, a layer, the memory.

    ``staged`` is its plan over pipeline stages; without it there is one stage.
    """
    topology = planned.spec.topology
    return {
        "facts": {**model_facts(planned, engine), **pipeline_facts(staged)},
        "mesh": {
            "ranks": [rank_data(topology.at(rank)) for rank in range(topology.world_size)],
            "groups": groups(topology),
        },
        "pipeline": stages(planned, staged),
        "lines": [line_data(line, times) for line, times in planned.distinct.items()],
        "legend": LEGEND,
        "memory": memory(planned) if staged is None else pipeline_memory(staged),
    }


def model_facts(planned: ModelPlan, engine: EngineConfig) -> dict[str, str]:
    """Names and values as a person reads them."""
    facts = planned.facts
    config, topology = facts.config, planned.spec.topology
    parameters = footprint(config, Topology(), 1, 1).weights
    kept = ", kept quantised" if facts.packed else ""
    heads = f"{config.num_heads} heads, {config.num_kv_heads} for keys and values"
    return {
        "architecture": config.architecture,
        "parameters": f"{parameters / 1e6:,.{0 if parameters > 1e7 else 2}f} million",
        "layers": f"{config.num_layers} of {config.hidden_size} hidden",
        "attention": f"{heads}, of {config.head_dim}",
        "feed-forward": f"{config.intermediate_size:,} wide",
        "vocabulary": f"{config.vocab_size:,} tokens",
        "context": f"{facts.max_model_len:,} tokens",
        "weights": f"{planned.weights_format}{kept}",
        "computed in": facts.dtype,
        "keys and values": facts.kv_dtype,
        "device": engine.device,
        "mesh": mesh_text(topology),
        "sums of outputs": f"{planned.spec.policy.value} ({facts.policy_reason})",
        "running together": f"at most {engine.max_running * engine.attn_dp}",
        "prefix cache": "shared" if engine.prefix_cache and facts.shares_prefixes else "off",
    }


def pipeline_facts(staged: PipelinePlan | None) -> dict[str, str]:
    """What there is to say of several pipeline stages, as a person reads it."""
    if staged is None:
        return {}
    num_stages = staged.placement.num_stages
    layers = ", ".join(layers_text(range(first, end)) for first, end in pairwise(staged.fence))
    slots = staged.memory.slots / (1 << 20)
    return {
        "pipeline": f"{num_stages} stages, {layers}",
        "slots between stages": f"{slots:,.1f} MiB, for steps of {staged.slot_tokens:,} tokens",
    }


def layers_text(layers: range) -> str:
    """``layers 4 to 7``, or ``layer 4`` where it is one."""
    first, last = layers[0], layers[-1]
    return f"layer {first}" if first == last else f"layers {first} to {last}"


def mesh_text(topology: Topology) -> str:
    """``tp 4 = attention DP 2 x TP 2``."""
    factors = [
        f"{name} {degree}"
        for name, degree in (
            ("attention DP", topology.attn_dp),
            ("CP", topology.attn_cp),
            ("TP", topology.attn_tp),
        )
        if degree > 1
    ]
    divided = f" = {' x '.join(factors)}" if topology.attn_tp < topology.tp else ""
    return f"tp {topology.tp}{divided}"


def rank_data(topology: Topology) -> dict[str, int]:
    """A rank and its coordinates."""
    here = topology.coordinates
    return {
        "rank": topology.rank,
        "stage": here.pp,
        "attn_dp": here.attn_dp,
        "attn_cp": here.attn_cp,
        "attn_tp": here.attn_tp,
    }


def groups(topology: Topology) -> list[dict[str, Any]]:
    """Every kind of group with more than one rank, and the ranks of each of its groups."""
    names = list(ATTENTION_GROUPS)
    if topology.ep > 1:
        names += [GroupName.MOE_EP, GroupName.MOE_TP]
    if topology.pp > 1:
        names.append(GroupName.PP)
    found = []
    for name in names:
        if topology.size(name) > 1:
            every = {topology.at(rank).group(name) for rank in range(topology.world_size)}
            found.append({"name": name.value, "groups": sorted(every)})
    return found


def pipeline(topology: Topology, fence: Sequence[int]) -> list[dict[str, Any]]:
    """The pipeline stages in order: layers ``first`` up to ``end``, and the ranks that run them.

    A rank runs neighbouring stages where there are more stages than pipeline ranks.
    """
    runs = even_fence(len(fence) - 1, topology.pp)
    found = []
    for stage, (first, end) in enumerate(pairwise(fence)):
        begin = stage_of(runs, stage) * topology.tp
        found.append({"first": first, "end": end, "ranks": list(range(begin, begin + topology.tp))})
    return found


def stages(planned: ModelPlan, staged: PipelinePlan | None) -> list[dict[str, Any]]:
    """The pipeline stages; of several also each one's device, and the bytes it holds."""
    topology = planned.spec.topology
    if staged is None:
        return pipeline(topology, (0, planned.facts.config.num_layers))
    found = pipeline(topology, staged.fence)
    devices = staged.placement.devices
    for stage, device, held in zip(found, devices, staged.memory.stages, strict=True):
        stage["device"] = f"{planned.room.device}:{device}"
        stage["weights_bytes"] = held.weights
        stage["cache_bytes"] = held.kv
        stage["slots_bytes"] = held.slots
    return found


def line_data(line: Line, times: int) -> dict[str, Any]:
    """A boundary or a compute's own collectives, with how often a step has it."""
    return {
        "name": line.name,
        "times": times,
        "is_boundary": not line.compute,
        "rows": list(line.rows),
        "owed": line.owed,
        "early": [step.text for step in (*line.compute, *line.exit)],
        "late": [step.text for step in line.prepare],
        "collectives": len(line.collectives),
        "reason": line.reason,
    }


def memory(planned: ModelPlan) -> dict[str, Any]:
    """Bytes of one rank as planned. ``device_bytes`` is its share, None where that is unknown."""
    needed, room = planned.footprint, planned.room
    cache = room.cache(needed.kv_per_token, planned.facts.max_model_len, needed.weights)
    return {
        "weights_bytes": needed.weights,
        "cache_bytes": cache.num_bytes,
        "device_bytes": room.device_bytes,
    }


def pipeline_memory(staged: PipelinePlan) -> dict[str, Any]:
    """The same of all stages; ``device_bytes`` is what their devices have."""
    held = staged.memory
    homes = zip(staged.placement.homes(), held.stages, strict=True)
    devices = {home: stage.device_bytes for home, stage in homes}
    known = [size for size in devices.values() if size is not None]
    return {
        "weights_bytes": held.weights,
        "cache_bytes": held.kv,
        "slots_bytes": held.slots,
        "device_bytes": sum(known) if len(known) == len(devices) else None,
    }
