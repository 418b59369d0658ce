"""The checks of ``layline plan``: a simulation of all ranks, and a comparison with a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from layline.boundary.planning.simulated_rows import SimulationError
from layline.boundary.planning.trials import simulate_layers
from layline.cli.plan.text import table, wrapped
from layline.engine.pipeline_plan import PipelinePlan
from layline.engine.planned import ModelPlan

HEADINGS = ("where", "group", "collective", "planned", "ran", "planned MiB", "ran MiB", "ms a rank")
SHOWN = 5
"""Differences printed; all of them are in the JSON."""


def simulation(plan: ModelPlan) -> tuple[dict[str, Any], str]:
    """Walk every kind of batch on all ranks; the result as data and as a line."""
    ranks = plan.spec.topology.tp
    try:
        done = simulate_layers(plan.layers, plan.spec)
    except SimulationError as error:
        return {"passed": False, "error": str(error)}, f"simulation FAILED: {error}"
    data = {
        "passed": True,
        "ranks": ranks,
        "kinds": done.kinds,
        "steps": done.steps,
        "shapes": done.shapes,
        "ways": done.ways,
        "rows": done.rows,
    }
    text = (
        f"simulation passed: {ranks} rank{'s' if ranks > 1 else ''}, "
        f"{done.kinds} kind{'s' if done.kinds > 1 else ''} of batch, "
        f"{done.steps} steps ({', '.join(done.shapes)}), {done.ways} ways into stages taken, "
        f"{done.rows:,} rows checked"
    )
    return data, wrapped(text)


def analysis(
    plan: ModelPlan, flags: Mapping[str, Any], staged: PipelinePlan | None = None
) -> tuple[dict[str, Any], str]:
    """Run the model for a few steps; planned beside executed, as data and as a table."""
    from layline.engine.analysis import analyse

    done = analyse(plan, flags, staged)
    compared = done.comparison
    totals = [
        {
            "in_compute": in_compute,
            "group": group.name,
            "collective": kind.value,
            "planned": {"count": pair.planned.count, "payload_bytes": pair.planned.payload_bytes},
            "executed": {
                "count": pair.executed.count,
                "payload_bytes": pair.executed.payload_bytes,
                "seconds": pair.executed.seconds,
            },
        }
        for (in_compute, group, kind), pair in compared.totals()
    ]
    data = {
        "agrees": done.agrees,
        "ranks": done.ranks,
        "steps": dict(done.kinds),
        "totals": totals,
        "cuts": [asdict(cut) for cut in done.cuts],
        "differences": done.differences,
    }
    return data, analysis_text(data)


def analysis_text(data: dict[str, Any]) -> str:
    """The comparison for people; counts and bytes are those of all ranks together."""
    steps = ", ".join(f"{count} of {kind}" for kind, count in data["steps"].items())
    lines = [f"ran steps: {steps}; sums over {data['ranks']} ranks:"]
    rows = [HEADINGS]
    for total in data["totals"]:
        planned, executed = total["planned"], total["executed"]
        milliseconds = executed["seconds"] * 1000 / data["ranks"]
        rows.append(
            (
                "compute" if total["in_compute"] else "boundary",
                total["group"],
                total["collective"],
                str(planned["count"]),
                str(executed["count"]),
                f"{planned['payload_bytes'] / (1 << 20):,.3f}",
                f"{executed['payload_bytes'] / (1 << 20):,.3f}",
                f"{milliseconds:,.1f}",
            )
        )
    lines.append(table(rows, frozenset(range(3, 8))) if len(rows) > 1 else "no collective")
    lines += [
        f"cut before layer {cut['layer']}: {cut['crossings']} crossings, "
        f"{cut['planned_bytes'] / (1 << 20):,.3f} MiB planned at most, "
        f"{cut['bytes'] / (1 << 20):,.3f} MiB ran"
        for cut in data["cuts"]
    ]
    found = data["differences"]
    if not found and data["cuts"]:
        lines.append("analysis passed: every collective and every cut as planned, in order")
        return "\n".join(lines)
    if not found:
        lines.append("analysis passed: every collective ran as planned, in order, on every rank")
        return "\n".join(lines)
    lines += [wrapped(f"differs: {difference}", indent="  ") for difference in found[:SHOWN]]
    lines.append(f"analysis FAILED: {len(found)} steps of a rank differ from the plan")
    return "\n".join(lines)
