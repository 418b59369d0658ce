"""The distributions drawn from, against transformers' logits processors.

A draw at random number u is the inverse of the cumulative distribution over ascending ids. The
reference's cumulative distribution, in float64, says which id that is; asking at the middle of
every id's interval, and just inside both of its ends, pins support, probabilities and order.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from transformers.generation import logits_process as reference

from layline.layers.sampler import Sampler
from layline.sampling import SamplingParams
from support.row_states import row_state

VOCAB = 97
PROMPT = [3, 14, 15, 92, 65, 35, 3, 3, 58]
OUTPUT = [9, 79, 3, 9, 9, 46]
EOS = {2, 46}


def random_logits(seed: int, vocab: int = VOCAB, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * spread


def reference_probabilities(logits: torch.Tensor, params: SamplingParams) -> np.ndarray:
    """What transformers makes of a row, and the OpenAI formula for its two penalties."""
    scores = logits[None].clone()
    ids = torch.tensor([PROMPT + OUTPUT])
    steps: list[object] = []
    if params.logit_bias:
        bias = {(token_id,): float(value) for token_id, value in params.logit_bias.items()}
        steps.append(reference.SequenceBiasLogitsProcessor(bias))
    if params.repetition_penalty != 1.0:
        steps.append(reference.RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    for step in steps:
        scores = step(ids, scores)  # type: ignore[operator]
    for token_id in set(OUTPUT):
        scores[0, token_id] -= params.presence_penalty
        scores[0, token_id] -= params.frequency_penalty * OUTPUT.count(token_id)
    steps = []
    if params.min_tokens:
        ends = sorted(EOS | set(params.stop_token_ids))
        minimum = reference.MinNewTokensLengthLogitsProcessor(len(PROMPT), params.min_tokens, ends)
        steps.append(minimum)
    steps.append(reference.TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        steps.append(reference.TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        steps.append(reference.TopPLogitsWarper(params.top_p))
    if params.min_p:
        steps.append(reference.MinPLogitsWarper(params.min_p))
    for step in steps:
        scores = step(ids, scores)  # type: ignore[operator]
    return torch.softmax(scores[0].double(), dim=0).numpy()


def assert_same_distribution(probe, logits: torch.Tensor, params: SamplingParams) -> None:
    expected = reference_probabilities(logits, params)
    ends = np.cumsum(expected)
    uniforms, tokens = [], []
    for token_id in np.flatnonzero(expected > 2e-5):
        low, high = ends[token_id] - expected[token_id], ends[token_id]
        for value in (low + 5e-6, (low + high) / 2, high - 5e-6):
            uniforms.append(min(max(float(value), 1e-12), 1 - 1e-12))
            tokens.append(int(token_id))
    state = {"prompt_ids": PROMPT, "output_ids": OUTPUT, "eos_ids": EOS}
    assert probe.tokens(logits, params, uniforms, **state) == tokens


SINGLE = [
    {},
    {"temperature": 0.3},
    {"temperature": 2.5},
    {"temperature": 100},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": VOCAB - 1},
    {"top_k": VOCAB},
    {"top_k": 5000},
    {"top_p": 0.9},
    {"top_p": 0.05},
    {"top_p": 0.999},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.7},
    {"presence_penalty": 1.5},
    {"presence_penalty": -2.0},
    {"frequency_penalty": 0.8},
    {"frequency_penalty": -0.5},
    {"logit_bias": {5: 3.5, 9: -4.0, 96: 2.0}},
    {"min_tokens": 7, "stop_token_ids": [11, 50]},
    {"min_tokens": len(OUTPUT), "stop_token_ids": [11, 50]},
]


@pytest.mark.parametrize("values", SINGLE, ids=str)
def test_each_parameter_gives_the_distribution_of_transformers(probe, values):
    for seed in range(3):
        assert_same_distribution(probe, random_logits(seed), SamplingParams(**values))


CHOICES = {
    "temperature": [0.7],
    "top_k": [0, 12],
    "top_p": [1.0, 0.85],
    "min_p": [0.0, 0.05],
    "repetition_penalty": [1.0, 1.25],
    "presence_penalty": [0.0, 0.9],
    "frequency_penalty": [0.0, 0.4],
    "logit_bias": [None, {9: 6.0, 20: -3.0}],
    "min_tokens": [0, 20],
}


def test_every_combination_gives_the_distribution_of_transformers(probe):
    for seed, values in enumerate(itertools.product(*CHOICES.values())):
        params = SamplingParams(**dict(zip(CHOICES, values, strict=True)))
        assert_same_distribution(probe, random_logits(seed), params)


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.995])
@pytest.mark.parametrize("spread", [0.5, 2.5])
def test_a_large_vocabulary_has_the_nucleus_of_transformers(probe, spread, top_p):
    # Nuclei from tens to 19,000 ids: found among the first ones tried, and by sorting everything.
    logits = random_logits(1, vocab=20_000, spread=spread)
    params = SamplingParams(top_p=top_p)
    expected = reference_probabilities(logits, params)
    last = int(np.argmin(np.where(expected > 0, expected, np.inf)))
    ends = np.cumsum(expected)
    grid = [(i + 0.5) / 100 for i in range(100)]
    for value, token_id in zip(grid, probe.tokens(logits, params, grid), strict=True):
        assert expected[token_id] > 0
        assert ends[token_id] - expected[token_id] - 1e-5 <= value <= ends[token_id] + 1e-5
    edge = float(ends[last] - expected[last] / 2)
    assert abs(probe.tokens(logits, params, [edge])[0] - last) <= (0 if spread > 2 else 50)


def test_greedy_is_the_argmax_of_what_transformers_computes(sampler):
    for seed, values in enumerate(itertools.product([1.0, 1.8], [0.0, 2.0], [None, {9: 4.0}])):
        names = ("repetition_penalty", "presence_penalty", "logit_bias")
        edits = dict(zip(names, values, strict=True))
        logits = random_logits(seed)
        row = row_state(
            SamplingParams(temperature=0, **edits),
            seed=0,
            valid_vocab=VOCAB,
            prompt_ids=PROMPT,
            output_ids=OUTPUT,
        )
        expected = reference_probabilities(logits, SamplingParams(**edits)).argmax()
        assert sampler.sample(logits[None], [row]).read() == [expected]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_logprobs_are_the_log_softmax_of_the_raw_logits(sampler, dtype):
    logits = torch.stack([random_logits(seed) for seed in range(3)]).to(dtype)
    # Nothing that changes the choice changes what is reported.
    params = SamplingParams(temperature=0.4, top_k=2, presence_penalty=2, logprobs=20)
    rows = [
        row_state(params, seed=i, valid_vocab=VOCAB, output_ids=OUTPUT, banned_ids=[7])
        for i in range(3)
    ]
    batch = sampler.sample(logits, rows)
    expected = torch.log_softmax(logits.double(), dim=-1)
    for i, (token_id, record) in enumerate(zip(batch.read(), batch.logprobs, strict=True)):
        values, ids = expected[i].sort(descending=True, stable=True)
        assert record.token_id == token_id
        assert record.logprob == pytest.approx(float(expected[i, token_id]), abs=1e-5)
        assert [pair[0] for pair in record.top] == ids[:20].tolist()
        assert [pair[1] for pair in record.top] == pytest.approx(values[:20].tolist(), abs=1e-5)
        assert all(type(p[0]) is int and type(p[1]) is float for p in record.top)
        assert type(record.logprob) is float


def test_drawn_frequencies_follow_the_distribution():
    # The only test that goes through real seeds and steps; seeds are fixed, so it cannot flake.
    logits = random_logits(4, vocab=12, spread=1.0)
    params = SamplingParams(temperature=0.8, top_p=0.95)
    expected = reference_probabilities_plain(logits, params)
    for rows in (
        [row_state(params, seed=seed, valid_vocab=12) for seed in range(6000)],
        [row_state(params, seed=3, valid_vocab=12, output_ids=[0] * step) for step in range(600)],
    ):
        tokens = Sampler().sample(logits.expand(len(rows), -1), rows).read()
        counts = np.bincount(tokens, minlength=12)
        kept = expected > 0
        assert counts[~kept].sum() == 0
        wanted = expected[kept] * len(rows)
        statistic = ((counts[kept] - wanted) ** 2 / wanted).sum()
        freedom = int(kept.sum()) - 1
        assert statistic < freedom + 4 * math.sqrt(2 * freedom)


def reference_probabilities_plain(logits: torch.Tensor, params: SamplingParams) -> np.ndarray:
    scores = reference.TemperatureLogitsWarper(params.temperature)(None, logits[None])
    scores = reference.TopPLogitsWarper(params.top_p)(None, scores)
    return torch.softmax(scores[0].double(), dim=0).numpy()
