"""SamplingParams: what is accepted, what is refused and how; the counter-based generator."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layline.errors import SamplingError, UsageError
from layline.sampling import SamplingParams, TokenLogprobs, fresh_seed, uniform

REFUSED = [
    ("max_tokens", 0, "1 or more"),
    ("max_tokens", -5, "1 or more"),
    ("max_tokens", True, "1 or more"),
    ("max_tokens", 3.0, "1 or more"),
    ("max_tokens", "12", "1 or more"),
    ("min_tokens", -1, "0 or more"),
    ("min_tokens", None, "0 or more"),
    ("temperature", -0.1, "0 to 100"),
    ("temperature", 100.5, "0 to 100"),
    ("temperature", math.nan, "0 to 100"),
    ("temperature", math.inf, "0 to 100"),
    ("temperature", 10**400, "0 to 100"),
    ("temperature", True, "0 to 100"),
    ("temperature", "1", "0 to 100"),
    ("temperature", None, "0 to 100"),
    ("top_k", -2, "-1 or more"),
    ("top_k", 1.5, "-1 or more"),
    ("top_p", 0, "above 0 and up to 1"),
    ("top_p", -0.2, "0 to 1"),
    ("top_p", 1.01, "0 to 1"),
    ("top_p", math.nan, "0 to 1"),
    ("min_p", -0.1, "0 to 1"),
    ("min_p", 1.1, "0 to 1"),
    ("repetition_penalty", 0, "0.01 to 100"),
    ("repetition_penalty", -1.0, "0.01 to 100"),
    ("repetition_penalty", math.inf, "0.01 to 100"),
    ("presence_penalty", 2.1, "-2 to 2"),
    ("frequency_penalty", -2.1, "-2 to 2"),
    ("frequency_penalty", math.nan, "-2 to 2"),
    ("logit_bias", {5: 101.0}, "-100 to 100"),
    ("logit_bias", {5: math.nan}, "-100 to 100"),
    ("logit_bias", {5: "1"}, "-100 to 100"),
    ("logit_bias", {-1: 1.0}, "0 or more"),
    ("logit_bias", {"5": 1.0}, "0 or more"),
    ("logit_bias", [5], "token id to number"),
    ("stop", "", "not empty"),
    ("stop", ["ok", ""], "not empty"),
    ("stop", ["ok", 3], "strings"),
    ("stop", b"bytes", "strings"),
    ("stop", 7, "strings"),
    ("stop_token_ids", [-1], "0 or more"),
    ("stop_token_ids", ["a"], "0 or more"),
    ("stop_token_ids", "12", "token ids"),
    ("stop_token_ids", 12, "token ids"),
    ("stop_token_ids", [False], "0 or more"),
    ("ignore_eos", 1, "True or False"),
    ("include_stop_in_output", "yes", "True or False"),
    ("skip_special", None, "True or False"),
    ("seed", 2**63, f"{-(2**63)} to {2**63 - 1}"),
    ("seed", -(2**63) - 1, f"{-(2**63)} to {2**63 - 1}"),
    ("seed", 1.0, f"{-(2**63)} to {2**63 - 1}"),
    ("logprobs", 21, "0 to 20"),
    ("logprobs", -1, "0 to 20"),
    ("logprobs", True, "0 to 20"),
]


@pytest.mark.parametrize(("name", "value", "expected"), REFUSED)
def test_a_value_outside_its_range_is_one_line_with_value_and_range(name, value, expected):
    with pytest.raises(SamplingError) as caught:
        SamplingParams(**{name: value})
    message = str(caught.value)
    assert name in message
    assert expected in message
    assert "\n" not in message
    offending = list(value.values()) + list(value) if isinstance(value, dict) else [value]
    offending += value if isinstance(value, list) else []
    assert any(repr(part) in message for part in offending)
    assert isinstance(caught.value, UsageError)
    assert caught.value.exit_status == 2


ACCEPTED = [
    ("max_tokens", 1, 1),
    ("max_tokens", np.int64(7), 7),
    ("temperature", 0, 0.0),
    ("temperature", np.float32(0.5), 0.5),
    ("temperature", Fraction(1, 4), 0.25),
    ("temperature", 100, 100.0),
    ("top_k", -1, 0),
    ("top_k", 10**9, 10**9),
    ("top_p", 1, 1.0),
    ("top_p", 1e-9, 1e-9),
    ("min_p", 1, 1.0),
    ("presence_penalty", -2, -2.0),
    ("logit_bias", {3: -100, 4: 100}, {3: -100.0, 4: 100.0}),
    ("logit_bias", None, None),
    ("stop", "END", ("END",)),
    ("stop", ["a", "b"], ("a", "b")),
    ("stop", None, ()),
    ("stop_token_ids", [2, 3], (2, 3)),
    ("stop_token_ids", {4}, (4,)),
    ("stop_token_ids", None, ()),
    ("seed", -(2**63), -(2**63)),
    ("seed", 2**63 - 1, 2**63 - 1),
    ("logprobs", 20, 20),
    ("logprobs", 0, 0),
]


@pytest.mark.parametrize(("name", "value", "stored"), ACCEPTED)
def test_accepted_values_are_stored_in_plain_types(name, value, stored):
    kept = getattr(SamplingParams(**{name: value}), name)
    assert kept == stored
    assert type(kept) is type(stored)


def test_min_tokens_may_not_exceed_max_tokens():
    with pytest.raises(SamplingError, match="min_tokens 5 is above max_tokens 4; expected 0 to 4"):
        SamplingParams(max_tokens=4, min_tokens=5)
    assert SamplingParams(max_tokens=4, min_tokens=4).min_tokens == 4
    assert SamplingParams(min_tokens=4).max_tokens is None


def test_params_are_frozen_keyword_only_copied_hashable_and_picklable():
    bias = {3: 1.0}
    params = SamplingParams(logit_bias=bias, stop="x")
    bias[3] = 5.0
    assert params.logit_bias == {3: 1.0}
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 0.0  # type: ignore[misc]
    with pytest.raises(TypeError):
        SamplingParams(5)  # type: ignore[misc]
    assert not hasattr(params, "__dict__")
    assert hash(params) == hash(SamplingParams(stop=["x"], logit_bias={3: 1}))
    assert pickle.loads(pickle.dumps(params)) == params == copy.deepcopy(params)
    assert dataclasses.replace(params, top_k=3).logit_bias == {3: 1.0}
    with pytest.raises(SamplingError):
        dataclasses.replace(params, top_p=2.0)


def test_questions_about_params():
    assert SamplingParams(temperature=0).is_greedy
    assert SamplingParams(temperature=9e-6).is_greedy
    assert not SamplingParams(temperature=1e-5).is_greedy
    assert not SamplingParams().needs_penalties
    assert SamplingParams(repetition_penalty=1.1).needs_repetition
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        assert SamplingParams(**{name: 0.5}).needs_penalties


def test_logprobs_record_is_plain():
    record = TokenLogprobs(3, -0.5, ((3, -0.5),))
    assert dataclasses.asdict(record) == {"token_id": 3, "logprob": -0.5, "top": ((3, -0.5),)}


def test_params_import_neither_torch_nor_numpy():
    code = "import sys, layline.sampling; sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


PINNED = [0.13870941014555427, 0.6424233675512125, 0.2815569767288524]

integers = st.integers(-(2**63), 2**63 - 1)


@settings(derandomize=True, database=None)
@given(seed=integers, step=st.integers(0, 2**40), stream=st.integers(0, 8))
def test_uniform_is_a_function_of_its_arguments_inside_the_open_interval(seed, step, stream):
    value = uniform(seed, step, stream)
    assert 0.0 < value < 1.0
    assert value == uniform(seed, step, stream)
    assert (value * 2**53).is_integer()
    assert value not in {uniform(seed, step + 1, stream), uniform(seed, step, stream + 1)}
    assert value != uniform(seed ^ 1, step, stream)


def test_uniform_stays_open_at_both_ends(monkeypatch):
    # The extremes of the mixed word: all zeros and all ones.
    monkeypatch.setattr("layline.sampling._mix64", lambda value: 0)
    assert uniform(0, 0) == 2.0**-53
    monkeypatch.setattr("layline.sampling._mix64", lambda value: 2**64 - 1)
    assert uniform(0, 0) == 1.0 - 2.0**-53


def test_uniform_values_do_not_change_between_releases():
    # A seed that a user wrote down keeps its text: these are part of the interface.
    assert [uniform(0, 0), uniform(42, 7), uniform(-1, 3, 2)] == PINNED


@pytest.mark.parametrize("axis", ["seed", "step", "stream"])
def test_uniform_is_even_and_uncorrelated_along_every_argument(axis):
    count = 20_000
    values = np.array([uniform(**{"seed": 5, "step": 9, axis: i}) for i in range(count)])
    cells, _ = np.histogram(values, bins=100, range=(0.0, 1.0))
    expected = count / 100
    # chi-square with 99 degrees of freedom: 148 is exceeded with probability 0.001
    assert ((cells - expected) ** 2 / expected).sum() < 148
    for lag in (1, 2, 7):
        assert abs(np.corrcoef(values[:-lag], values[lag:])[0, 1]) < 4 / math.sqrt(count)


def test_fresh_seeds_are_valid_and_differ():
    seeds = {fresh_seed() for _ in range(50)}
    assert len(seeds) == 50
    assert all(SamplingParams(seed=seed).seed == seed for seed in seeds)
