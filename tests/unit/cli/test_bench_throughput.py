"""``layline bench throughput``: what is measured, and how it is told."""

from __future__ import annotations

import json
from typing import Any

import pytest

from layline.cli.bench.throughput_run import Load, Samples, as_data, as_table, measure_throughput
from layline.errors import UsageError
from support.tiny import save_tiny


def load(**changes: Any) -> Load:
    values: dict[str, Any] = {
        "model": "m",
        "path": "/m.gguf",
        "batches": (1, 4),
        "new_tokens": 6,
        "prefix_tokens": 33,
        "repeats": 2,
        "compute": {"device": "cpu", "dtype": "auto", "threads": 1},
    }
    return Load(**{**values, **changes})


def test_medians_and_ratios() -> None:
    samples = Samples(
        steps={1: [0.1, 0.3, 0.2], 4: [0.4, 0.4, 0.4]},
        computed={1: [0.09, 0.28, 0.18], 4: [0.39, 0.36, 0.38]},
        rival={1: [0.4], 4: [0.4]},
        cold=[1.0, 2.0, 3.0],
        cached=[0.5, 0.5, 0.1],
    )
    data = as_data(load(rival="llama.cpp"), samples)
    one, four = data["batches"]["1"], data["batches"]["4"]
    assert one["tokens_per_s"] == pytest.approx(5)
    assert four["tokens_per_s"] == pytest.approx(10)
    assert one["engine_overhead_s"] == pytest.approx(0.02)
    assert four["rival_tokens_per_s"] == pytest.approx(10)
    assert data["first_token"] == {"cold_s": 2.0, "cached_prefix_s": 0.5, "ratio": 4.0}
    text = as_table(data)
    assert "batch 4 makes 2.00 times the tokens of batch 1" in text
    assert "times llama.cpp" in text
    assert "4.0 times quicker" in text
    assert [line.split()[-1] for line in text.splitlines()[2:4]] == ["2.00", "1.00"]


def test_what_does_not_fit_the_context_is_refused() -> None:
    load().check(128)
    with pytest.raises(UsageError, match=r"--prefix-tokens 33 does .* 32 tokens .* value is 30"):
        load().check(32)
    with pytest.raises(UsageError, match=r"--new-tokens 6 does .* 70 tokens .* value is 3"):
        load().check(70)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny(path, "Llama", max_position_embeddings=128)
    return str(path)


def test_a_tiny_model(tiny: str, layline: Any) -> None:
    flags = ("--batch", "1,3", "--new-tokens", "5", "--prefix-tokens", "40", "--repeats", "2")
    found = layline("bench", "throughput", tiny, "--threads", "1", *flags, "--json")
    assert (found.status, found.err) == (0, "")
    data = json.loads(found.out)
    assert list(data["batches"]) == ["1", "3"]
    for measured in data["batches"].values():
        assert 0 < measured["engine_overhead_s"] < measured["step_s"]
    assert data["first_token"]["ratio"] > 0
    missing = layline("bench", "throughput", tiny, "--against", "llama.cpp", *flags)
    assert missing.status == 0
    assert "layline: going on without llama.cpp: reads only .gguf files" in missing.err
    refused = layline("bench", "throughput", tiny, "--new-tokens", "99")
    assert refused.status == 2
    assert refused.err.count("\n") == 1


def test_steps_count_where_the_whole_batch_decodes(tiny: str) -> None:
    """More prompts than a few steps prefill: some decode long before others."""
    wide = load(model=tiny, batches=(100,), new_tokens=2, repeats=1)
    data = measure_throughput(wide, lambda _: None)
    assert data["batches"]["100"]["tokens_per_s"] > 0
