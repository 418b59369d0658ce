"""A model's plan as plain data that JSON can hold."""

from __future__ import annotations

from typing import Any

from layline.boundary.planning.cost import Bytes, Extent, per_token
from layline.boundary.planning.moves import batch_kinds
from layline.boundary.planning.show import Line, Step
from layline.engine.planned import ModelPlan, example_steps, totals


def as_data(plan: ModelPlan) -> dict[str, Any]:
    """Everything ``layline plan`` shows of a plan."""
    facts, spec = plan.facts, plan.spec
    topology, memory = spec.topology, plan.footprint
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
                    for total in totals(plan, step)
                ],
            }
            for tokens, step in example_steps(plan).items()
        ],
        "memory_per_rank": {
            "weights_bytes": memory.weights,
            "kv_bytes_per_token": memory.kv_per_token,
            "slots_bytes": None,
            "decode_copies_counted": not facts.packed,
        },
    }


def line_data(plan: ModelPlan, line: Line, times: int) -> dict[str, Any]:
    """One line; ``bytes`` is for each token and rank."""
    total = Bytes()
    for one in line.collectives:
        if one.extent not in (Extent.SAMPLED, Extent.SCORES):
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
    """One operation; a collective has bytes for each token, or for each scored row."""
    one = step.collective
    if one is None:
        return {"operation": step.text}
    scored = one.extent in (Extent.SAMPLED, Extent.SCORES)
    return {
        "operation": step.text,
        "collective": one.kind.value,
        "group": one.group.name,
        "ranks": plan.spec.topology.size(one.group),
        "columns": one.columns,
        "per": "scored row" if scored else "token",
        **bytes_data(per_token(one, plan.ground, plan.sizes)),
    }


def bytes_data(num_bytes: Bytes) -> dict[str, float]:
    """Payload and wire bytes."""
    return {"payload_bytes": num_bytes.payload, "wire_bytes": num_bytes.wire}
