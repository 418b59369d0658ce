"""The result of ``bench latency`` as data and as a table."""

from __future__ import annotations

import os
import platform
from typing import Any

from layline.cli.bench.measure import Samples, Settings

# Metrics where less is better: their ratio is turned round, so above 1 always favours Layline.
LESS_IS_BETTER = ("first_token_s", "peak_memory_bytes", "loaded_peak_memory_bytes")
WIDTH = 27


def as_data(
    settings: Settings, samples: dict[str, Samples], missing: dict[str, str]
) -> dict[str, Any]:
    """Everything measured, with the ratio of medians to each competitor."""
    summaries = {engine: seen.summary() for engine, seen in samples.items()}
    engines: dict[str, Any] = {}
    for engine, seen in samples.items():
        engines[engine] = {"status": "measured", "version": seen.version, **summaries[engine]}
        if seen.skipped:
            engines[engine]["not_measured"] = dict(seen.skipped)
    ours = summaries["layline"]
    ratios = {
        engine: {
            metric: ratio(metric, ours[metric]["median"], result[metric]["median"])
            for metric in result
            if metric in ours
        }
        for engine, result in summaries.items()
        if engine != "layline"
    }
    return {
        "model": settings.name,
        "settings": {
            "prompt_tokens": settings.prompt_tokens,
            "new_tokens": settings.new_tokens,
            "batch": list(settings.batches),
            "repeats": settings.repeats,
            **settings.compute,
            **settings.mesh,
        },
        "machine": {"platform": platform.platform(), "cpus": os.cpu_count()},
        "engines": engines | {engine: {"status": why} for engine, why in missing.items()},
        "ratios": ratios,
    }


def ratio(metric: str, ours: float, theirs: float) -> float | None:
    """How many times better Layline is; None when a value could not be read."""
    if not ours or not theirs:
        return None
    return theirs / ours if metric in LESS_IS_BETTER else ours / theirs


def as_table(data: dict[str, Any]) -> str:
    """Medians with least and greatest, one column an engine, ratios below."""
    measured = {n: e for n, e in data["engines"].items() if e["status"] == "measured"}
    shown = data["settings"]
    metrics = dict.fromkeys(
        metric
        for engine in measured.values()
        for metric in [*engine.get("not_measured", ()), *engine]
        if metric not in ("status", "version", "not_measured")
    )
    heads = [f"{name} {engine['version']}" for name, engine in measured.items()]
    lines = [
        f"{data['model']}: {shown['prompt_tokens']} prompt tokens, {shown['new_tokens']} new, "
        f"{shown['repeats']} repeats; {shown['device']}, dtype {shown['dtype']}, "
        f"threads {shown['threads'] or 'all'} of {data['machine']['cpus']}",
        "",
        " " * WIDTH + "".join(f"{head:<{WIDTH}}" for head in heads),
    ]
    for metric in metrics:
        cells = [
            cell(metric, engine[metric]) if metric in engine else "not measured"
            for engine in measured.values()
        ]
        lines.append(f"{label(metric):<{WIDTH}}" + "".join(f"{c:<{WIDTH}}" for c in cells))
    for name, engine in data["engines"].items():
        if engine["status"] != "measured":
            lines.append(f"{name}: {engine['status']}")
        for metric, why in engine.get("not_measured", {}).items():
            lines.append(f"{name}, {label(metric)}: not measured; {why}")
    for name, found in data["ratios"].items():
        parts = [f"{label(m)} {value:.2f}" for m, value in found.items() if value is not None]
        lines += ["", f"times {name} (above 1: layline is better): " + "; ".join(parts)]
    return "\n".join(line.rstrip() for line in lines)


def label(metric: str) -> str:
    """A metric's name for people."""
    if metric.startswith("decode_tokens_per_s_batch_"):
        batch = metric.rsplit("_", 1)[1]
        return "decode alone" if batch == "1" else f"decode batch {batch}"
    return {
        "first_token_s": "first token",
        "peak_memory_bytes": "memory, one answer",
        "loaded_peak_memory_bytes": "memory, whole benchmark",
        "prefill_tokens_per_s": "prefill",
    }[metric]


def cell(metric: str, summary: dict[str, float]) -> str:
    """``median (min-max) unit``."""
    scale, digits, unit = 1.0, 1, " tok/s"
    if metric.endswith("_bytes"):
        scale, digits, unit = 1.0 / (1 << 20), 0, " MiB"
    elif metric.endswith("_s") and "tokens" not in metric:
        digits, unit = 2, " s"
    middle, low, high = (f"{summary[key] * scale:.{digits}f}" for key in ("median", "min", "max"))
    return f"{middle}{unit}" if low == high else f"{middle} ({low}-{high}){unit}"
