"""How a model argument is resolved, and what it says when it cannot be."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from layline.errors import LaylineError, ModelNotFoundError, UnsupportedFormatError
from layline.weights import cache
from layline.weights.opening import open_checkpoint


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LAYLINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("", "the model name is empty"),
        ("smollm2-135m", r"'smollm2-135m' has not been pulled.*run `layline pull smollm2-135m`"),
        ("smollm-135m", r"no model 'smollm-135m'.*did you mean 'smollm2-135m'"),
        ("zzz", r"no model 'zzz'.*known names: smollm2-135m"),
        ("org/name", r"has not been pulled into .*run `layline pull org/name`"),
        ("./nowhere", r"no such file or folder: './nowhere'"),
        ("/no/such/model.gguf", r"no such file or folder: '/no/such/model.gguf'"),
        ("x" * 5000, "no model 'xxx"),
        ("a\0b", "no model"),
    ],
)
def test_names_that_do_not_resolve(model: str, expected: str) -> None:
    with pytest.raises(ModelNotFoundError, match=expected) as error:
        open_checkpoint(model)
    assert "\n" not in str(error.value)
    assert error.value.exit_status == 2


def test_a_misspelt_file_suggests_its_neighbour(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"")
    with pytest.raises(ModelNotFoundError, match=r"did you mean 'model.gguf'.*\(in "):
        open_checkpoint(tmp_path / "modle.gguf")


def test_single_files_of_other_kinds(tmp_path: Path) -> None:
    for name, expected in (
        ("model.safetensors", "give its folder"),
        ("pytorch_model.bin", "pickled tensors, which can run code and are never loaded"),
    ):
        (tmp_path / name).write_bytes(b"x")
        with pytest.raises(UnsupportedFormatError, match=expected):
            open_checkpoint(tmp_path / name)
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(LaylineError, match="not a GGUF file"):
        open_checkpoint(tmp_path / "notes.txt")


def test_a_pipe_is_refused_and_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.gguf")
    with pytest.raises(ModelNotFoundError, match="neither a folder nor a regular file"):
        open_checkpoint(tmp_path / "model.gguf")


def test_cache_root_follows_the_override_and_xdg(tmp_path: Path) -> None:
    root = cache.cache_root
    assert root({"LAYLINE_CACHE": str(tmp_path), "XDG_CACHE_HOME": "/x"}) == tmp_path
    assert root({"XDG_CACHE_HOME": "/x"}) == Path("/x/layline")
    home = Path.home() / ".cache" / "layline"
    assert root({}) == root({"XDG_CACHE_HOME": "relative"}) == home
    assert root({"LAYLINE_CACHE": "", "XDG_CACHE_HOME": ""}) == home


def test_opening_imports_no_torch(tmp_path: Path) -> None:
    from tiny_gguf import write_gguf

    path = write_gguf(tmp_path / "m.gguf")
    (tmp_path / "config.json").write_text("{}")
    code = (
        "import sys\n"
        "from layline.weights.opening import open_checkpoint\n"
        "import layline.weights.pull, layline.weights.hub\n"
        f"open_checkpoint({str(path)!r}).infos()\n"
        f"open_checkpoint({'config:' + str(tmp_path)!r}).infos()\n"
        "heavy = {'torch', 'numpy', 'gguf', 'transformers', 'huggingface_hub'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert result.stdout.strip() == "[]"
