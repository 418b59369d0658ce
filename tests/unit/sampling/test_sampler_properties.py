"""What each parameter promises, for arbitrary rows: equal logits, -inf and huge values included."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from layline.sampling import SamplingParams

# Few distinct values make ties the rule, as in bfloat16 logits over a large vocabulary.
coarse = st.sampled_from([-math.inf, -2.0, -0.5, 0.0, -0.0, 0.5, 1.0, 1.5])
fine = st.floats(-30, 30, width=32)
rows = st.one_of(
    st.lists(coarse, min_size=2, max_size=40), st.lists(fine, min_size=2, max_size=40)
).filter(lambda values: max(values) > -math.inf)
uniforms = st.floats(2**-53, 1 - 2**-53)
temperatures = st.sampled_from([0.0, 1e-5, 0.2, 1.0, 3.0])
checked = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def ranking(values: list[float]) -> list[int]:
    """Ids by (logit descending, id ascending): Python's stable sort is the definition."""
    return sorted(range(len(values)), key=lambda i: -values[i])


def probabilities(values: list[float], temperature: float) -> np.ndarray:
    scaled = (np.array(values, dtype=np.float64) - max(values)) / temperature
    weights = np.exp(scaled)
    return weights / weights.sum()


@checked
@given(values=rows, top_k=st.integers(1, 45), uniform=uniforms, temperature=temperatures)
def test_top_k_never_leaves_the_k_first_ids(probe, values, top_k, uniform, temperature):
    params = SamplingParams(top_k=top_k, temperature=temperature)
    assert probe.tokens(torch.tensor(values), params, [uniform])[0] in ranking(values)[:top_k]


@checked
@given(values=rows, top_k=st.integers(1, 8))
def test_top_k_reaches_every_one_of_the_k_first_ids(probe, values, top_k):
    params = SamplingParams(top_k=top_k)
    first = ranking(values)[:top_k]
    share = probabilities([values[i] for i in first], 1.0)
    reachable = {i for i, p in zip(first, share, strict=True) if p > 4e-3}
    assert reachable <= probe.support(torch.tensor(values), params) <= set(first)


@checked
@given(values=rows, top_p=st.floats(0.01, 0.99), temperature=st.sampled_from([0.3, 1.0, 2.0]))
def test_top_p_keeps_the_fewest_first_ids_that_reach_it(probe, values, top_p, temperature):
    share = probabilities(values, temperature)
    order = ranking(values)
    cumulative = np.cumsum(share[order])
    # A sum that lands on top_p itself may fall on either side of it.
    assume(np.abs(cumulative - top_p).min() > 1e-6)
    count = int(np.searchsorted(cumulative, top_p)) + 1
    found = probe.support(
        torch.tensor(values), SamplingParams(top_p=top_p, temperature=temperature)
    )
    first = order[:count]
    assert {i for i in first if share[i] / share[first].sum() > 4e-3} <= found <= set(first)


@pytest.mark.parametrize(("top_p", "count"), [(0.25, 1), (0.26, 2), (0.5, 2), (0.75, 3), (1, 4)])
def test_top_p_reached_exactly_is_reached(probe, top_p, count):
    # Four equal ids: the sums are exact, so nothing may hide behind rounding.
    assert probe.support(torch.zeros(4), SamplingParams(top_p=top_p)) == set(range(count))


@checked
@given(values=rows, min_p=st.floats(0.01, 1.0), temperature=st.sampled_from([0.3, 1.0, 2.0]))
def test_min_p_keeps_what_is_likely_enough_beside_the_best(probe, values, min_p, temperature):
    share = probabilities(values, temperature)
    ratio = share / share.max()
    assume(np.abs(ratio[ratio < 1] - min_p).min(initial=1.0) > 1e-6)
    found = probe.support(
        torch.tensor(values), SamplingParams(min_p=min_p, temperature=temperature)
    )
    kept = {i for i in range(len(values)) if ratio[i] >= min_p}
    total = sum(share[i] for i in kept)
    assert {i for i in kept if share[i] / total > 4e-3} <= found <= kept


@checked
@given(values=rows, uniform=uniforms, data=st.data())
def test_filters_keep_the_most_likely_id(probe, values, uniform, data):
    params = SamplingParams(
        top_k=data.draw(st.integers(0, 3)),
        top_p=data.draw(st.floats(1e-9, 1e-3)),
        min_p=data.draw(st.floats(0, 1)),
        temperature=data.draw(temperatures),
    )
    assert probe.tokens(torch.tensor(values), params, [uniform]) == ranking(values)[:1]


@checked
@given(
    values=st.lists(st.floats(-20, 20, width=32), min_size=3, max_size=20),
    uniform=uniforms,
    temperature=st.sampled_from([0.0, 0.5, 1.0]),
    data=st.data(),
)
def test_a_bias_of_100_forces_and_of_minus_100_forbids(probe, values, uniform, temperature, data):
    token_id = data.draw(st.integers(0, len(values) - 1))
    logits = torch.tensor(values)
    forced = SamplingParams(temperature=temperature, logit_bias={token_id: 100})
    forbidden = SamplingParams(temperature=temperature, logit_bias={token_id: -100})
    assert probe.tokens(logits, forced, [uniform]) == [token_id]
    assert probe.tokens(logits, forbidden, [uniform]) != [token_id]


@checked
@given(values=rows, uniform=uniforms, temperature=temperatures, data=st.data())
def test_banned_and_unknown_ids_are_never_chosen(probe, values, uniform, temperature, data):
    # Known ids are a prefix; past it lie the largest logits, and NaN, to tempt the sampler.
    known = data.draw(st.integers(1, len(values)))
    allowed = data.draw(st.integers(0, known - 1))
    assume(values[allowed] > -math.inf)
    banned = data.draw(st.sets(st.integers(0, known - 1))) - {allowed}
    logits = torch.tensor([*values, 1e4, math.nan, 3e38])
    logits[known : len(values)] = 1e4
    logits[list(banned)] = 1e4
    params = SamplingParams(
        temperature=temperature,
        top_k=data.draw(st.integers(0, 5)),
        top_p=data.draw(st.sampled_from([1.0, 0.5])),
        logit_bias=dict.fromkeys(banned, 100.0),
        repetition_penalty=data.draw(st.sampled_from([1.0, 0.01, 50.0])),
        presence_penalty=-2.0,
    )
    tokens = probe.tokens(
        logits,
        params,
        [uniform],
        valid_vocab=known,
        banned_ids=banned,
        prompt_ids=sorted(banned),
        output_ids=sorted(banned),
    )
    assert tokens[0] < known
    assert tokens[0] not in banned
    assert values[tokens[0]] > -math.inf


@checked
@given(
    uniform=uniforms,
    temperature=temperatures,
    min_tokens=st.integers(0, 6),
    produced=st.integers(0, 6),
    ignore_eos=st.booleans(),
)
def test_min_tokens_holds_back_end_and_stop_ids(
    probe, uniform, temperature, min_tokens, produced, ignore_eos
):
    logits = torch.zeros(10)
    logits[[4, 7]] = 200.0
    params = SamplingParams(
        temperature=temperature, min_tokens=min_tokens, stop_token_ids=[7], ignore_eos=ignore_eos
    )
    token_id = probe.tokens(logits, params, [uniform], eos_ids=[4, 99], output_ids=[1] * produced)[
        0
    ]
    assert (token_id in {4, 7}) == (produced >= min_tokens)
