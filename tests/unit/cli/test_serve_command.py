"""``layline serve`` up to the moment the model would be loaded: flags, keys, what it logs."""

from __future__ import annotations

import importlib.util
import logging
import socket
from pathlib import Path
from typing import Any

import pytest

from layline.cli.options import RunOptions
from layline.cli.serve import ServeOptions, announce, require_packages, served_name
from layline.errors import UsageError
from layline.serve.hosts import is_loopback
from layline.serve.server import bind, url_of
from layline.serve.settings import ServeSettings
from support.serving import save_talker


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("announced")
    save_talker(path, context=256)
    return path


def test_a_taken_port_is_found_before_the_model(layline: Any, loader: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = layline("serve", "--port", port)
    assert (result.status, result.out) == (2, "")
    assert result.err.startswith(f"layline: --port {port} on 127.0.0.1 cannot be listened on")
    assert result.err.count("\n") == 1
    assert loader.opened == []


def test_an_unknown_model_is_one_line(layline: Any, loader: Any) -> None:
    result = layline("serve", "smollm2-135n", "--port", "0")
    assert result.status == 2
    assert result.err.count("\n") == 1
    assert "'smollm2-135n'" in result.err
    assert loader.opened == []


def test_keys_come_from_flags_file_and_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys"
    path.write_text("# ours\nthird\n\n first \n")
    monkeypatch.setenv("LAYLINE_API_KEYS", "second, first,")
    options = ServeOptions(api_key=["first"], api_key_file=path)
    assert options.keys() == ("first", "second", "third")
    assert options.settings("m").shown()["api_keys"] == 3
    path.write_text("# none\n")
    with pytest.raises(UsageError, match="has no key"):
        options.keys()
    path.write_bytes(b"\xff")
    with pytest.raises(UsageError, match="not UTF-8"):
        options.keys()


def test_what_requests_call_the_model(tmp_path: Path) -> None:
    (tmp_path / "a-model").mkdir()
    (tmp_path / "file.Q4_1.gguf").touch()
    assert served_name("smollm2-135m") == "smollm2-135m"
    assert served_name(str(tmp_path / "a-model") + "/") == "a-model"
    assert served_name(f"config:{tmp_path / 'a-model'}") == "a-model"
    assert served_name(str(tmp_path / "file.Q4_1.gguf")) == "file.Q4_1"
    options = ServeOptions(served_model_name="other")
    assert options.settings("smollm2-135m").model_name == "other"


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "uvicorn" else object()
    )
    with pytest.raises(UsageError, match=r"needs uvicorn.*pip install 'layline\[serve\]'"):
        require_packages()


def lines(caplog: pytest.LogCaptureFixture, model: Path, *, kv: int | None, **given: Any) -> str:
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="layline.serve"):
        announce(str(model), RunOptions(kv_memory=kv, tp=2), ServeSettings(**given))
    return "\n".join(f"{r.levelname} {r.getMessage()}" for r in caplog.records)


def test_the_plan_and_the_memory_are_told_before_loading(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = lines(caplog, checkpoint, kv=1 << 20, api_keys=("secret-key",))
    assert (
        "INFO plan: LlamaForCausalLM, 3 layers, float32 (safetensors: 23 F32), context 256" in text
    )
    assert "pipeline of 1 stage, layers 0 to 2" in text
    assert "INFO plan: tp 2, policy" in text
    # 3 layers x keys and values x 1 of 2 heads x 8 values x 4 bytes.
    assert (
        "keys and values 0.8 MiB (0.2 KiB a token as float32, 4,112 tokens, at most 16 requests"
        in text
    )
    assert "slots between pipeline stages 0 MiB" in text
    assert "fits in" in text
    assert "kv_memory=1048576" in text
    assert "secret-key" not in text
    assert "WARNING" not in text
    large = lines(caplog, checkpoint, kv=1 << 50)
    assert "does not fit in" not in large, "16 requests of 256 tokens are all it would use"


def test_quantised_keys_are_counted_with_their_scales(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="layline.serve"):
        announce(str(checkpoint), RunOptions(kv_dtype="int8", tp=2), ServeSettings())
    text = "\n".join(record.getMessage() for record in caplog.records)
    # 3 layers x keys and values x 1 of 2 heads x (8 values and a scale of 2 bytes): 60 bytes.
    assert "keys and values 0.2 MiB (0.1 KiB a token as int8, 4,112 tokens" in text


def test_what_does_not_fit_is_a_warning(
    checkpoint: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("layline.engine.room.cpu_bytes", lambda: 1 << 16)
    text = lines(caplog, checkpoint, kv=1 << 20)
    (line,) = [line for line in text.splitlines() if "memory of each" in line]
    assert line.startswith("WARNING")
    assert "does not fit in the 0.0 MiB of cpu memory that a rank has" in line
    text = lines(caplog, checkpoint, kv=1 << 10)
    (line,) = [line for line in text.splitlines() if "memory of each" in line]
    assert line.startswith("WARNING")
    assert line.endswith("does not fit, one request of 256 tokens has no room")


def test_the_configuration_is_the_effective_one(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines(caplog, checkpoint, kv=None, port=1234)
    (told,) = [record.fields for record in caplog.records if hasattr(record, "fields")]  # type: ignore[attr-defined]
    shown = told["configuration"]
    assert shown["port"] == 1234
    assert shown["model"] == str(checkpoint)
    # What the flags left open has the value that it will have.
    assert (shown["dtype"], shown["kv_dtype"]) == ("float32", "float32")
    assert (shown["max_model_len"], shown["dense_tp"], shown["tp"]) == (256, 2, 2)
    assert shown["threads"] >= 2
    assert shown["boundary_reduction"] != "auto"


def test_an_open_server_is_a_warning(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    open_to_all = lines(caplog, checkpoint, kv=None, host="0.0.0.0")
    assert "WARNING 0.0.0.0 can be reached from other machines and no API key is set" in open_to_all
    assert "no API key" not in lines(caplog, checkpoint, kv=None, host="0.0.0.0", api_keys=("k",))
    assert "--cors-origin '*'" in lines(caplog, checkpoint, kv=None, cors_origins=("*",))
    assert is_loopback("::1")
    assert is_loopback("localhost")
    assert not is_loopback("example.org")


def test_addresses_of_both_families() -> None:
    with bind("127.0.0.1", 0) as sock:
        assert url_of(sock).startswith("http://127.0.0.1:")
    try:
        with bind("::1", 0) as sock:
            assert url_of(sock).startswith("http://[::1]:")
    except UsageError:
        pytest.skip("this machine has no IPv6")
