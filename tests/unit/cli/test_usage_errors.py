"""Every mistake on the command line is one line on stderr that says what to do, and status 2."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from layline.errors import CheckpointError, ModelNotFoundError, RunError

# Arguments; what the line must contain: the value or name, what was expected, the nearest choice.
MISTAKES = {
    "no command": ([], ["no command", "pull, generate, chat, serve, plan, gate, doctor, bench"]),
    "unknown command": (["genrate", "x"], ["'genrate'", "pull, generate", "'generate'"]),
    "command of a later time": (["zzz"], ["'zzz'", "pull, generate"]),
    "no subcommand": (["bench"], ["no command", "latency"]),
    "unknown subcommand": (["bench", "latncy"], ["'latncy'", "'latency'"]),
    "unknown root option": (["--verson"], ["'--verson'", "'--version'"]),
    "unknown option": (["generate", "x", "--max-token", "3"], ["'--max-token'", "'--max-tokens'"]),
    "later option": (["generate", "x", "--pp-rank", "2"], ["'--pp-rank'"]),
    "stages 0": (["generate", "x", "--pp-stages", "0"], ["--pp-stages 0", "from 1", "is 1"]),
    "stages word": (["plan", "m", "--pp-stages", "all"], ["'all'", "whole number", "is 1"]),
    "stages near": (["plan", "m", "--pp-stage", "2"], ["'--pp-stage'", "'--pp-stages'"]),
    "splits": (["plan", "m", "--pp-splits", "5,x"], ["'5,x' has 'x'", "auto, or whole", "is '5'"]),
    "splits word": (["chat", "--pp-splits", "even"], ["'even'", "auto, or whole", "is 'auto'"]),
    "splits 0": (["plan", "m", "--pp-splits", "0,9"], ["has '0'", "from 1 to", "is '9'"]),
    "devices": (["serve", "m", "--pp-devices", "0,-1"], ["has '-1'", "from 0 to", "is '0'"]),
    "devices word": (["plan", "m", "--pp-devices", "cuda"], ["'cuda'", "from 0", "is '0'"]),
    "processes": (["plan", "m", "--pp-processes", "0"], ["--pp-processes 0", "from 1", "is 1"]),
    "drawing": (["plan", "m", "--draw", "x.png"], ["'x.png'", ".svg", "is 'x.png.svg'"]),
    "tp 0": (["generate", "x", "--tp", "0"], ["--tp 0", "from 1 to 1024", "is 1"]),
    "tp word": (["chat", "--tp", "two"], ["'two'", "whole number", "is 1"]),
    "reduction": (
        ["generate", "x", "--boundary-reduction", "rs-rsv"],
        ["'rs-rsv'", "auto, ar, rs, rsv, rs+rsv", "the nearest is 'rs"],
    ),
    "padding": (["chat", "--dp-padding", "max"], ["'max'", "max-len, sum-len", "is 'max-len'"]),
    "cp layout": (["chat", "--cp-layout", "zig"], ["contiguous, zigzag", "is 'zigzag'"]),
    "bench mesh": (["bench", "latency", "--attn-dp", "-1"], ["--attn-dp -1", "is 1"]),
    "short option": (["generate", "x", "-q"], ["'-q'", "takes --model"]),
    "beginning": (["generate", "x", "--temp", "1"], ["'--temp'", "is '--temperature'"]),
    "far option": (["generate", "x", "--foo"], ["'--foo'", "takes --model", "--top-p"]),
    "prompt with a dash": (["generate", "-hello"], ["'-hello'", "put -- before", "on stdin"]),
    "prompt, a sum": (["generate", "--json", "-1 + 2"], ["'-1 + 2'", "put -- before"]),
    "prompt, a flag": (["generate", "--hi there"], ["'--hi there'", "put -- before"]),
    "chat option": (["chat", "--trheads", "2"], ["'--trheads'", "'--threads'"]),
    "missing prompt": (["generate"], ["missing PROMPT", "the text to continue"]),
    "surplus argument": (["generate", "a", "b"], ["'b'", "takes PROMPT", "quote"]),
    "surplus for doctor": (["doctor", "now"], ["'now'", "no arguments"]),
    "missing value": (["generate", "x", "--max-tokens"], ["--max-tokens", "most tokens"]),
    "value for a flag": (["generate", "x", "--json=3"], ["--json", "expected --json alone"]),
    "value for overlap": (["generate", "x", "--overlap=yes"], ["--overlap", "--overlap alone"]),
    "overlap": (["chat", "--no-overlapp"], ["'--no-overlapp'", "is '--no-overlap'"]),
    "max_tokens 0": (["generate", "x", "--max-tokens", "0"], ["--max-tokens 0", "least 1", "is 1"]),
    "max_tokens word": (["generate", "x", "--max-tokens", "many"], ["'many'", "whole", "is 1"]),
    "max_tokens 1.5": (["generate", "x", "--max-tokens", "1.5"], ["'1.5'", "whole", "is 1"]),
    "threads 0": (["generate", "x", "--threads", "0"], ["--threads 0", "from 1", "is 1"]),
    "threads many": (["chat", "--threads", "9999"], ["9999", "to 1024", "is 1024"]),
    "max_model_len 0": (["generate", "x", "--max-model-len", "0"], ["least 2", "is 2"]),
    "max_model_len 1": (["chat", "--max-model-len", "1"], ["--max-model-len 1", "least 2", "is 2"]),
    "device": (["generate", "x", "--device", "gpu"], ["'gpu'", "cpu, cuda", "is 'cpu'"]),
    "device case": (["chat", "--device", "CPU"], ["'CPU'", "cpu, cuda", "is 'cpu'"]),
    "dtype": (["generate", "x", "--dtype", "bf16"], ["'bf16'", "bfloat16, float16", "nearest"]),
    "kv dtype": (["generate", "x", "--kv-dtype", "int4"], ["'int4'", "fp8, int8", "is 'int8'"]),
    "kv dtype fp8": (["serve", "--kv-dtype", "fp8_e5m2"], ["'fp8_e5m2'", "nearest is 'fp8'"]),
    "batch invariance": (["chat", "--batch-invariance"], ["nearest is '--batch-invariant'"]),
    "size unit": (["generate", "x", "--kv-memory", "12X"], ["'12X'", "K, M, G or T", "'512M'"]),
    "size zero": (["generate", "x", "--kv-memory", "0"], ["'0'", "above zero", "'512M'"]),
    "size negative": (["generate", "x", "--kv-memory", "-1G"], ["'-1G'", "above zero"]),
    "max_running": (["generate", "x", "--max-running", "0"], ["--max-running 0", "is 1"]),
    "speculative": (
        ["generate", "x", "--speculative", "ngrm"],
        ["off, ngram, draft", "is 'ngram'"],
    ),
    "speculative tokens": (["chat", "--speculative-tokens", "0"], ["from 1 to 64", "is 1"]),
    "many speculative": (["serve", "--speculative-tokens", "99"], ["99", "to 64", "is 64"]),
    "speculative reduction": (
        ["generate", "x", "--speculative-boundary-reduction", "rsvv"],
        ["'rsvv'", "auto, ar, rs, rsv, rs+rsv", "is 'rsv'"],
    ),
    "speculative option": (["chat", "--speculative-modle", "m"], ["is '--speculative-model'"]),
    "temperature": (["generate", "x", "--temperature", "-1"], ["--temperature -1 is", "0 to 100"]),
    "temperature nan": (["generate", "x", "--temperature", "nan"], ["'nan'", "finite", "0 to 100"]),
    "top_p": (["generate", "x", "--top-p", "1.5"], ["--top-p 1.5 is", "0 to 1"]),
    "top_p 0": (["generate", "x", "--top-p", "0"], ["--top-p 0 keeps no token"]),
    "top_p word": (["generate", "x", "--top-p", "abc"], ["--top-p 'abc'", "above 0 and up to 1"]),
    "seed": (["chat", "--seed", str(1 << 63)], [f"from {-(1 << 63)} to {(1 << 63) - 1}"]),
    "top_k": (["generate", "x", "--top-k", "-2"], ["--top-k -2", "-1"]),
    "min_p": (["generate", "x", "--min-p", "2"], ["--min-p 2 is", "0 to 1"]),
    "schema file": (
        ["generate", "x", "--json-schema", "/no/such"],
        ["--json-schema '/no/such'", "No such file", "expected a text file"],
    ),
    "schema": (["generate", "x", "--json-schema", "{"], ["--json-schema:", "no JSON schema"]),
    "schema type": (
        ["generate", "x", "--json-schema", '{"type": "strin"}'],
        ["--json-schema:", "grammar cannot be compiled", "strin"],
    ),
    "schema elsewhere": (
        ["generate", "x", "--json-schema", '{"$ref": "http://a/"}'],
        ["--json-schema:", "'http://a/'", "begins with #"],
    ),
    "regex": (["generate", "x", "--regex", "["], ["--regex:", "invalid regex"]),
    "grammar file": (["generate", "x", "--grammar", "/no"], ["--grammar '/no'", "No such file"]),
    "two forms": (
        ["generate", "x", "--regex", "a", "--json-schema", "{}"],
        ["--json-schema and --regex", "one of them"],
    ),
    "tool parser": (["serve", "--tool-parser", "qwen"], ["'qwen'", "auto, hermes, llama"]),
    "port": (["serve", "--port", "99999"], ["--port 99999", "from 0 to 65535", "is 65535"]),
    "port word": (["serve", "--port", "http"], ["'http'", "whole number"]),
    "log level": (["serve", "--log-level", "warn"], ["'warn'", "debug, info", "is 'warning'"]),
    "seconds": (["serve", "--drain-timeout", "-1"], ["'-1'", "seconds above 0", "is 1"]),
    "seconds nan": (["serve", "--body-timeout", "nan"], ["'nan'", "seconds"]),
    "rate": (["serve", "--requests-per-minute", "0"], ["--requests-per-minute 0", "is 1"]),
    "body": (["serve", "--max-body", "lots"], ["'lots'", "K, M, G or T"]),
    "key": (["serve", "--api-key", "two words"], ["an API key", "printable ASCII"]),
    "key file": (["serve", "--api-key-file", "/no/such"], ["'/no/such'", "No such file"]),
    "no key in the file": (["serve", "--api-key-file", "/dev/null"], ["'/dev/null'", "has no key"]),
    "key folder": (["serve", "--api-key-file", "/"], ["'/'", "Is a directory", "text file"]),
    "allowed host": (["serve", "--allowed-host", "http://x"], ["'http://x'", "without scheme"]),
    "allowed port": (["serve", "--allowed-host", "x:80"], ["'x:80'", "port", "'*'"]),
    "origin": (["serve", "--cors-origin", "a.example"], ["'a.example'", "https://app.example.org"]),
    "serve option": (["serve", "--api-keys", "x"], ["'--api-keys'", "is '--api-key'"]),
    "serve models": (["serve", "a", "--model", "b"], ["'a'", "'b'", "one of them"]),
    "host": (["serve", "--host", "no.such.host.invalid"], ["'no.such.host.invalid'", "127.0.0.1"]),
    "host of others": (["serve", "--host", "192.0.2.1"], ["'192.0.2.1'", "no address of this"]),
    "two models": (["chat", "a", "--model", "b"], ["'a'", "'b'", "one of them"]),
    "batch": (["bench", "latency", "--batch", "1,x"], ["'1,x'", "'x'", "whole", "is '1'"]),
    "batch gap": (["bench", "latency", "--batch", "1,,2"], ["--batch '1,,2'", "whole", "is '1,2'"]),
    "competitor": (
        ["bench", "latency", "--against", "vllm"],
        ["'vllm'", "transformers, llama.cpp"],
    ),
    "competitor case": (["bench", "latency", "--against", "llama"], ["is 'llama.cpp'"]),
    "no competitor": (["bench", "latency", "--against", ""], ["--against ''", "transformers"]),
    "two lines": (["generate", "x", "--dtype", "a\nb"], ["'a\\nb'", "float32"]),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_is_one_line(name: str, layline: Callable[..., Any], loader: Any) -> None:
    arguments, parts = MISTAKES[name]
    result = layline(*arguments)
    assert result.status == 2
    assert result.out == ""
    assert result.err.startswith("layline: ")
    assert result.err.count("\n") == 1
    assert result.err.endswith("\n")
    for part in parts:
        assert part in result.err
    assert loader.opened == [], "a mistake must be found before the model is loaded"


def test_engine_error_keeps_its_message_and_status(layline: Any, loader: Any) -> None:
    for error, status in (
        (ModelNotFoundError("no model 'x'\nanywhere"), 2),
        (CheckpointError("file is broken"), 2),
        (RunError("out of memory"), 3),
    ):
        loader.error = error
        result = layline("generate", "hello")
        assert result.status == status
        assert result.err == f"layline: {' '.join(str(error).split())}\n"
        assert result.out == ""


def test_unknown_model_names_what_is_known(layline: Any) -> None:
    result = layline("generate", "hello", "--model", "smollm2-135n")
    assert result.status == 2
    assert result.err.count("\n") == 1
    assert "'smollm2-135n'" in result.err
    assert "smollm2-135m" in result.err


def test_unexpected_failure_leaves_a_traceback_in_a_file(
    layline: Any, loader: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    loader.error = KeyError("lost")
    result = layline("generate", "hello")
    assert result.status == 3
    assert result.err.count("\n") == 1
    assert result.err.startswith("layline: internal error: KeyError: 'lost'; traceback in ")
    log = Path(result.err.split("traceback in ")[1].strip())
    assert log.parent == tmp_path / "layline"
    assert "Traceback" in log.read_text(encoding="utf-8")


def test_unwritable_state_directory_is_no_second_failure(
    layline: Any, loader: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a directory", encoding="utf-8")
    monkeypatch.setenv("XDG_STATE_HOME", str(blocked))
    loader.error = KeyError("lost")
    result = layline("generate", "hello")
    log = Path(result.err.split("traceback in ")[1].strip())
    assert result.status == 3
    assert "KeyError" in log.read_text(encoding="utf-8")
    log.unlink()


def test_interrupt_while_loading_is_130_without_a_word(layline: Any, loader: Any) -> None:
    loader.error = KeyboardInterrupt()
    result = layline("generate", "hello")
    assert (result.status, result.err) == (130, "")


@pytest.mark.parametrize(
    "arguments",
    [
        ["zzz"],
        ["generate", "x", "--foo"],
        ["generate", "x", "-x"],
        ["generate", "x", "--top-p", "abc"],
        ["bench", "latency", "--against", ""],
    ],
)
def test_nothing_is_named_where_nothing_is_near(layline: Any, arguments: list[str]) -> None:
    assert "nearest" not in layline(*arguments).err


def test_a_nearest_option_takes_the_place_of_the_list(layline: Any) -> None:
    err = layline("generate", "x", "--temp", "1").err
    assert "--top-k" not in err
    assert "layline generate --help" in err


def test_a_seed_may_be_negative_as_in_sampling_params(layline: Any, loader: Any) -> None:
    assert layline("generate", "x", "--seed", "-1").status == 0
    assert loader.llm.params[0].seed == -1


def test_engine_keywords_are_told_as_flags() -> None:
    from layline.cli.session import with_flags

    told = with_flags("max_model_len 99 is beyond; lower it (kv_memory 1 holds less)")
    assert told == "--max-model-len 99 is beyond; lower it (--kv-memory 1 holds less)"
    for kept in ("/a/max_model_len is no folder", "no model 'max_model_len '"):
        assert with_flags(kept) == kept


HELP = {
    "generate": [
        "--model MODEL",
        "--max-tokens INT",
        "--temperature FLOAT",
        "--stop TEXT",
        "--device [cpu|cuda]",
        "--dtype [auto|float32|bfloat16|float16]",
        "--kv-memory SIZE",
        "[default: (the model's context)]",
        "[default: (half of memory)]",
        "[default: 16]",
        "- reads it from stdin",
    ],
    "chat": ["[default: (smollm2-135m)]", "--max-running INT"],
    "bench latency": ["[default: (smollm2-135m)]", "--repeats INT", "--batch INT,..."],
}


@pytest.mark.parametrize("command", HELP)
def test_help_names_kinds_of_values_and_defaults(layline: Any, command: str) -> None:
    text = " ".join(layline(*command.split(), "--help").out.split())
    for part in HELP[command]:
        assert part in text
    assert "parse" not in text.lower()


def test_the_list_of_commands_is_not_cut_short(layline: Any) -> None:
    listed = layline("--help").out.split("Commands:")[1]
    assert "..." not in listed + layline("bench", "--help").out.split("Commands:")[1]
    assert "doors in effect." in " ".join(listed.split())
