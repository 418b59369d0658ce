"""The server's log on stderr: lines for people, or one JSON object a line."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from typing import TYPE_CHECKING

from layline.engine.scheduler import BLOCK_SIZE

if TYPE_CHECKING:
    from layline.engine.llm import LLM

LOG = logging.getLogger("layline.serve")
MIB = 1 << 20
_RANK = re.compile(r"rank (\d+)\b")
LEVELS = ("debug", "info", "warning", "error")


class PlainFormatter(logging.Formatter):
    """``time level [rank] message [request id]``."""

    def format(self, record: logging.LogRecord) -> str:
        """One record."""
        fields = getattr(record, "fields", {})
        request = f" [{fields['request_id']}]" if "request_id" in fields else ""
        stamp = time.strftime("%H:%M:%S", time.localtime(record.created))
        rank = f" [rank {fields['rank']}]" if "rank" in fields else ""
        return f"{stamp} {record.levelname.lower()}{rank} {record.getMessage()}{request}"


class JsonFormatter(logging.Formatter):
    """One object a line; what is told beside the message has names of its own."""

    def format(self, record: logging.LogRecord) -> str:
        """One record."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        return json.dumps(line, ensure_ascii=False, default=str)


def tell_loaded(llm: LLM, seconds: float) -> None:
    """Log what loading gave: what every rank holds by now."""
    held, blocks = llm.memory_report(), llm.engine.stats().blocks
    LOG.info(
        "loaded in %.1f s: weights %.0f MiB (all copies), cache %.0f MiB in %d blocks of %d tokens",
        *(seconds, held["weights"] / MIB, held["kv_cache"] / MIB, blocks, BLOCK_SIZE),
    )


def tell_notes(error: BaseException) -> None:
    """Log what else is known of an error: what a rank printed, where it failed."""
    found: BaseException | None = error
    while found is not None:
        for note in getattr(found, "__notes__", ()):
            rank = _RANK.match(note)
            fields = {} if rank is None else {"rank": int(rank[1])}
            for line in note.splitlines():
                LOG.error("%s", line, extra={"fields": fields})
        found = found.__cause__


def configure(level: str, *, as_json: bool) -> None:
    """Send the server's log and uvicorn's warnings to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if as_json else PlainFormatter())
    for name, least in (("layline", level.upper()), ("uvicorn", "WARNING")):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(least)
