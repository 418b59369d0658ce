"""What the log of a server has, and what it must not have, at every level and in both forms."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import httpx2
import pytest

from layline.errors import RunError
from layline.serve.logs import JsonFormatter, PlainFormatter, tell_notes
from support.serving import NAME, Server, serving, wait_for

MARKER = "xyzzymarkerxyzzy"
SEEN = "plughpath"
FLAGS = ("--served-model-name", NAME, "--threads", "1", "--log-level", "debug")


def ask_with_the_marker(server: Server) -> list[int]:
    """Requests that carry the marker wherever a client can put one; their statuses."""
    text = f"w1 {MARKER}"
    chat: dict[str, Any] = {"model": NAME, "messages": [{"role": "user", "content": text}]}
    plain = {"model": NAME, "prompt": text, "max_tokens": 2}
    bodies: list[tuple[str, Any]] = [
        ("/v1/chat/completions", {**chat, "max_tokens": 2, "stop": [MARKER]}),
        ("/v1/chat/completions", {**chat, "max_tokens": 2, "stream": True}),
        ("/v1/chat/completions", {**chat, "temperature": MARKER}),
        ("/v1/chat/completions", {**chat, MARKER: 1}),
        ("/v1/completions", {**plain, "cache_salt": MARKER, "echo": True}),
        ("/v1/completions", {**plain, "model": MARKER}),
        ("/v1/completions", {**plain, "logit_bias": {MARKER: 1}}),
        ("/v1/completions", {**plain, "prompt": f"{MARKER} " * 30_000}),
        ("/tokenize", {"prompt": text}),
        ("/tokenize", {"messages": chat["messages"]}),
    ]
    headers = {
        "user-agent": MARKER,
        "x-request-id": f"{MARKER} {MARKER}",
        "authorization": f"Bearer {MARKER}",
        "cookie": MARKER,
    }
    with httpx2.Client(base_url=server.url, headers=headers, timeout=30) as client:
        found = [client.post(path, json=body).status_code for path, body in bodies]
        broken = {"content-type": "application/json"}
        for data in (f'{{"model": "{MARKER}', f'"{MARKER}\\ud800"', f"\xff{MARKER}"):
            sent = client.post("/v1/completions", content=data.encode("latin-1"), headers=broken)
            found.append(sent.status_code)
        found.append(client.get(f"/health?{MARKER}={MARKER}").status_code)
        found.append(client.get(f"/{SEEN}%0d%0a%1b%5b31m").status_code)
    return found


@pytest.mark.parametrize("form", [(), ("--log-json",)])
def test_nothing_a_client_wrote_is_logged(
    checkpoint: tuple[Path, Any], tmp_path: Path, form: tuple[str, ...]
) -> None:
    with serving(checkpoint[0], tmp_path, *FLAGS, *form) as server:
        statuses = ask_with_the_marker(server)
        assert {200, 400, 404} <= set(statuses) <= {200, 400, 404, 413}
        wait_for(lambda: SEEN in server.log.read_text())
        assert server.stop() == 0
        text = server.log.read_text()
    assert MARKER not in text
    assert text.count("POST /v1/chat/completions") == 4
    assert "/health" in text, "what only debug tells"
    # The path is logged, without what could begin a line or colour a terminal.
    assert "\x1b" not in text
    (line,) = [line for line in text.splitlines() if SEEN in line]
    assert "404" in line, "all of it is in one line"
    if form:
        assert all(isinstance(json.loads(line), dict) for line in text.splitlines())


def test_what_a_rank_printed_is_logged_as_its_own(caplog: pytest.LogCaptureFixture) -> None:
    cause = RunError("rank 1 (attention DP 0, TP 1) ended unexpectedly")
    cause.add_note("rank 1 (attention DP 0, TP 1) printed:\nout of memory\nat step 3")
    try:
        raise RunError(*cause.args) from cause
    except RunError as error:
        with caplog.at_level(logging.ERROR, logger="layline.serve"):
            tell_notes(error)
    plain = [PlainFormatter().format(each).split(" ", 1)[1] for each in caplog.records]
    assert plain == [
        "error [rank 1] rank 1 (attention DP 0, TP 1) printed:",
        "error [rank 1] out of memory",
        "error [rank 1] at step 3",
    ]


def record(**fields: Any) -> logging.LogRecord:
    made = logging.LogRecord("layline.serve", logging.INFO, "f", 1, "said %s", ("so",), None)
    made.created = 0.0
    made.msecs = 7.0
    if fields:
        made.fields = fields
    return made


def test_the_two_forms_of_a_line() -> None:
    plain, as_json = PlainFormatter(), JsonFormatter()
    assert plain.format(record()).endswith(" info said so")
    assert plain.format(record(request_id="r1")).endswith(" info said so [r1]")
    assert plain.format(record(rank=3)).endswith(" info [rank 3] said so")
    assert json.loads(as_json.format(record(rank=3, request_id="r1"))) == {
        "time": "1970-01-01T00:00:00.007Z",
        "level": "info",
        "logger": "layline.serve",
        "message": "said so",
        "rank": 3,
        "request_id": "r1",
    }
