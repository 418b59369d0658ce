"""``config:DIR``: random weights, deterministic and of the right size."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from layline.errors import CorruptFileError, ModelNotFoundError, TensorError
from layline.weights.opening import open_checkpoint


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 64}')
    return tmp_path


def filled(
    directory: Path, name: str, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    out = torch.full(shape, torch.nan, dtype=dtype)
    open_checkpoint(f"config:{directory}", seed=seed).read_into(name, out)
    return out


def test_configuration_without_tensors(directory: Path) -> None:
    checkpoint = open_checkpoint(f"config:{directory}")
    assert checkpoint.kind == "random"
    assert checkpoint.config["hidden_size"] == 64
    assert checkpoint.generation == {}
    assert not checkpoint.infos()
    assert checkpoint.vocabulary().directory is None
    assert checkpoint.vocabulary().gguf_metadata is None
    with pytest.raises(TensorError, match="is not stored"):
        checkpoint.read("model.norm.weight")
    checkpoint.close()


def test_a_json_file_by_any_name(directory: Path) -> None:
    (directory / "config.json").rename(directory / "other.json")
    assert open_checkpoint(f"config:{directory / 'other.json'}").config["hidden_size"] == 64


def test_the_folder_is_the_vocabulary_when_it_has_one(directory: Path) -> None:
    (directory / "tokenizer.json").write_text("{}")
    assert open_checkpoint(f"config:{directory}").vocabulary().directory == directory


def test_values_depend_on_name_and_seed_only(directory: Path) -> None:
    first = filled(directory, "a.weight", 32, 64)
    assert torch.equal(first, filled(directory, "a.weight", 32, 64))
    assert not torch.equal(first, filled(directory, "b.weight", 32, 64))
    assert not torch.equal(first, filled(directory, "a.weight", 32, 64, seed=1))


def test_a_dtype_rounds_the_same_draw(directory: Path) -> None:
    exact = filled(directory, "a.weight", 3000, 512)
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(filled(directory, "a.weight", 3000, 512, dtype=dtype), exact.to(dtype))


def test_strides_do_not_matter(directory: Path) -> None:
    out = torch.empty(64, 32).T
    open_checkpoint(f"config:{directory}").read_into("a.weight", out)
    assert torch.equal(out, filled(directory, "a.weight", 32, 64))


@pytest.mark.parametrize("columns", [64, 1024])
def test_matrices_scale_with_their_columns(directory: Path, columns: int) -> None:
    values = filled(directory, "model.layers.0.mlp.up_proj.weight", 2048, columns)
    assert values.std().item() == pytest.approx(columns**-0.5, rel=0.02)
    assert abs(values.mean().item()) < 0.01


def test_norms_are_one_and_biases_small(directory: Path) -> None:
    for name in ("model.norm.weight", "model.layers.0.input_layernorm.weight", "x.q_norm.weight"):
        assert torch.equal(filled(directory, name, 64), torch.ones(64))
    bias = filled(directory, "model.layers.0.self_attn.q_proj.bias", 4096)
    assert bias.std().item() == pytest.approx(0.02, rel=0.1)


def test_empty_tensors(directory: Path) -> None:
    assert filled(directory, "a.weight", 0, 64).shape == (0, 64)


def test_errors(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"expected a folder with a config.json"):
        open_checkpoint(f"config:{tmp_path}")
    with pytest.raises(ModelNotFoundError, match="expected a folder"):
        open_checkpoint("config:/no/such/place")
    (tmp_path / "config.json").write_text("[")
    with pytest.raises(CorruptFileError, match="not valid JSON"):
        open_checkpoint(f"config:{tmp_path}")
