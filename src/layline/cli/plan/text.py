"""A plan's data as text for people, in about a hundred columns."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from layline.boundary.planning.show import LEGEND
from layline.cli.output import size_text

WIDTH = 112
HEADINGS = (
    *("boundary", "times", "rows", "owed", "at the exit, in compute", "in the prepare"),
    *("payload", "wire", "residual"),
)
RIGHT = frozenset({1, 6, 7})
MARKS = {"scored row": "*", "fed row": "+"}
"""Behind bytes that are not for each token."""
Row = tuple[str, ...]


def as_text(data: dict[str, Any]) -> str:
    """The whole plan."""
    parts = [title(data), table([HEADINGS, *rows_of(data["lines"])]), notes(data)]
    parts += [why(data), steps(data)]
    if data["draft_model"] is not None:
        parts.append(draft(data["draft_model"]))
    if not data.get("pipeline"):
        # Stages have a memory each, which their own table shows.
        parts.append(memory(data))
    return "\n\n".join(parts)


def title(data: dict[str, Any]) -> str:
    """Model, mesh, policy and kind of batch."""
    mesh, policy = data["mesh"], data["policy"]
    factors = [
        f"{name} {mesh[key]}"
        for name, key in (("attention DP", "attn_dp"), ("CP", "attn_cp"), ("TP", "attn_tp"))
        if mesh[key] > 1
    ]
    divided = mesh["attn_tp"] < mesh["tp"]
    shape = f"tp {mesh['tp']}" + (f" = {' x '.join(factors)}" if divided else "")
    if mesh["dense_tp"] != mesh["tp"]:
        shape += f", dense TP {mesh['dense_tp']}"
    if data.get("pipeline"):
        shape += f", {data['pipeline']['stages']} pipeline stages"
    padding = "" if data["padding"] is None else f", {data['padding']}"
    return (
        f"{data['architecture']}  {data['layers']} layers  {data['dtype']}  {shape}\n"
        f"policy {policy['name']} ({policy['reason']})  variant {data['variant']}{padding}"
        + also(data)
    )


def also(data: dict[str, Any]) -> str:
    """The other kinds of batch that this mesh has paths for."""
    others = []
    for kind in data["bound"]:
        if kind["variant"] != data["variant"]:
            others.append(f"--variant {kind['variant']}")
        elif kind["padding"] != data["padding"]:
            others.append(f"--dp-padding {kind['padding']}")
    found = list(dict.fromkeys(others))
    return f"\nalso planned: {', '.join(found)}" if found else ""


def rows_of(lines: Sequence[dict[str, Any]]) -> list[Row]:
    """A row for each operation; the first of a line carries what is said of the whole line."""
    rows: list[Row] = []
    for line in lines:
        early = [*line["compute"], *line["exit"]]
        steps = [(step, True) for step in early] + [(step, False) for step in line["prepare"]]
        before, after = line["rows"]
        name = f"compute: {line['name']}" if line["kind"] == "compute" else line["name"]
        residual = "" if line["residual"] is None else arrow(*line["residual"])
        first = (name, f"x{line['times']}", arrow(before, after), line["owed"] or "-")
        for index, (step, is_early) in enumerate(steps):
            head = first if index == 0 else ("",) * len(first)
            text = step["operation"]
            columns = (text, "") if is_early else ("" if index else "-", text)
            mark = MARKS.get(step.get("per"), "")
            rows.append(
                (
                    *head,
                    *columns,
                    number(step.get("payload_bytes"), mark),
                    number(step.get("wire_bytes"), mark),
                    residual if index == 0 else "",
                )
            )
            if "in_prefill" in step:
                rows.append(prefill_row(step["in_prefill"], len(first), is_early=is_early))
    return rows


def prefill_row(found: dict[str, Any], before: int, *, is_early: bool) -> Row:
    """What a quantised sum is in prefill, below what it is in other steps."""
    text = f"in prefill: {found['collective']} of int8"
    columns = (text, "") if is_early else ("", text)
    numbers = (number(found["payload_bytes"]), number(found["wire_bytes"]))
    return (*("",) * before, *columns, *numbers, "")


def arrow(before: str, after: str) -> str:
    """``A -> F``, or ``A`` where nothing changes."""
    return before if before == after else f"{before} -> {after}"


def number(value: float | None, mark: str = "") -> str:
    """Bytes, rounded to whole ones."""
    return "" if value is None else f"{value:,.0f}{mark}"


def table(rows: Sequence[Row], right: frozenset[int] = RIGHT) -> str:
    """Rows in aligned columns; the first is the heading."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def notes(data: dict[str, Any]) -> str:
    """What the letters and the numbers mean."""
    used = {row for line in data["lines"] for row in (*line["rows"], *(line["residual"] or ()))}
    legend = ", ".join(f"{name}: {text}" for name, text in LEGEND.items() if name in used)
    size = data["value_bytes"]["outputs_and_residual"]
    text = (
        f"Rows {legend}. Payload and wire: bytes per token of the step and rank, slots equally "
        f"full; outputs and the residual have {size} bytes a value."
    )
    per = {step.get("per") for line in data["lines"] for step in line["compute"]}
    if "fed row" in per:
        text += " +: per row that is fed what the step before sampled, where steps overlap."
    if "scored row" in per:
        scores = data["value_bytes"]["scores"]
        text += f" *: per scored row, a score has {scores} bytes"
        if data["value_bytes"]["scores_assumed"]:
            text += (
                ", which is assumed: it depends on this machine's kernel for a quantised head, "
                "and --analyze asks that"
            )
        text += "."
    return wrapped(text)


def why(data: dict[str, Any]) -> str:
    """A sentence for each boundary."""
    lines = [line for line in data["lines"] if line["kind"] == "boundary"]
    width = max(len(line["name"]) for line in lines)
    shown = dict.fromkeys((line["name"], line["reason"]) for line in lines)
    texts = [
        wrapped(f"{name:<{width}}  {reason}", indent=" " * (width + 2)) for name, reason in shown
    ]
    return "why\n" + "\n".join(texts)


def steps(data: dict[str, Any]) -> str:
    """Collectives of whole steps by group."""
    headings = ["one step, each rank"]
    found: dict[tuple[str, bool], dict[int, dict[str, Any]]] = {}
    for step in data["steps"]:
        tokens = step["tokens_per_attn_dp_rank"]
        per = f"{tokens} token{'' if tokens == 1 else 's'}"
        headings += [f"{per}: count", "payload MiB", "wire MiB"]
        for total in step["collectives"]:
            found.setdefault((total["group"], total["in_compute"]), {})[tokens] = total
    if not found:
        return "one step: no collective"
    rows: list[Row] = [tuple(headings)]
    counts = [step["tokens_per_attn_dp_rank"] for step in data["steps"]]
    for (group, in_compute), by_tokens in found.items():
        row = [f"{group}{', in compute' if in_compute else ''}"]
        for tokens in counts:
            total = by_tokens.get(tokens)
            row += ["-"] * 3 if total is None else cells(total)
        rows.append(tuple(row))
    rows.append(tuple(["all"] + [cell for step in data["steps"] for cell in cells(summed(step))]))
    text = table(rows, frozenset(range(1, len(headings))))
    return text + "\nTokens are those of each attention DP rank, one of its rows is scored."


def summed(step: dict[str, Any]) -> dict[str, Any]:
    """The totals of all groups."""
    keys = ("count", "payload_bytes", "wire_bytes")
    return {key: sum(total[key] for total in step["collectives"]) for key in keys}


def cells(total: dict[str, Any]) -> list[str]:
    """Count, payload and wire of one total."""
    mib = [f"{total[key] / (1 << 20):,.2f}" for key in ("payload_bytes", "wire_bytes")]
    return [str(total["count"]), *mib]


def draft(found: dict[str, Any]) -> str:
    """The draft model beside the planned one."""
    policy = found["policy"]
    return wrapped(
        f"draft model: {found['architecture']}, {found['layers']} layers, policy {policy['name']} "
        f"({policy['reason']}); the memory of a rank includes it, the plan above does not"
    )


def memory(data: dict[str, Any]) -> str:
    """What one rank holds, and whether it fits."""
    found = data["memory_per_rank"]
    kept = ""
    if found["packed"]:
        kept = " (matrices stay quantised, plain copies only where the kernels need them)"
    longest = found["max_model_len"]
    text = (
        f"memory of a rank: weights {held(found['weights_bytes'])} as {data['dtype']}{kept}, keys "
        f"and values {held(found['cache_bytes'])} at most ({held(found['kv_bytes_per_token'])} per "
        f"token), slots n/a; {held(found['total_bytes'])} in all: "
    )
    share = found["device_bytes"]
    if found["cache_holds_longest"] is False:
        text += f"does not fit, one sequence of max-model-len {longest} tokens has no room"
    elif share is None:
        text += f"memory of the {found['device']} device unknown"
    else:
        verdict = "fits" if found["fits"] else "does not fit"
        text += f"{verdict}, a rank has {held(share)} of {found['device']} memory here"
    return wrapped(text)


def held(num_bytes: int) -> str:
    """A size of memory, in KiB where it is small."""
    if num_bytes >= 1 << 20:
        return size_text(num_bytes)
    return f"{num_bytes / 1024:,.{1 if num_bytes % 1024 else 0}f} KiB"


def wrapped(text: str, indent: str = "") -> str:
    """``text`` in lines of at most WIDTH characters."""
    return textwrap.fill(
        text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
