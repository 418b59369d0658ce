"""Sampled tokens are distributed as the model says, whatever is proposed.

The distribution is transformers': its logits, and a softmax written here. Seeds are fixed, so that
the tests say the same every time; the bound is what a right sampler exceeds once in ten thousand.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from layline import LLM, SamplingParams
from layline.engine import core
from support.fake_drafts import Garbage
from support.speculative import LOOP, Checkpoints, replace_proposer

KEPT = 3
TEMPERATURE = 1.7
SEEDS = 1200
TOKENS = 3
LEAST = 5.0
"""Cells in which fewer are expected are counted as one."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("drawn"))


@pytest.fixture(scope="module")
def expected(checkpoints: Checkpoints) -> dict[tuple[int, ...], float]:
    """The probability of each continuation of LOOP by three tokens."""
    return probabilities(checkpoints.model, LOOP)


@torch.inference_mode()
def probabilities(model: Any, prompt: list[int]) -> dict[tuple[int, ...], float]:
    found = {(): 1.0}
    for _ in range(TOKENS):
        longer = {}
        for tokens, probability in found.items():
            logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, -1].double()
            best = logits.topk(KEPT)
            shares = torch.softmax(best.values / TEMPERATURE, 0)
            for token, share in zip(best.indices.tolist(), shares.tolist(), strict=True):
                longer[*tokens, token] = probability * share
        found = longer
    return found


def deviation(llm: LLM, expected: dict[tuple[int, ...], float]) -> tuple[float, float]:
    """Pearson's statistic of what ``llm`` draws, and the bound for its degrees of freedom."""
    params = [
        SamplingParams(
            temperature=TEMPERATURE, top_k=KEPT, seed=seed, max_tokens=TOKENS, ignore_eos=True
        )
        for seed in range(SEEDS)
    ]
    outputs = llm.generate([LOOP] * SEEDS, params, progress=False)
    drawn = Counter(tuple(output.token_ids) for output in outputs)
    likely = {cell: p for cell, p in expected.items() if p * SEEDS >= LEAST}
    rest = (1.0 - sum(likely.values())) * SEEDS
    counted = sum(drawn[cell] for cell in likely)
    total = sum((drawn[cell] - p * SEEDS) ** 2 / (p * SEEDS) for cell, p in likely.items())
    total += (SEEDS - counted - rest) ** 2 / max(rest, LEAST)
    degrees = len(likely)
    assert degrees >= 15
    # Wilson and Hilferty's approximation of the 0.9999 quantile.
    part = 2 / (9 * degrees)
    return total, degrees * (1 - part + 3.719 * part**0.5) ** 3


@pytest.mark.parametrize("kind", ["off", "near", "other"])
def test_continuations_are_distributed_as_the_model_says(
    kind: str, checkpoints: Checkpoints, expected: dict[tuple[int, ...], float]
) -> None:
    llm = checkpoints.llm(kind, max_running=24)
    found, bound = deviation(llm, expected)
    assert found < bound
    stats = llm.stats()
    if kind == "near":
        assert 0 < stats.accepted < stats.drafted
    if kind == "other":
        assert stats.drafted > 0


def test_garbage_does_not_bend_the_distribution(
    checkpoints: Checkpoints, expected: dict[tuple[int, ...], float]
) -> None:
    llm = checkpoints.llm("off", max_running=16)
    likely = max(expected, key=lambda tokens: expected[tokens])
    replace_proposer(llm, Garbage(likely[1]))
    found, bound = deviation(llm, expected)
    assert found < bound
    stats = llm.stats()
    assert 0 < stats.accepted < stats.drafted


def test_a_verifier_that_does_not_compare_is_seen(
    checkpoints: Checkpoints,
    expected: dict[tuple[int, ...], float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The canary: drafts that are taken unseen are another distribution."""
    monkeypatch.setattr(core, "is_verified", lambda entry: True)
    found, bound = deviation(checkpoints.llm("near", max_running=16), expected)
    assert found > bound


def test_another_models_distribution_is_seen(
    checkpoints: Checkpoints, expected: dict[tuple[int, ...], float], tmp_path: Path
) -> None:
    """The test tells a model from one whose weights are off by a twentieth of their spread."""
    checkpoints.save_like(tmp_path, 0.05)
    found, bound = deviation(LLM(str(tmp_path), threads=1, max_running=24), expected)
    assert found > bound
