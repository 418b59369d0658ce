"""A model's plan as plain data that JSON can hold."""

from __future__ import annotations

from typing import Any

from layline.boundary.planning.cost import Bytes, Extent, per_token
from layline.boundary.planning.moves import batch_kinds
from layline.boundary.planning.show import Line, Step
from layline.comm.groups import CollectiveKind
from layline.engine.planned import ModelPlan, example_steps, totals

GATHERED = CollectiveKind.ALL_GATHER
"""What a quantised sum is in prefill."""
PER_ROW = {
    Extent.SAMPLED: "scored row",
    Extent.SCORES: "scored row",
    Extent.FED: "fed row",
}
"""What bytes are for, where not for each token."""


def as_data(plan: ModelPlan) -> dict[str, Any]:
    """Everything ``layline plan`` shows of a plan."""
    facts, spec = plan.facts, plan.spec
    topology = spec.topology
    return {
        "architecture": facts.config.architecture,
        "layers": facts.config.num_layers,
        "dtype": facts.dtype,
        "mesh": {
            "tp": topology.tp,
            "attn_dp": topology.attn_dp,
            "attn_cp": topology.attn_cp,
            "attn_tp": topology.attn_tp,
            "dense_tp": topology.dense_tp,
        },
        "policy": {"name": spec.policy.value, "reason": facts.policy_reason},
        "variant": plan.kind.variant.value,
        "padding": None if plan.kind.padding is None else plan.kind.padding.value,
        "bound": [
            {
                "variant": kind.variant.value,
                "padding": None if kind.padding is None else kind.padding.value,
            }
            for kind in batch_kinds(spec)
        ],
        "value_bytes": {
            "outputs_and_residual": plan.sizes.summed,
            "weights_and_norms": plan.sizes.run,
            "scores": plan.sizes.scores,
            "scores_assumed": plan.assumed,
        },
        "lines": [line_data(plan, line, times) for line, times in plan.distinct.items()],
        "steps": [
            {
                "tokens_per_attn_dp_rank": tokens,
                "scored_rows_per_attn_dp_rank": 1,
                "collectives": [
                    {
                        "group": total.group.name,
                        "in_compute": total.in_compute,
                        "count": total.count,
                        **bytes_data(total.bytes),
                    }
                    for total in totals(plan, step, prefill=plan.prefills(tokens))
                ],
            }
            for tokens, step in example_steps(plan).items()
        ],
        "draft_model": draft_data(plan),
        "memory_per_rank": memory_data(plan),
    }


def draft_data(plan: ModelPlan) -> dict[str, Any] | None:
    """The draft model that runs beside the planned one, if any; its boundaries have their plan."""
    if plan.draft is None:
        return None
    return {
        "architecture": plan.draft.config.architecture,
        "layers": plan.draft.config.num_layers,
        "policy": {"name": plan.draft.spec.policy.value, "reason": plan.draft.policy_reason},
    }


def memory_data(plan: ModelPlan) -> dict[str, Any]:
    """What one rank holds, and whether its share of the device has room for it.

    ``fits`` is None where the device's memory is unknown.
    """
    needed, room, longest = plan.footprint, plan.room, plan.facts.max_model_len
    cache = room.cache(needed.kv_per_token, longest, needed.weights)
    total = needed.weights + cache.num_bytes
    fits = None if room.device_bytes is None else total <= room.device_bytes
    if cache.holds_longest is False:
        fits = False
    return {
        "weights_bytes": needed.weights,
        "kv_bytes_per_token": needed.kv_per_token,
        "cache_bytes": cache.num_bytes,
        "cache_holds_longest": cache.holds_longest,
        "max_model_len": longest,
        "slots_bytes": None,
        "total_bytes": total,
        "device": room.device,
        "device_bytes": room.device_bytes,
        "fits": fits,
        "packed": plan.facts.packed,
    }


def line_data(plan: ModelPlan, line: Line, times: int) -> dict[str, Any]:
    """One line; ``bytes`` is for each token and rank."""
    total = Bytes()
    for one in line.collectives:
        if one.extent not in PER_ROW:
            total += per_token(one, plan.ground, plan.sizes)
    return {
        "name": line.name,
        "times": times,
        "kind": "compute" if line.compute else "boundary",
        "rows": list(line.rows),
        "owed": line.owed,
        "compute": [step_data(plan, step) for step in line.compute],
        "exit": [step_data(plan, step) for step in line.exit],
        "prepare": [step_data(plan, step) for step in line.prepare],
        "residual": None if line.residual is None else list(line.residual),
        "per_token": bytes_data(total),
        "reason": line.reason,
    }


def step_data(plan: ModelPlan, step: Step) -> dict[str, Any]:
    """One operation; a collective has bytes for each token, or for each scored or fed row.

    A quantised sum has those of its gather ``in_prefill`` beside those of a decoding step.
    """
    one = step.collective
    if one is None:
        return {"operation": step.text}
    data: dict[str, Any] = {
        "operation": step.text,
        "collective": one.kind.value,
        "group": one.group.name,
        "ranks": plan.spec.topology.size(one.group),
        "columns": one.columns,
        "per": PER_ROW.get(one.extent, "token"),
        **bytes_data(per_token(one, plan.ground, plan.sizes)),
    }
    if one.quantised:
        prefill = per_token(one, plan.ground, plan.sizes, prefill=True)
        data["in_prefill"] = {"collective": GATHERED.value, **bytes_data(prefill)}
    return data


def bytes_data(num_bytes: Bytes) -> dict[str, float]:
    """Payload and wire bytes."""
    return {"payload_bytes": num_bytes.payload, "wire_bytes": num_bytes.wire}
