"""``layline gate`` as a user calls it."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.tiny import save_tiny

FEW = ("--pp-stages", "2", "--threads", "2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny(path, "Llama", num_hidden_layers=4, max_position_embeddings=128)
    return str(path)


def test_a_green_gate(layline: Callable[..., Any], folder: str) -> None:
    done = layline("gate", folder, *FEW, "--loop", "verify")
    assert (done.status, done.err) == (0, "")
    head, *arms, last = done.out.splitlines()
    assert head.startswith("LlamaForCausalLM: layers 0-1 | 2-3 on cpu 0,1, float32, 1 thread")
    assert [line.split()[0] for line in arms] == ["green"] * 3
    assert "verify_splits 4" in arms[0]
    assert last.startswith("gate: passed, ")


def test_two_stages_unless_told_otherwise(layline: Callable[..., Any], folder: str) -> None:
    done = layline("gate", folder, "--loop", "graph")
    assert done.status == 0
    assert "layers 0-1 | 2-3" in done.out


def test_a_red_gate_has_status_1(
    layline: Callable[..., Any], folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LAYLINE_PP_BIND")
    monkeypatch.setenv("LAYLINE_SPEC_PP", "0")
    done = layline("gate", folder, *FEW, "--loop", "verify", "--json")
    assert (done.status, done.err) == (1, "")
    data = json.loads(done.out)
    assert data["passed"] is False
    assert data["configuration"]["doors"] == {"LAYLINE_SPEC_PP": "0"}
    assert [arm["verdict"] for arm in data["arms"]] == ["red"] * 3
    assert "verification has no stage split" in data["arms"][0]["reasons"][0]


def test_canaries(layline: Callable[..., Any], folder: str) -> None:
    names = ("slot_overwrite", "peer_pools", "neutered_counter")
    chosen = [word for name in names for word in ("--canary", name)]
    done = layline("gate", folder, *FEW, *chosen)
    assert (done.status, done.err) == (0, "")
    lines = done.out.splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == ["red", "n/a", "red"]
    assert "no peer access" in lines[2]
    assert lines[-1].startswith("gate: every canary turned it red, ")
    data = json.loads(layline("gate", folder, *FEW, *chosen, "--json").out)
    assert [each["verdict"] for each in data["canaries"]] == ["red", "n/a", "red"]
    assert data["canaries"][0]["class"] == 2


def test_a_canary_that_is_not_red_has_status_1(
    layline: Callable[..., Any], folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from layline.gates import mutations

    monkeypatch.setattr(mutations.StuckCounters, "add", mutations.Counters.add)
    done = layline("gate", folder, *FEW, "--canary", "neutered_counter")
    assert done.status == 1
    assert done.out.splitlines()[1].startswith("GREEN")
    assert done.out.splitlines()[-1].startswith("gate: FAILED")


def test_the_list_needs_no_model(layline: Callable[..., Any]) -> None:
    done = layline("gate", "no/such/model", "--canary", "list")
    assert (done.status, done.err) == (0, "")
    assert " 1  first_use_clear" in done.out
    assert len(done.out.splitlines()) == 31
    rows = json.loads(layline("gate", "--canary", "list", "--json").out)["canaries"]
    assert {row["class"] for row in rows} == set(range(1, 28))


def test_a_timeline(layline: Callable[..., Any], folder: str, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    done = layline("gate", folder, *FEW, "--loop", "prime", "--trace", str(path), "--json")
    assert json.loads(done.out)["trace"] == str(path)
    events = json.loads(path.read_text())["traceEvents"]
    runs = {each["pid"]: each["args"]["name"] for each in events if each["name"] == "process_name"}
    assert list(runs.values())[:3] == [
        "prime of 8 chunks, split",
        "prime of 8 chunks, serial",
        "prime of 8 chunks, unsplit",
    ]
    streams = {
        (each["pid"], each["tid"]): each["args"]["name"]
        for each in events
        if each["name"] == "thread_name"
    }
    spans: dict[str, list[str]] = defaultdict(list)
    for each in events:
        if each["ph"] == "X":
            assert each["dur"] >= 0
            spans[streams[each["pid"], each["tid"]]].append(each["name"])
    assert "cut 0 tx #0" in spans["stage 0"]
    assert "cut 0 rx #0" in spans["stage 1"]
    assert any(name.startswith("wait for cut 0 tx") for name in spans["stage 1"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--canary", "slot_overwritten"], ["'slot_overwritten'", "did you mean 'slot_overwrite'"]),
        (["--loop", "graf"], ["'graf'", "the nearest is 'graph'"]),
        (["--trace", "t.txt"], ["does not end in .json"]),
        (["--trace", "t.json", "--canary", "all"], ["expected it without --canary"]),
        (["--pp-stages", "5"], ["--pp-stages 5", "4 layers"]),
        (["--tp", "2"], ["gates run the stages of one process", "--tp 1"]),
        (["--max-model-len", "20"], ["--max-model-len 20 is too short", "at least 40"]),
    ],
)
def test_bad_usage_is_one_line(
    layline: Callable[..., Any], folder: str, arguments: list[str], words: list[str]
) -> None:
    done = layline("gate", folder, *arguments)
    assert (done.status, done.out, done.err.count("\n")) == (2, "", 1)
    for word in words:
        assert word in done.err


def test_a_timeline_that_cannot_be_written(layline: Callable[..., Any], folder: str) -> None:
    done = layline("gate", folder, *FEW, "--loop", "graph", "--trace", "/no/such/t.json")
    assert done.status == 3
    assert (
        done.err
        == "layline: --trace '/no/such/t.json' cannot be written: No such file or directory\n"
    )
