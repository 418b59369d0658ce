"""``layline pull``: the path on stdout, progress on stderr."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from layline.errors import PullError
from layline.weights import pull as weights_pull


@pytest.fixture
def fetch(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replaces the download: reports as told, and remembers its arguments."""
    fake: dict[str, Any] = {"reports": [(100, 100)], "error": None, "calls": []}

    def run(model: str, *, progress: Callable[..., None], **options: Any) -> Path:
        fake["calls"].append((model, options))
        for done, total in fake["reports"]:
            progress(done, total)
        if fake["error"]:
            raise fake["error"]
        return Path("/cache/model.gguf")

    monkeypatch.setattr(weights_pull, "pull", run)
    return fake


def test_path_alone_on_stdout_when_nothing_was_fetched(layline: Any, fetch: Any) -> None:
    result = layline("pull")
    assert (result.status, result.out, result.err) == (0, "/cache/model.gguf\n", "")
    assert fetch["calls"] == [("smollm2-135m", {"revision": None, "offline": False})]


def test_options_are_passed_on(layline: Any, fetch: Any) -> None:
    layline("pull", "org/name", "--revision", "abc", "--offline")
    assert fetch["calls"] == [("org/name", {"revision": "abc", "offline": True})]


def test_a_log_gets_a_line_every_tenth(layline: Any, fetch: Any) -> None:
    mib = 1 << 20
    fetch["reports"] = [(step * mib, 100 * mib) for step in (0, 3, 9, 10, 11, 35, 39, 40, 99, 100)]
    lines = layline("pull").err.splitlines()
    assert [line.split(": ")[1] for line in lines] == [
        "0% of 100 MiB",
        "10% of 100 MiB",
        "35% of 100 MiB",
        "40% of 100 MiB",
        "99% of 100 MiB",
        "100% of 100 MiB",
    ]


def test_a_failed_pull_is_one_line_and_status_2(layline: Any, fetch: Any) -> None:
    fetch["error"] = PullError("checksum differs")
    result = layline("pull")
    assert (result.status, result.out) == (2, "")
    assert result.err == "layline: checksum differs\n"


def test_a_terminal_gets_a_bar(layline: Any, fetch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    fetch["reports"] = [(0, 1 << 20), (1 << 19, 1 << 20), (1 << 20, 1 << 20)]
    result = layline("pull")
    assert "pulling smollm2-135m" in result.err
    assert "1.0/1.0 MiB" in result.err
    assert result.out == "/cache/model.gguf\n"


def test_unknown_name_says_what_can_be_pulled(layline: Any) -> None:
    result = layline("pull", "smolm2-135m")
    assert result.status == 2
    assert result.err.count("\n") == 1
    assert "'smolm2-135m'" in result.err
    assert "ORG/NAME" in result.err
    assert "did you mean 'smollm2-135m'" in result.err
