"""What a server says of itself when it starts: the plan, the memory, what is unsafe. No torch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from ipaddress import ip_address
from typing import Any

from layline.config import EngineConfig
from layline.engine.facts import ModelFacts
from layline.engine.planned import ModelPlan
from layline.serve.settings import ServeSettings

MIB = 1 << 20


def about(facts: ModelFacts, engine: EngineConfig) -> dict[str, Any]:
    """What the status page says of the model and its mesh."""
    return {
        "architecture": facts.config.architecture,
        "layers": facts.config.num_layers,
        "weights": facts.dtype + (", quantised" if facts.packed else ""),
        "device": engine.device,
        "mesh": mesh_text(facts),
        "running together": f"at most {engine.max_running * engine.attn_dp}",
    }


def mesh_text(facts: ModelFacts) -> str:
    """``tp 4 = attention DP 2 x TP 2, policy ar``."""
    topology = facts.spec.topology
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
    return f"tp {topology.tp}{divided}, policy {facts.spec.policy.value}"


def plan_lines(planned: ModelPlan, keywords: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(level, line) of the model, its mesh and its memory, from the configuration alone."""
    facts = planned.facts
    quantised = ", quantised matrices kept for decode" if facts.packed else ""
    yield (
        "INFO",
        f"plan: {facts.config.architecture}, {facts.config.num_layers} layers, "
        f"{facts.dtype}{quantised}, context {facts.max_model_len} tokens",
    )
    collectives = sum(1 for _ in planned.collectives())
    yield (
        "INFO",
        f"plan: {mesh_text(facts)} ({facts.policy_reason}), {collectives} collectives a step",
    )
    yield memory_line(planned, EngineConfig(**keywords))


def memory_line(planned: ModelPlan, engine: EngineConfig) -> tuple[str, str]:
    """(level, line) of what a rank will hold and whether all of them fit this machine."""
    facts, found = planned.facts, planned.footprint
    most = found.kv_per_token * facts.max_model_len * engine.max_running
    ranks = facts.spec.topology.tp
    text = (
        f"memory of each of {ranks} rank{'s' if ranks > 1 else ''}: weights "
        f"{found.weights / MIB:,.0f} MiB as {facts.dtype}, keys and values "
        f"{found.kv_per_token / 1024:,.1f} KiB a token as {facts.kv_dtype}: "
        f"{most / MIB:,.0f} MiB for {engine.max_running} requests of {facts.max_model_len} tokens"
    )
    if engine.kv_memory is not None:
        most = min(most, engine.kv_memory)
        text += f", limited to {engine.kv_memory / MIB:,.0f} MiB"
    if engine.device != "cpu":
        return "INFO", f"{text}; the device's memory is looked at when it loads"
    total = physical_memory()
    half = total // 2 // ranks
    if engine.kv_memory is None and most > half:
        most = half
        text += f", limited to {half / MIB:,.0f} MiB"
    needed = (found.weights + most) * ranks
    fits = needed <= total
    verdict = "fits in" if fits else "does not fit in"
    level = "INFO" if fits else "WARNING"
    return level, f"{text}; {needed / MIB:,.0f} MiB in all {verdict} {total / MIB:,.0f} MiB"


def physical_memory() -> int:
    """Bytes of memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def safety_lines(settings: ServeSettings) -> Iterator[str]:
    """What an operator should know of how open the server is."""
    if not is_loopback(settings.host) and not settings.api_keys:
        yield (
            f"{settings.host} can be reached from other machines and no API key is set: anyone "
            "there can use this server; set --api-key-file"
        )
    if "*" in settings.cors_origins:
        yield "--cors-origin '*' lets every web site ask this server"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
