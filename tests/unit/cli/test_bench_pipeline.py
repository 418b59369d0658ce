"""``layline bench pipeline``: what is measured over stages, and how it is told."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from layline.cli.bench.pipeline_run import PipelineLoad, Samples, as_data, as_table
from layline.errors import UsageError
from support.tiny import save_tiny


def load(**changes: Any) -> PipelineLoad:
    values: dict[str, Any] = {
        "model": "m",
        "stages": 2,
        "splits": None,
        "batch": 4,
        "new_tokens": 6,
        "chunks": 3,
        "chunk_tokens": 20,
        "repeats": 2,
        "compute": {"dtype": "auto"},
    }
    return PipelineLoad(**{**values, **changes})


def test_medians_and_ratios() -> None:
    samples = Samples()
    for alone, staged in ((0.4, 0.1), (0.2, 0.1), (0.2, 0.4)):
        samples.add("decode", alone, staged)
        samples.add("serial", alone, alone)
        samples.add("prime", 2 * alone, alone)
    data = as_data(load(), samples, [0, 2, 4])
    assert data["measures"]["decode"] == {"alone_s": 0.2, "staged_s": 0.1, "ratio": 2.0}
    assert data["measures"]["serial"]["ratio"] == 1.0
    text = as_table(data)
    assert "cut before layer 2" in text
    assert "decode, 2 microbatches of 4: 10.0 tokens/s, 2.00 times one stage with 4 (5.0)" in text
    assert "prefill, 3 chunks of 20: 200 ms, 2.00 times as fast as one chunk at a time" in text


def test_what_does_not_fit_the_context_is_refused() -> None:
    load().check(104)
    with pytest.raises(UsageError, match="needs 104 tokens and the model's context has 103"):
        load().check(103)
    with pytest.raises(UsageError, match="needs 802 tokens"):
        load(chunks=40).check(512)


def test_a_run_over_two_processes(layline: Callable[..., Any], tmp_path: Path) -> None:
    save_tiny(tmp_path, "Llama", num_hidden_layers=4, max_position_embeddings=256)
    few = ("--batch", "2", "--new-tokens", "4", "--chunks", "3", "--chunk-tokens", "8")
    trace = tmp_path / "steps.json"
    more = ("--repeats", "1", "--json", "--trace", str(trace))
    done = layline("bench", "pipeline", str(tmp_path), *few, *more)
    assert done.status == 0, done.err
    data = json.loads(done.out)
    assert data["fence"] == [0, 2, 4]
    assert set(data["measures"]) == {"decode", "serial", "prime"}
    assert all(each["staged_s"] > 0 for each in data["measures"].values())
    events = json.loads(trace.read_text())["traceEvents"]
    streams = {each["args"]["name"] for each in events if each["name"] == "thread_name"}
    assert streams == {"stage 0", "stage 1", "stage 0's cuts", "stage 1's cuts"}
    names = {each["name"].rstrip("0123456789") for each in events if each["ph"] == "X"}
    assert names >= {"step ", "cut 0 tx #", "cut 0 rx #", "cut 0 wait"}
    steps = [each for each in events if each["name"] == "step 3"]
    assert len(steps) == 2
    assert steps[0]["ts"] + steps[0]["dur"] <= steps[1]["ts"], "the second stage follows the first"
    refused = layline("bench", "pipeline", str(tmp_path), "--chunks", "64")
    assert (refused.status, refused.out) == (2, "")
    assert "expected fewer --chunks" in refused.err
