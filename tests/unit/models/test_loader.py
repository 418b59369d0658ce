"""What is wrong with a checkpoint is said in one line: file, tensor, expected, found."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from layline import LLM
from layline.config import EngineConfig
from layline.errors import CheckpointError, TensorError
from support.families import prompts_of, reference
from support.run import run_greedy
from support.tiny import save_tiny

Tensors = dict[str, torch.Tensor]
DOWN = "model.layers.1.mlp.down_proj.weight"


def edit(directory: Path, change: Callable[[Tensors], object]) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def set_config(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def refused(directory: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        LLM(str(directory), threads=1)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_a_missing_tensor(tmp_path: Path) -> None:
    save_tiny(tmp_path, "Llama")
    edit(tmp_path, lambda tensors: tensors.pop(DOWN))
    text = refused(tmp_path)
    assert DOWN in text
    assert "missing" in text
    assert "[48, 80]" in text
    assert str(tmp_path) in text


def test_an_unexpected_tensor(tmp_path: Path) -> None:
    save_tiny(tmp_path, "Llama")
    edit(tmp_path, lambda tensors: tensors.update({"model.layers.7.extra": torch.zeros(3)}))
    text = refused(tmp_path)
    assert "model.safetensors" in text
    assert "unexpected tensor 'model.layers.7.extra' of shape [3]" in text


def test_a_mis_shaped_tensor(tmp_path: Path) -> None:
    save_tiny(tmp_path, "Llama")
    edit(tmp_path, lambda tensors: tensors.update({DOWN: torch.zeros(48, 81)}))
    text = refused(tmp_path)
    assert "model.safetensors" in text
    assert f"'{DOWN}' has shape [48, 81]; expected [48, 80]" in text


def test_derived_buffers_of_old_checkpoints_are_passed_over(tmp_path: Path) -> None:
    save_tiny(tmp_path, "Llama")
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit(tmp_path, lambda tensors: tensors.update({name: torch.zeros(4)}))
    LLM(str(tmp_path), threads=1)


@pytest.mark.parametrize("said", [True, False, None])
def test_a_head_absent_from_the_file(tmp_path: Path, said: bool | None) -> None:
    """Tied where the configuration says so or says nothing; an error where it says untied."""
    model = save_tiny(tmp_path, "Llama", tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    set_config(tmp_path, tie_word_embeddings=said)
    if said is False:
        with pytest.raises(TensorError, match=r"lm_head\.weight"):
            LLM(str(tmp_path), threads=1)
        return
    prompt = prompts_of((6,))[0]
    _, ids, _ = run_greedy(EngineConfig(model=str(tmp_path)), [prompt], 6)
    assert ids[0] == reference(model, prompt, 6)[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtypes_of_files(tmp_path: Path, dtype: torch.dtype) -> None:
    """The values of a 16-bit file, run in float32, are the reference model's own."""
    model = save_tiny(tmp_path, "Qwen2", save_dtype=dtype)
    prompt = prompts_of((9,))[0]
    logits, _, _ = run_greedy(EngineConfig(model=str(tmp_path), dtype="float32"), [prompt], 3)
    wanted, _ = reference(model, prompt, 3)
    assert (logits[0] - wanted).abs().max() < 1e-4 * wanted.abs().max()


def test_auto_keeps_the_files_dtype(tmp_path: Path) -> None:
    expected = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float32}
    for name, runs_in in expected.items():
        save_tiny(tmp_path / name, "Llama", save_dtype=getattr(torch, name))
        assert LLM(str(tmp_path / name), threads=1)._engine._executor.loaded.dtype is runs_in


def test_many_shards_are_one_model(tmp_path: Path) -> None:
    model = save_tiny(tmp_path, "Llama", max_shard_size="40KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 3
    prompt = prompts_of((9,))[0]
    logits, _, _ = run_greedy(EngineConfig(model=str(tmp_path)), [prompt], 3)
    wanted, _ = reference(model, prompt, 3)
    assert (logits[0] - wanted).abs().max() < 1e-4 * wanted.abs().max()


def test_random_weights_from_a_configuration(tmp_path: Path) -> None:
    save_tiny(tmp_path, "Qwen3")
    (tmp_path / "model.safetensors").unlink()
    first = LLM(f"config:{tmp_path}", threads=1)
    again = LLM(f"config:{tmp_path}", threads=1)
    other = LLM(f"config:{tmp_path}", threads=1, seed=5)
    weights = [
        llm._engine._executor.loaded.runner.model.layers[1].mlp.down_proj.weight
        for llm in (first, again)
    ]
    assert torch.equal(*weights)
    assert not torch.equal(
        weights[0], other._engine._executor.loaded.runner.model.layers[1].mlp.down_proj.weight
    )
    assert 0.5 < float(weights[0].std()) * 80**0.5 < 1.5
