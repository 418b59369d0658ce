"""``layline bench latency``: what is measured, in which order, and how it is told."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from layline.cli.bench import client, measure
from layline.cli.bench.client import Worker, absent, first_output
from layline.cli.bench.measure import Samples, Settings
from layline.cli.bench.report import as_data, as_table
from layline.errors import RunError, UsageError

COMPUTE = {"device": "cpu", "dtype": "auto", "threads": 2}


def settings(**changes: Any) -> Settings:
    values = {
        "name": "m",
        "path": "/m.gguf",
        "prompt_tokens": 100,
        "new_tokens": 10,
        "batches": (1, 4),
        "repeats": 2,
        "compute": COMPUTE,
    }
    return Settings(**{**values, **changes})


class FakeWorker:
    """Takes 2 s for a prompt token and 0.5 s for a step; a log of calls is shared by all."""

    def __init__(self, engine: str) -> None:
        self.engine = engine

    def __enter__(self) -> FakeWorker:
        return self

    def __exit__(self, *_: object) -> None:
        LOG.append((self.engine, "closed"))

    def ask(self, **request: Any) -> dict[str, Any]:
        LOG.append((self.engine, request["op"]))
        if request["op"] == "memory":
            return {"peak_bytes": 1 << 30}
        sizes = {"layline": 900, "transformers": 700, "llama.cpp": 800}
        return {"version": "1", "vocab_size": sizes[self.engine]}

    def generate(self, prompts: list[list[int]], new_tokens: int) -> float:
        LOG.append((self.engine, len(prompts), len(prompts[0]), new_tokens))
        PROMPTS.extend(tuple(prompt) for prompt in prompts)
        return 2.0 * sum(map(len, prompts)) + 0.5 * (new_tokens - 1)


LOG: list[Any] = []
PROMPTS: list[tuple[int, ...]] = []


@pytest.fixture
def fake_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    LOG.clear()
    PROMPTS.clear()
    monkeypatch.setattr(client, "Worker", FakeWorker)
    monkeypatch.setattr(measure, "Worker", FakeWorker)
    monkeypatch.setattr(measure, "first_output", lambda command: (0.25, 1 << 29))


@pytest.mark.usefixtures("fake_workers")
def test_engines_take_turns_and_the_first_round_is_thrown_away() -> None:
    engines = ["layline", "transformers", "llama.cpp"]
    samples, failed = measure.measure(settings(), engines, lambda text: None)
    assert failed == {}
    prefill = [entry[0] for entry in LOG if entry[1:] == (1, 100, 1)]
    assert prefill == engines * 3, "a warm-up and two repeats, each engine once in each"
    for seen in samples.values():
        assert len(seen.values["prefill_tokens_per_s"]) == 2
        assert seen.summary()["prefill_tokens_per_s"]["median"] == pytest.approx(0.5)
        # Ten steps of half a second: the time of the prompts cancels.
        assert seen.summary()["decode_tokens_per_s_batch_1"]["median"] == pytest.approx(2.0)
        assert seen.summary()["decode_tokens_per_s_batch_4"]["median"] == pytest.approx(8.0)
    assert [entry for entry in LOG if entry[1] == "closed"][-3:] == [
        (engine, "closed") for engine in reversed(engines)
    ]


@pytest.mark.usefixtures("fake_workers")
def test_no_prompt_is_used_twice_and_every_engine_knows_its_ids() -> None:
    measure.measure(settings(), ["layline", "transformers"], lambda text: None)
    random_ones = [prompt for prompt in PROMPTS if len(prompt) > measure.FIRST_TOKEN_LENGTH]
    assert len(set(random_ones)) == len(random_ones)
    assert max(max(prompt) for prompt in random_ones) < 700


@pytest.mark.usefixtures("fake_workers")
def test_a_competitor_that_cannot_start_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(FakeWorker):
        def ask(self, **request: Any) -> dict[str, Any]:
            if self.engine == "transformers":
                raise RunError("transformers failed during load: no memory")
            return super().ask(**request)

    monkeypatch.setattr(measure, "Worker", Broken)
    monkeypatch.setattr(client, "Worker", Broken)
    samples, failed = measure.measure(
        settings(), ["layline", "transformers", "llama.cpp"], lambda text: None
    )
    assert list(samples) == ["layline", "llama.cpp"]
    assert failed == {"transformers": "transformers failed during load: no memory"}


def sampled(scale: float) -> Samples:
    made = Samples(version="1")
    for value in (1.0, 2.0, 6.0):
        made.add("prefill_tokens_per_s", value * scale)
        made.add("first_token_s", value * scale)
        made.add("peak_memory_bytes", (1 << 20) * value * scale)
    return made


def test_ratios_above_one_always_favour_layline() -> None:
    samples = {"layline": sampled(2.0), "transformers": sampled(1.0)}
    data = as_data(settings(), samples, {"llama.cpp": "not installed"})
    assert data["engines"]["layline"]["prefill_tokens_per_s"] == {
        "median": 4.0,
        "min": 2.0,
        "max": 12.0,
    }
    assert data["ratios"]["transformers"] == {
        "prefill_tokens_per_s": 2.0,
        "first_token_s": 0.5,
        "peak_memory_bytes": 0.5,
    }
    assert data["engines"]["llama.cpp"] == {"status": "not installed"}
    assert "llama.cpp" not in data["ratios"]
    json.dumps(data, allow_nan=False)


def test_the_table_shows_medians_with_their_range() -> None:
    table = as_table(
        as_data(
            settings(),
            {"layline": sampled(2.0), "transformers": sampled(1.0)},
            {"llama.cpp": "not installed"},
        )
    )
    assert "4.0 (2.0-12.0) tok/s" in table
    assert "4.00 (2.00-12.00) s" in table
    assert "4 (2-12) MiB" in table
    assert "llama.cpp: not installed" in table
    assert "times transformers (above 1: layline is better): prefill 2.00" in table


def test_engines_that_cannot_run_are_named_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert absent("layline", "anything") is None
    assert absent("transformers", "config:dir") == "cannot run config:DIR"
    assert absent("llama.cpp", str(tmp_path)) == "reads only .gguf files"
    monkeypatch.setenv(client.LLAMA_PYTHON, "/no/such/python")
    assert absent("llama.cpp", "m.gguf") == "not installed"
    monkeypatch.setenv(client.LLAMA_PYTHON, sys.executable)
    monkeypatch.setitem(client.MODULES, "llama.cpp", "no_such_module")
    assert absent("llama.cpp", "m.gguf") == "not installed"
    monkeypatch.setitem(client.MODULES, "llama.cpp", "json")
    assert absent("llama.cpp", "m.gguf") is None


def test_a_worker_that_fails_says_why_and_one_that_dies_is_noticed() -> None:
    with Worker("layline") as worker:
        with pytest.raises(RunError, match="layline failed during load: KeyError"):
            worker.ask(op="load")
        worker.process.kill()
        with pytest.raises(RunError, match="worker ended during memory"):
            worker.ask(op="memory")
    with Worker("nothing") as worker, pytest.raises(RunError, match="KeyError: 'nothing'"):
        worker.ask(op="memory")


def test_a_worker_must_make_as_many_tokens_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with Worker("layline") as worker:
        monkeypatch.setattr(worker, "ask", lambda **_: {"seconds": 1.0, "tokens": [[1], [1, 2]]})
        with pytest.raises(RunError, match=r"made \[1, 2\] tokens for 2 prompts; expected 2 each"):
            worker.generate([[1], [2]], 2)


def test_a_decode_step_is_counted_from_the_first_tokens_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Worker("layline") as worker:
        tokens = [[1] * 5, [2] * 5]
        reply = {"seconds": 3.0, "first_seconds": 1.0, "tokens": tokens}
        monkeypatch.setattr(worker, "ask", lambda **_: reply)
        assert worker.decode_step([[1], [2]], 4) == 0.5
        reply["first_seconds"] = None
        with pytest.raises(RunError, match="layline worker does not tell when decoding began"):
            worker.decode_step([[1], [2]], 4)


def test_first_output_waits_for_the_first_byte_and_not_the_end() -> None:
    code = (
        "import sys, time; sys.stdout.write('x'); sys.stdout.flush(); "
        "held = bytearray(80 << 20); held[::4096] = b'1' * len(held[::4096]); time.sleep(1.5)"
    )
    begin = time.perf_counter()
    seconds, peak = first_output([sys.executable, "-c", code])
    # Whatever the machine is doing, the sleep comes after the first byte.
    assert time.perf_counter() - begin - seconds > 1.4
    assert peak > 80 << 20
    with pytest.raises(RunError, match="ended with status 3; expected text: sorry"):
        first_output([sys.executable, "-c", "import sys; print('sorry', file=sys.stderr); exit(3)"])
    with pytest.raises(RunError, match="it printed nothing"):
        first_output([sys.executable, "-c", "pass"])


@pytest.mark.usefixtures("fake_workers")
def test_without_a_tokenizer_only_the_first_token_is_not_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(command: list[str]) -> tuple[float, int]:
        raise AssertionError(command)

    monkeypatch.setattr(measure, "first_output", never)
    engines = ["layline", "transformers"]
    samples, failed = measure.measure(settings(has_tokenizer=False), engines, lambda text: None)
    assert failed == {}
    data = as_data(settings(), samples, {})
    ours = data["engines"]["layline"]
    assert set(ours["not_measured"]) == {"first_token_s", "peak_memory_bytes"}
    assert "no tokenizer files" in ours["not_measured"]["first_token_s"]
    assert "prefill_tokens_per_s" in ours
    assert "first_token_s" in data["engines"]["transformers"]
    assert "first_token_s" not in data["ratios"]["transformers"]
    table = as_table(data)
    assert "layline, first token: not measured; the model has no tokenizer files" in table
    assert "not measured" in next(x for x in table.splitlines() if x.startswith("first token"))
    json.dumps(data, allow_nan=False)


@pytest.mark.usefixtures("fake_workers")
def test_noise_spoils_one_figure_and_not_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Noisy(FakeWorker):
        def generate(self, prompts: list[list[int]], new_tokens: int) -> float:
            seconds = super().generate(prompts, new_tokens)
            # The second measured round of batch 4 takes no longer for more tokens.
            noisy = len(prompts) == 4 and sum(entry[1] == 4 for entry in LOG) > 4
            return 1.0 if noisy else seconds

    monkeypatch.setattr(client, "Worker", Noisy)
    samples, _ = measure.measure(settings(), ["layline"], lambda text: None)
    ours = as_data(settings(), samples, {})["engines"]["layline"]
    assert "decode_tokens_per_s_batch_1" in ours
    assert "decode_tokens_per_s_batch_4" not in ours
    assert "--new-tokens" in ours["not_measured"]["decode_tokens_per_s_batch_4"]


def test_settings_beyond_the_context_are_refused() -> None:
    settings(prompt_tokens=127, new_tokens=63).check(128)
    with pytest.raises(UsageError, match=r"--prompt-tokens 128 .* of 128 tokens; .* is 127"):
        settings(prompt_tokens=128).check(128)
    with pytest.raises(UsageError, match=r"--new-tokens 64 .* of 128 tokens; .* is 63"):
        settings(new_tokens=64).check(128)
    with pytest.raises(UsageError, match=r"context of 65 tokens .* at least 66"):
        settings(prompt_tokens=1, new_tokens=1).check(65)


@pytest.fixture
def config_folder(tmp_path: Path) -> Path:
    """A folder for ``config:DIR``: a tiny model without tokenizer files."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 100,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return tmp_path


def test_too_long_a_prompt_is_refused_before_anything_runs(
    layline: Any, config_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "measure", None)
    result = layline("bench", "latency", f"config:{config_folder}", "--prompt-tokens", "99999")
    assert result.status == 2
    assert result.err.count("\n") == 1
    for part in ("--prompt-tokens 99999", "256", "is 255"):
        assert part in result.err


def test_random_weights_are_measured_and_a_missing_engine_is_told_first(
    layline: Any, config_folder: Path
) -> None:
    result = layline(
        *("bench", "latency", f"config:{config_folder}", "--prompt-tokens", "8", "--json"),
        *("--new-tokens", "4", "--batch", "1", "--repeats", "1", "--threads", "1"),
        *("--against", "transformers"),
    )
    assert result.status == 0, result.err
    assert result.err == "layline: going on without transformers: cannot run config:DIR\n"
    ours = json.loads(result.out)["engines"]["layline"]
    assert ours["prefill_tokens_per_s"]["median"] > 0
    assert "no tokenizer files" in ours["not_measured"]["first_token_s"]


def test_the_way_to_another_python_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(client.MODULES, "llama.cpp", "no_such_module")
    found = client.missing_engines(["llama.cpp"], "m.gguf")
    assert found["llama.cpp"].startswith("not installed; LAYLINE_BENCH_LLAMA_PYTHON can name")
