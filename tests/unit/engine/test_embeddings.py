"""Embeddings: transformers' pooled hidden states, however the prompts are computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from layline import LLM, SamplingParams
from layline.engine.scheduler import BLOCK_SIZE
from layline.errors import (
    CorruptFileError,
    PromptError,
    UnsupportedModelError,
    UsageError,
)
from support.embedding import END, modules, reference, save_embedder, unit
from support.tiny import VOCAB, save_tiny

TOLERANCE = 2e-5
LENGTHS = (1, 2, 15, 16, 17, 40, 63, 64)
GREEDY = SamplingParams(temperature=0.0, max_tokens=2)


def prompts(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(6)
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in lengths]


def check(llm: LLM, model: Any, mode: str = "lasttoken", *, normalised: bool = True) -> None:
    for output, ids in zip(llm.embed(prompts()), prompts(), strict=True):
        wanted = reference(model, ids, mode=mode)
        wanted = unit(wanted) if normalised else wanted
        found = torch.from_numpy(output.embedding)
        assert found.dtype == torch.float32
        assert output.prompt_token_ids == ids
        torch.testing.assert_close(found, wanted, atol=TOLERANCE, rtol=1e-4)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("mode", ["lasttoken", "mean"])
@pytest.mark.parametrize("chunk", [5, 16, 2048])
def test_they_are_those_of_transformers(
    tmp_path: Path, mode: str, chunk: int, overlap: bool
) -> None:
    model = save_embedder(tmp_path, mode=mode)
    llm = LLM(str(tmp_path), threads=1, prefill_tokens=chunk, overlap=overlap)
    check(llm, model, mode)
    check(llm, model, mode)  # With what the first time has left in the cache.
    stats = llm._engine.stats()
    assert stats.blocks_held == 0
    assert (stats.prefix_hits > 0) == (mode == "lasttoken")


@pytest.mark.parametrize(
    ("family", "changes"),
    [("Llama", {"attention_bias": True}), ("Mistral", {"sliding_window": 7}), ("Qwen2", {})],
)
def test_families(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    model = save_embedder(tmp_path, family, bare=False, normalised=False, **changes)
    check(LLM(str(tmp_path), threads=1), model, normalised=False)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ["Qwen3Model", "Qwen3ForCausalLM"])
def test_the_names_that_such_checkpoints_have(tmp_path: Path, name: str, tied: bool) -> None:
    model = save_embedder(tmp_path, bare=tied, tie_word_embeddings=tied)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**config, "architectures": [name]}), encoding="utf-8")
    check(LLM(str(tmp_path), threads=1), model)


def test_a_new_way_to_name_the_pooling(tmp_path: Path) -> None:
    model = save_embedder(tmp_path)
    config = {"embedding_dimension": 48, "pooling_mode": "mean", "include_prompt": True}
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    check(LLM(str(tmp_path), threads=1), model, "mean")


def test_text_is_ended_as_the_tokenizer_says(tmp_path: Path) -> None:
    save_embedder(tmp_path)
    llm = LLM(str(tmp_path), threads=1)
    (text,), (ids,) = llm.embed("w2 w6"), llm.embed([5, 9, END])
    assert text.prompt_token_ids == ids.prompt_token_ids
    assert (text.embedding == ids.embedding).all()


def test_fewer_dimensions_are_the_first_at_length_one(tmp_path: Path) -> None:
    save_embedder(tmp_path)
    llm = LLM(str(tmp_path), threads=1)
    (whole,), (short,) = llm.embed([5, 9]), llm.embed([5, 9], dimensions=7)
    assert short.embedding.shape == (7,)
    np.testing.assert_allclose(np.linalg.norm(short.embedding), 1, atol=1e-6)
    first = whole.embedding[:7]
    np.testing.assert_allclose(short.embedding, first / np.linalg.norm(first), atol=1e-6)
    for bad in (0, 49, -1, True, "7"):
        with pytest.raises(UsageError, match=rf"dimensions {bad!r} .*expected 1 to 48"):
            llm.embed([5], dimensions=bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("mode", ["lasttoken", "mean"])
def test_a_prompt_preempted_half_way(tmp_path: Path, mode: str, overlap: bool) -> None:
    model = save_embedder(tmp_path, mode=mode)
    llm = LLM(str(tmp_path), threads=1, prefill_tokens=BLOCK_SIZE, overlap=overlap)
    engine, ids = llm._engine, prompts()[-1]
    request = engine.submit(ids, SamplingParams(), embeds=True)
    for _ in range(2):
        engine.step()
    (queue,) = engine._scheduler.parts
    queue._preempt(queue._running[request.request_id])
    engine.run([request])
    wanted = reference(model, ids, mode=mode) * (len(ids) if mode == "mean" else 1)
    torch.testing.assert_close(torch.tensor(request.hidden_sum), wanted, atol=1e-3, rtol=1e-4)


def test_each_kind_of_model_refuses_the_other_work(tmp_path: Path) -> None:
    save_embedder(tmp_path / "embeds")
    save_tiny(tmp_path / "writes", "Llama")
    embeds = LLM(str(tmp_path / "embeds"), threads=1)
    writes = LLM(str(tmp_path / "writes"), threads=1)
    for work in (lambda: embeds.generate([[5]], GREEDY), lambda: embeds.stream([5], GREEDY)):
        with pytest.raises(UnsupportedModelError, match=r"makes embeddings and generates no text"):
            work()
    with pytest.raises(UnsupportedModelError, match=r"makes no embeddings; expected .*1_Pooling"):
        writes.embed([5])
    with pytest.raises(PromptError, match="65 tokens; expected at most 64, which is the context"):
        embeds.embed([[5] * 65])
    with pytest.raises(PromptError, match=r"^prompt 1: the prompt is empty"):
        embeds.embed([[5], []])


def pooled_by(**modes: Any) -> dict[str, Any]:
    return {"1_Pooling/config.json": {"word_embedding_dimension": 48, **modes}}


DENSE = {"idx": 3, "name": "3", "path": "3_Dense", "type": "sentence_transformers.models.Dense"}


@pytest.mark.parametrize(
    ("files", "error", "text"),
    [
        (
            pooled_by(pooling_mode_cls_token=True),
            UnsupportedModelError,
            "pools by cls_token; expect",
        ),
        (pooled_by(pooling_mode="max"), UnsupportedModelError, "pools by max; expected one of"),
        (
            pooled_by(pooling_mode_mean_tokens=True, pooling_mode_lasttoken=True),
            UnsupportedModelError,
            "pools by mean and lasttoken; expected one of lasttoken, mean",
        ),
        (pooled_by(), UnsupportedModelError, "pools by nothing"),
        ({"modules.json": [*modules(), DENSE]}, UnsupportedModelError, "Normalize, Dense; expect"),
        ({"modules.json": modules()[:1]}, UnsupportedModelError, "the modules Transformer; expect"),
        ({"modules.json": {}}, CorruptFileError, "expected a JSON array, found dict"),
        ({"modules.json": [1]}, CorruptFileError, "expected a list of modules with a type"),
        (
            {"modules.json": [modules()[0], {**modules()[1], "path": "../elsewhere"}]},
            CorruptFileError,
            "leaves the folder",
        ),
        (
            {"modules.json": [modules()[0], {**modules()[1], "path": "7_Pooling"}]},
            CorruptFileError,
            "no 7_Pooling/config.json, which modules.json names",
        ),
    ],
)
def test_layouts_that_are_not_supported(
    tmp_path: Path, files: dict[str, Any], error: type[Exception], text: str
) -> None:
    save_embedder(tmp_path)
    for name, value in files.items():
        (tmp_path / name).write_text(json.dumps(value), encoding="utf-8")
    with pytest.raises(error, match=text) as caught:
        LLM(str(tmp_path), threads=1)
    assert "\n" not in str(caught.value)


def test_attention_to_later_tokens_is_refused(tmp_path: Path) -> None:
    save_embedder(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**config, "is_causal": False}), encoding="utf-8")
    with pytest.raises(UnsupportedModelError, match="expected a model whose attention is causal"):
        LLM(str(tmp_path), threads=1)
