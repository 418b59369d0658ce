"""The status page: fixed files, and the data that its scripts ask for.

Nothing that a model or a user wrote goes into the page as HTML: the scripts set text only, and the
policy lets the browser run and load nothing but these files.
"""

from __future__ import annotations

from importlib import resources
from typing import Any

from starlette.responses import Response

from layline.engine.statistics import Histogram
from layline.serve.service import Service

SCRIPT = "text/javascript; charset=utf-8"
FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page/main.js": ("main.js", SCRIPT),
    "/page/live.js": ("live.js", SCRIPT),
    "/page/drawing.js": ("drawing.js", SCRIPT),
    "/page/chat.js": ("chat.js", SCRIPT),
    "/page/style.css": ("style.css", "text/css; charset=utf-8"),
    "/page/icon.svg": ("icon.svg", "image/svg+xml"),
}
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "cache-control": "no-cache",
}
"""Trusted types: the browser itself refuses a text where HTML or a script would be made of it."""


def file_response(path: str) -> Response:
    """One of the page's files."""
    name, media_type = FILES[path]
    data = resources.files(__package__).joinpath(name).read_bytes()
    return Response(data, headers={**HEADERS, "content-type": media_type})


def plan_data(service: Service) -> dict[str, Any]:
    """What stays as it is while the server runs: the model, its mesh, its pipeline."""
    return {
        **service.about,
        "model": service.settings.model_name,
        "max_model_len": service.max_model_len,
        "can_chat": service.tokenizer.chat_template is not None,
    }


def numbers(service: Service) -> dict[str, Any]:
    """What changes: the load at this moment, and totals since ``started``, in seconds.

    ``started`` tells a page that is open that another server answers now.
    """
    engine = service.engine
    load, statistics, times = engine.load, engine.statistics, engine.times
    failure = engine.failure
    return {
        "started": service.created,
        "failure": None if failure is None else str(failure),
        "stopping": engine.is_stopping,
        "waiting": load.waiting,
        "running": load.running,
        "kv_blocks_used": load.cache.held,
        "kv_blocks_idle": load.cache.idle,
        "kv_blocks": load.cache.blocks,
        "block_bytes": service.block_bytes,
        "prefix_lookup_tokens": load.cache.prefix_lookups,
        "prefix_hit_tokens": load.cache.prefix_hits,
        "preemptions": load.cache.preemptions,
        "prompt_tokens": statistics.prompt_tokens,
        "generated_tokens": statistics.generated_tokens,
        "finished": dict(statistics.finished),
        "first_token": totals(statistics.first_token),
        "step": totals(statistics.step),
        "parts": {name: totals(found) for name, found in times.parts.items()},
        "stages": {str(name): totals(found) for name, found in sorted(times.stages.items())},
    }


def totals(histogram: Histogram) -> dict[str, float]:
    """How many values there were, and their sum."""
    return {"count": sum(histogram.counts), "seconds": histogram.total}
