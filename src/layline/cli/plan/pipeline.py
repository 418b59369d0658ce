"""The part of a plan about pipeline stages, as plain data and as text."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from layline.cli.plan.text import Row, held, number, table, wrapped
from layline.engine.pipeline_costs import Schedule
from layline.engine.pipeline_plan import PipelinePlan
from layline.pipeline.cuts import PartCost, slowest
from layline.pipeline.fence import boundaries
from layline.pipeline.schedule import ideal_bubble

STAGE_HEADINGS = (
    *("stage", "layers", "device", "beside them", "weights", "keys, values", "slots", "in all"),
    *("device has", "cost", "share"),
)
CUT_HEADINGS = ("cut", "stages", "transport", "crosses", "rows", "dtype", "bytes per token")
COST_HEADINGS = ("part", "cost", "memory", "stage")
ORIGINS = {
    "auto": "auto: the least slowest stage that fits",
    "even": "even cuts",
    "given": "cuts as given",
}


def pipeline_data(plan: PipelinePlan) -> dict[str, Any]:
    """The pipeline as data for JSON; costs are in ``cost_unit``."""
    per_token = [sum(plan.bytes_per_token(each) for each in cut.tensors) for cut in plan.cuts]
    return {
        "stages": len(plan.shares),
        "fence": list(plan.fence),
        "cuts_from": plan.origin,
        "processes": max(plan.placement.processes) + 1,
        "per_stage": [stage_data(plan, stage) for stage in range(len(plan.shares))],
        "cuts": [
            {
                "layer": layer,
                "transport": plan.placement.transport(index).value,
                "state": "written" if cut.written else "pending",
                "tensors": [tensor_data(plan, tensor) for tensor in cut.tensors],
                "finished_before": [str(op) for op in cut.before],
                "bytes_per_token": per_token[index],
            }
            for index, (layer, cut) in enumerate(
                zip(boundaries(plan.fence), plan.cuts, strict=True)
            )
        ],
        "dtype_assumed": plan.assumes_outputs,
        "slot_tokens": plan.slot_tokens,
        "cached_tokens": plan.memory.cached_tokens,
        "cache_holds_longest": plan.memory.holds_longest,
        "fits": plan.memory.fits,
        "costs": {
            "unit": plan.cost.unit,
            "source": plan.cost.source,
            "parts": [
                {"part": name, "cost": part.cost, "bytes": part.num_bytes}
                for name, part in parts_of(plan)
            ],
            "slowest_stage": slowest(plan.shares),
            "slowest_stage_of_even_cuts": slowest(plan.even),
        },
        "schedules": [schedule_data(schedule) for schedule in plan.schedules],
    }


def stage_data(plan: PipelinePlan, stage: int) -> dict[str, Any]:
    """One stage."""
    share, memory = plan.shares[stage], plan.memory.stages[stage]
    return {
        "layers": [share.layers.start, share.layers.stop],
        "process": plan.placement.processes[stage],
        "device": plan.placement.devices[stage],
        "embedding": stage == 0,
        "norm_and_head": stage == len(plan.shares) - 1,
        "weights_bytes": memory.weights,
        "kv_bytes": memory.kv,
        "slots_bytes": memory.slots,
        "total_bytes": memory.total,
        "device_bytes": memory.device_bytes,
        "fits": memory.fits,
        "cost": share.time,
    }


def tensor_data(plan: PipelinePlan, tensor: Any) -> dict[str, Any]:
    """One tensor that crosses."""
    return {
        "name": tensor.name,
        "rows": str(tensor.rows),
        "dtype": plan.tensor_dtype(tensor),
        "partial": tensor.partial,
        "bytes_per_token": plan.bytes_per_token(tensor),
    }


def schedule_data(schedule: Schedule) -> dict[str, Any]:
    """One schedule: when each stage works on what, as shares of its length."""
    done = schedule.timeline
    return {
        "title": schedule.title,
        "bubble": done.bubble,
        "bubble_in_the_long_run": schedule.steady,
        "work": [
            {
                "stage": bar.stage,
                "item": schedule.items[bar.item],
                "start": bar.start / done.length,
                "stop": bar.stop / done.length,
            }
            for bar in done.bars
        ],
    }


def parts_of(plan: PipelinePlan) -> list[tuple[str, PartCost]]:
    """The parts of the model by name, in order; layers that are alike are one line."""
    found = [("embedding", plan.cost.embedding)]
    for part, run in groupby(enumerate(plan.cost.layers), key=lambda each: each[1]):
        ids = [layer for layer, _ in run]
        alike = f"layers {ids[0]} to {ids[-1]}, each" if len(ids) > 1 else f"layer {ids[0]}"
        found.append((alike, part))
    return [*found, ("norm and head", plan.cost.head)]


def pipeline_text(plan: PipelinePlan) -> str:
    """The pipeline for people: stages and memory, cuts, costs, schedules."""
    parts = [stages_text(plan), cuts_text(plan), costs_text(plan), schedules_text(plan)]
    return "\n\n".join(parts)


def stages_text(plan: PipelinePlan) -> str:
    """A line for each stage, and whether all of it fits."""
    several = max(plan.placement.processes) > 0
    fence = " ".join(map(str, plan.fence))
    rows: list[Row] = [STAGE_HEADINGS]
    kind = plan.model.room.device
    whole = sum(share.time for share in plan.shares)
    for stage, (share, memory) in enumerate(zip(plan.shares, plan.memory.stages, strict=True)):
        process = f"process {plan.placement.processes[stage]}, " if several else ""
        ends = ["embedding"] * (stage == 0) + ["norm, head"] * (stage == len(plan.shares) - 1)
        sizes = (memory.weights, memory.kv, memory.slots, memory.total)
        rows.append(
            (
                str(stage),
                f"{share.layers.start}-{share.layers.stop - 1} ({len(share.layers)})",
                f"{process}{kind}:{plan.placement.devices[stage]}",
                ", ".join(ends) or "-",
                *(held(size) for size in sizes),
                "?" if memory.device_bytes is None else held(memory.device_bytes),
                amount(share.time, plan.cost.unit),
                f"{share.time / whole:.1%}",
            )
        )
    heading = f"pipeline of {len(plan.shares)} stages, fence {fence} ({ORIGINS[plan.origin]})"
    text = table(rows, frozenset(range(4, len(STAGE_HEADINGS))))
    return f"{heading}\n{text}\n{wrapped(verdict(plan) + shared_text(plan))}"


def verdict(plan: PipelinePlan) -> str:
    """Whether the stages fit, and what the numbers are of."""
    memory, longest = plan.memory, plan.model.facts.max_model_len
    text = (
        f"Memory is that of one rank: weights as {plan.model.facts.dtype}, a tied table on both "
        f"ends, keys and values of {memory.cached_tokens:,} tokens at most on every stage, two "
        f"slots of {plan.slot_tokens:,} tokens at each receiver: "
    )
    if memory.holds_longest is False:
        return text + f"does not fit, one sequence of max-model-len {longest} tokens has no room."
    if memory.fits is None:
        return text + f"memory of the {plan.model.room.device} devices unknown."
    if memory.fits:
        return text + "fits."
    full = [str(i) for i, stage in enumerate(memory.stages) if stage.fits is False]
    return text + f"does not fit on the device of stage {', '.join(full)}."


def shared_text(plan: PipelinePlan) -> str:
    """What two stages on one device cannot do; empty where there are none."""
    if not plan.placement.multi_stream_same_device:
        return ""
    return (
        " Stages share a device: they take turns, and deferred decode and the chunk pipeline are "
        "refused."
    )


def cuts_text(plan: PipelinePlan) -> str:
    """A line for each tensor that crosses a cut."""
    rows: list[Row] = [CUT_HEADINGS]
    for index, (layer, cut) in enumerate(zip(boundaries(plan.fence), plan.cuts, strict=True)):
        first = (
            f"before layer {layer}",
            f"{index} -> {index + 1}",
            plan.placement.transport(index).value,
        )
        for tensor in cut.tensors:
            state = "written" if cut.written else "pending"
            words = tensor.name if tensor.name == "residual" else f"{tensor.name}, {state}"
            if tensor.partial is not None:
                words += f", partial over {tensor.partial}"
            named = (words, str(tensor.rows), plan.tensor_dtype(tensor))
            rows.append((*first, *named, number(plan.bytes_per_token(tensor))))
            first = ("", "", "")
    notes = []
    early = dict.fromkeys(str(op) for cut in plan.cuts for op in cut.before)
    if early:
        notes.append(f"Finished by the sender: {', '.join(early)}.")
    if plan.assumes_outputs:
        notes.append(
            "hidden_states are float32 at most: the phase and this machine's kernels decide, and "
            "some return bfloat16."
        )
    text = table(rows, frozenset({6}))
    return text + (f"\n{wrapped(' '.join(notes))}" if notes else "")


def costs_text(plan: PipelinePlan) -> str:
    """The table that cuts are chosen from, and what even cuts would be."""
    rows: list[Row] = [COST_HEADINGS]
    last = len(plan.shares) - 1
    homes = {"embedding": "0", "norm and head": str(last)}
    for name, part in parts_of(plan):
        rows.append((name, amount(part.cost, plan.cost.unit), held(part.num_bytes),
                     homes.get(name, "")))  # fmt: skip
    chosen, even = slowest(plan.shares), slowest(plan.even)
    note = (
        f"Costs are {plan.cost.source}, memory counts the smallest cache of a run. The slowest "
        f"stage takes {amount(chosen, plan.cost.unit)}"
    )
    if [share.layers for share in plan.shares] != [share.layers for share in plan.even]:
        note += f", that of even cuts {amount(even, plan.cost.unit)} ({even / chosen:.2f} times)"
    return table(rows, frozenset({1, 2})) + f"\n{wrapped(note + '.')}"


def schedules_text(plan: PipelinePlan) -> str:
    """A line for each schedule."""
    lines = []
    for schedule in plan.schedules:
        text = f"{schedule.title}: bubbles are {schedule.timeline.bubble:.1%} of all stages' time"
        if schedule.steady is not None:
            text += f", {schedule.steady:.1%} in the long run"
        else:
            ideal = ideal_bubble(len(plan.shares), len(schedule.items))
            text += f" (equal stages and chunks: {ideal:.1%})"
        lines.append(wrapped(text))
    return "\n".join(lines)


def amount(cost: float, unit: str) -> str:
    """A cost for people."""
    return f"{cost / 1e6:,.1f} MB" if unit == "bytes" else f"{cost:,.4g}{unit and ' '}{unit}"


def process_memory(plan: PipelinePlan) -> dict[str, Any]:
    """The memory of the process that holds most: what a plan without stages says of its rank."""
    totals: dict[int, list[int]] = {}
    for process, stage in zip(plan.placement.processes, plan.memory.stages, strict=True):
        before = totals.setdefault(process, [0, 0, 0])
        for index, size in enumerate((stage.weights, stage.kv, stage.slots)):
            before[index] += size
    weights, kv, slots = max(totals.values(), key=sum)
    return {
        "weights_bytes": weights,
        "kv_bytes_per_token": kv // max(plan.memory.cached_tokens, 1),
        "cache_bytes": kv,
        "cache_holds_longest": plan.memory.holds_longest,
        "slots_bytes": slots,
        "total_bytes": weights + kv + slots,
        "fits": plan.memory.fits,
    }


def row_names(plan: PipelinePlan) -> list[str]:
    """The name of each stage's row in a drawing: what it is, then what it has."""
    kind = plan.model.room.device
    return [
        f"stage {stage} on {kind}:{device}\nlayers {share.layers.start} to {share.layers.stop - 1}"
        for stage, (share, device) in enumerate(
            zip(plan.shares, plan.placement.devices, strict=True)
        )
    ]
