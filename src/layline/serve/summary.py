"""What a server says of itself when it starts: the plan, the memory, what is unsafe. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from layline.config import EngineConfig, threads_of_rank
from layline.engine.pipeline_plan import PipelinePlan
from layline.engine.planned import ModelPlan
from layline.pipeline.fence import boundaries
from layline.serve.page.description import layers_text, mesh_text
from layline.serve.settings import ServeSettings

if TYPE_CHECKING:
    from layline.engine.llm import LLM

MIB = 1 << 20


def plan_lines(
    planned: ModelPlan, engine: EngineConfig, staged: PipelinePlan | None = None
) -> Iterator[tuple[str, str]]:
    """(level, line) of the model, its mesh, its pipeline and its memory, before it is loaded."""
    facts = planned.facts
    quantised = ", quantised matrices kept for decode" if facts.packed else ""
    yield (
        "INFO",
        f"plan: {facts.config.architecture}, {facts.config.num_layers} layers, "
        f"{facts.dtype}{quantised} ({planned.weights_format}), context "
        f"{facts.max_model_len} tokens",
    )
    collectives = sum(1 for _ in planned.collectives())
    policy = f"policy {facts.spec.policy.value} ({facts.policy_reason})"
    yield (
        "INFO",
        f"plan: {mesh_text(facts.spec.topology)}, {policy}, {collectives} collectives a step; "
        f"{pipeline_text((0, facts.config.num_layers) if staged is None else staged.fence)}",
    )
    if staged is None:
        yield memory_line(planned, engine)
        return
    for stage in range(len(staged.memory.stages)):
        yield stage_line(staged, stage)
    yield pipeline_memory_line(staged, engine)


def pipeline_text(fence: Sequence[int]) -> str:
    """``pipeline of 2 stages, layers 0 to 1, layer 2``."""
    layers = [layers_text(range(first, end)) for first, end in pairwise(fence)]
    return f"pipeline of {len(layers)} stage{'s' if len(layers) > 1 else ''}, {', '.join(layers)}"


def stage_line(staged: PipelinePlan, stage: int) -> tuple[str, str]:
    """(level, line) of what a pipeline stage will hold on its device."""
    share, held = staged.shares[stage], staged.memory.stages[stage]
    device = f"{staged.model.room.device}:{staged.placement.devices[stage]}"
    text = (
        f"memory of stage {stage} on {device}, {layers_text(share.layers)}: weights "
        f"{mib(held.weights)}, keys and values {mib(held.kv)}, slots {mib(held.slots)}; "
        f"{mib(held.total)} in all"
    )
    if held.device_bytes is None:
        return "INFO", f"{text}; its device's memory is looked at when it loads"
    verdict = "fits in" if held.fits else "does not fit in"
    return (
        "INFO" if held.fits else "WARNING",
        f"{text}: {verdict} the {mib(held.device_bytes)} of its device",
    )


def pipeline_memory_line(staged: PipelinePlan, engine: EngineConfig) -> tuple[str, str]:
    """(level, line) of all stages together, and of the cache that they share out."""
    facts, memory = staged.model.facts, staged.memory
    total = memory.weights + memory.kv + memory.slots
    kept = ", less where they stay quantised" if facts.packed else ""
    text = (
        f"memory of {len(memory.stages)} stages: weights {mib(memory.weights)} as "
        f"{facts.dtype}{kept}, keys and values {mib(memory.kv)} as {facts.kv_dtype} "
        f"({memory.cached_tokens:,} tokens, at most {engine.max_running} requests of "
        f"{facts.max_model_len:,}), slots between pipeline stages {mib(memory.slots)} for steps of "
        f"{staged.slot_tokens:,} tokens; {mib(total)} in all"
    )
    if memory.holds_longest is False:
        longest = f"one request of {facts.max_model_len:,} tokens has no room"
        return "WARNING", f"{text}: does not fit, {longest}"
    return "INFO", text


def memory_line(planned: ModelPlan, engine: EngineConfig) -> tuple[str, str]:
    """(level, line) of what a rank will hold, and whether its share of the device has room."""
    facts, needed, room = planned.facts, planned.footprint, planned.room
    cache = room.cache(needed.kv_per_token, facts.max_model_len, needed.weights)
    ranks = facts.spec.topology.world_size
    tokens = cache.num_bytes // needed.kv_per_token
    kept = ", less where they stay quantised" if facts.packed else ""
    text = (
        f"memory of each of {ranks} rank{'s' if ranks > 1 else ''}: weights {mib(needed.weights)} "
        f"as {facts.dtype}{kept}, keys and values {mib(cache.num_bytes)} "
        f"({needed.kv_per_token / 1024:,.1f} KiB a token as {facts.kv_dtype}, {tokens:,} tokens, "
        f"at most {engine.max_running} requests of {facts.max_model_len:,}), slots between "
        f"pipeline stages {mib(0)}; {mib(needed.weights + cache.num_bytes)} in all"
    )
    if cache.holds_longest is False:
        longest = f"one request of {facts.max_model_len:,} tokens has no room"
        return "WARNING", f"{text}: does not fit, {longest}"
    if room.device_bytes is None:
        return "INFO", f"{text}; the {room.device} device's memory is looked at when it loads"
    fits = needed.weights + cache.num_bytes <= room.device_bytes
    verdict = "fits in" if fits else "does not fit in"
    share = f"{mib(room.device_bytes)} of {room.device} memory that a rank has"
    return ("INFO" if fits else "WARNING"), f"{text}: {verdict} the {share}"


def usable_kv_bytes(llm: LLM) -> int:
    """Bytes of all cache blocks that requests can have: each attention DP rank keeps one back."""
    blocks = llm.engine.stats().blocks
    allocated = blocks + llm.engine_config.attn_dp
    return llm.memory_report()["kv_cache"] * blocks // allocated


def mib(num_bytes: int) -> str:
    """``1,234 MiB``, with a decimal where it is small."""
    size = num_bytes / MIB
    return f"{size:,.1f} MiB" if 0 < size < 10 else f"{size:,.0f} MiB"


def effective(
    planned: ModelPlan,
    engine: EngineConfig,
    settings: ServeSettings,
    staged: PipelinePlan | None = None,
) -> dict[str, Any]:
    """Every setting with the value it has, where flags left that to the model or the machine."""
    facts = planned.facts
    topology = facts.spec.topology
    resolved = {
        "dtype": facts.dtype,
        "kv_dtype": facts.kv_dtype,
        "threads": threads_of_rank(engine.threads, topology.world_size) * topology.world_size,
        "dense_tp": topology.dense_tp,
        "boundary_reduction": facts.spec.policy.value,
        "max_model_len": facts.max_model_len,
        "pp_stages": 1,
    }
    if staged is not None:
        resolved["pp_stages"] = staged.placement.num_stages
        resolved["pp_splits"] = boundaries(staged.fence)
        resolved["pp_devices"] = staged.placement.devices
    return {**settings.shown(), **asdict(engine), **resolved}


def safety_lines(settings: ServeSettings) -> Iterator[str]:
    """What an operator should know of how open the server is."""
    if not settings.is_local and not settings.api_keys:
        yield (
            f"{settings.host} can be reached from other machines and no API key is set: anyone "
            "there can use this server; set --api-key-file"
        )
    if "*" in settings.cors_origins:
        yield "--cors-origin '*' lets every web site ask this server"
    if "*" in settings.allowed_hosts:
        yield "--allowed-host '*' lets web sites reach this server under names of their own"
