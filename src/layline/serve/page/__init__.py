"""The status page: fixed files, and the numbers that its script asks for.

Nothing that a model or a user wrote goes into the page as HTML: the script sets text only, and the
policy lets the browser run and load nothing but these files.
"""

from __future__ import annotations

from importlib import resources
from typing import Any

from starlette.responses import Response

from layline.serve.service import Service

FILES = {
    "/": ("status.html", "text/html; charset=utf-8"),
    "/status.js": ("status.js", "text/javascript; charset=utf-8"),
    "/status.css": ("status.css", "text/css; charset=utf-8"),
}
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def file_response(path: str) -> Response:
    """One of the page's files."""
    name, media_type = FILES[path]
    data = resources.files(__package__).joinpath(name).read_bytes()
    return Response(data, headers={**HEADERS, "content-type": media_type})


def numbers(service: Service) -> dict[str, Any]:
    """What the page shows: the model, its mesh, and the load at this moment."""
    load = service.engine.load
    statistics = service.engine.statistics
    failure = service.engine.failure
    return {
        "model": service.settings.model_name,
        "max_model_len": service.max_model_len,
        "can_chat": service.tokenizer.chat_template is not None,
        "about": service.about,
        "failure": None if failure is None else str(failure),
        "stopping": service.engine.is_stopping,
        "waiting": load.waiting,
        "running": load.running,
        "kv_blocks_used": load.cache.held,
        "kv_blocks": load.cache.blocks,
        "prompt_tokens": statistics.prompt_tokens,
        "generated_tokens": statistics.generated_tokens,
        "steps": statistics.steps,
    }
