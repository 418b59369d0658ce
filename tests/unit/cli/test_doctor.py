"""``layline doctor``: facts as text and as JSON."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import pytest
import torch

from layline.cli import inventory
from layline.weights import cache


def test_json_holds_what_the_text_shows(
    layline: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LAYLINE_CACHE", str(tmp_path))
    monkeypatch.setenv("LAYLINE_PP_STAGES", "2")
    result = layline("doctor", "--json")
    assert result.status == 0
    assert result.out.count("\n") == 1
    found = json.loads(result.out)
    assert found["versions"]["python"] == platform.python_version()
    assert found["versions"]["torch"] == torch.__version__
    assert found["processor"]["threads"] == torch.get_num_threads()
    assert found["cache"] == {"directory": str(tmp_path), "models": []}
    assert found["environment"]["LAYLINE_PP_STAGES"] == "2"
    text = layline("doctor").out
    assert torch.__version__ in text
    assert str(tmp_path) in text
    assert "LAYLINE_PP_STAGES" in text


def test_a_package_that_is_missing_is_absent(layline: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inventory, "OPTIONAL", ("no-such-package-as-this",))
    assert inventory.versions()["no-such-package-as-this"] is None
    (line,) = [x for x in layline("doctor").out.splitlines() if "no-such-package" in x]
    assert line.split() == ["no-such-package-as-this", "absent"]


def test_a_damaged_model_is_reported_not_raised(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LAYLINE_CACHE", str(tmp_path))
    path = cache.model_file(cache.CATALOGUE["smollm2-135m"], tmp_path)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"short")
    (model,) = inventory.cache()["models"]
    assert model["name"] == "smollm2-135m"
    assert "5 bytes long" in model["state"]


def test_peer_access_lists_the_other_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        name, total_memory, major, minor = "GPU", 3 << 30, 9, 0

    reachable = {(0, 1), (1, 0), (2, 0)}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties)
    monkeypatch.setattr(
        torch.cuda,
        "can_device_access_peer",
        lambda one, other: one == other or (one, other) in reachable,
    )
    devices = inventory.cuda()["devices"]
    assert [device["peers"] for device in devices] == [[1], [0], [0]]
    assert devices[0]["memory"] == "3.0 GiB"
    assert devices[0]["capability"] == "9.0"
