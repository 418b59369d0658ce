"""A row's token is its own: batch-mates, position, history handling, bad rows, shapes."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
import torch

from layline.errors import RunError, SamplingError
from layline.layers.sampler import Sampler
from layline.layers.sampling_state import RowState
from layline.sampling import SamplingParams
from support.row_states import row_state

VOCAB = 5000
MIXES = [
    {"temperature": 0},
    {"temperature": 0, "logprobs": 3},
    {"temperature": 0, "repetition_penalty": 1.2, "frequency_penalty": 0.5},
    {},
    {"temperature": 1.7, "logprobs": 0},
    {"top_k": 40},
    {"top_k": 2000, "top_p": 0.7},
    {"top_p": 0.9, "logprobs": 20},
    {"top_p": 0.99, "temperature": 1.5},
    {"min_p": 0.02},
    {"top_k": 30, "top_p": 0.8, "min_p": 0.01, "presence_penalty": 1.0},
    {"logit_bias": {7: 9.0, 8: -100.0}, "min_tokens": 9, "stop_token_ids": [11]},
    {"repetition_penalty": 1.1, "top_p": 0.95, "temperature": 0.8},
]


def make_row(index: int, number: int = 0, vocab: int = VOCAB) -> RowState:
    numbers = random.Random(1000 * index + number)
    return row_state(
        SamplingParams(**MIXES[index]),
        seed=numbers.getrandbits(60),
        valid_vocab=vocab,
        prompt_ids=[numbers.randrange(vocab) for _ in range(50)],
        output_ids=[numbers.randrange(vocab) for _ in range(numbers.randrange(8))],
        eos_ids=[2],
    )


def make_logits(rows: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_alone_and_in_any_batch_gives_the_same_token_and_logprobs(sampler, dtype):
    for trial in range(6):
        order = list(range(len(MIXES))) * 2
        random.Random(trial).shuffle(order)
        order = order[: random.Random(trial).randint(2, len(order))]
        logits = make_logits(len(order), trial).to(dtype)
        rows = [make_row(index, number) for number, index in enumerate(order)]
        batch = sampler.sample(logits, rows)
        alone = [sampler.sample(logits[i : i + 1], [row]) for i, row in enumerate(rows)]
        assert batch.read() == [single.read()[0] for single in alone]
        assert batch.logprobs == [single.logprobs[0] for single in alone]


def test_both_paths_give_the_same_tokens():
    logits = make_logits(len(MIXES), 3)
    for number in range(8):
        rows = [make_row(index, number) for index in range(len(MIXES))]
        expected = Sampler(batched=False).sample(logits, rows).read()
        assert Sampler(batched=True).sample(logits, rows).read() == expected


def test_the_batched_path_may_split_a_batch(monkeypatch):
    logits = make_logits(len(MIXES), 3)
    rows = [make_row(index) for index in range(len(MIXES))]
    whole = Sampler(batched=True).sample(logits, rows)
    monkeypatch.setattr("layline.layers.sampling_device._ELEMENTS_AT_ONCE", 3 * VOCAB)
    parts = Sampler(batched=True).sample(logits, rows)
    assert parts.read() == whole.read()


def test_a_seed_repeats_a_text_and_an_interrupted_request_continues_it(sampler):
    def run(seed: int, row: RowState | None = None, start: int = 0) -> list[int]:
        params = SamplingParams(top_p=0.95, repetition_penalty=1.3, frequency_penalty=0.2)
        row = row or row_state(params, seed=seed, valid_vocab=VOCAB, prompt_ids=[1, 2, 3])
        tokens = []
        for step in range(start, 12):
            tokens += sampler.sample(make_logits(1, step), [row]).read()
            row.append(tokens[-1])
        return tokens

    text = run(5)
    assert run(5) == text
    assert run(6) != text
    params = SamplingParams(top_p=0.95, repetition_penalty=1.3, frequency_penalty=0.2)
    resumed = row_state(
        params, seed=5, valid_vocab=VOCAB, prompt_ids=[1, 2, 3], output_ids=text[:7]
    )
    assert run(5, resumed, start=7) == text[7:]


def test_history_taken_token_by_token_equals_history_taken_at_once(sampler):
    numbers = random.Random(0)
    prompt = [numbers.randrange(VOCAB) for _ in range(300)]
    output = [numbers.randrange(400) for _ in range(500)]
    params = SamplingParams(
        temperature=0, repetition_penalty=1.5, presence_penalty=1.0, frequency_penalty=0.3
    )
    grown = row_state(params, seed=0, valid_vocab=VOCAB, prompt_ids=prompt)
    for token_id in output:
        grown.advance()
        grown.observe(token_id)
    at_once = row_state(params, seed=0, valid_vocab=VOCAB, prompt_ids=prompt, output_ids=output)
    logits = make_logits(40, 1)
    for state in (grown, at_once):
        assert state.seen is not None
        counts = dict(zip(state.seen.ids.tolist(), state.seen.counts.tolist(), strict=True))
        assert counts == {token_id: output.count(token_id) for token_id in {*prompt, *output}}
        edited = logits.clone()
        for token_id in {*prompt, *output}:
            column = edited[:, token_id]
            column[:] = torch.where(column > 0, column / 1.5, column * 1.5)
            column -= 0.3 * output.count(token_id) + 1.0 * (token_id in output)
        assert sampler.sample(logits, [state] * 40).read() == edited.argmax(1).tolist()


def test_a_penalty_refuses_to_run_ahead_of_the_ids_it_needs(sampler):
    row = row_state(SamplingParams(presence_penalty=1.0), seed=0, valid_vocab=VOCAB)
    row.advance()
    with pytest.raises(AssertionError, match="every earlier token"):
        sampler.sample(make_logits(1, 0), [row])
    plain = row_state(SamplingParams(), seed=0, valid_vocab=VOCAB)
    first = sampler.sample(make_logits(1, 0), [plain]).read()
    plain.advance()
    assert sampler.sample(make_logits(1, 0), [plain]).read() != first


@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=["nan", "inf"])
@pytest.mark.parametrize("index", range(len(MIXES)))
def test_a_row_with_nan_or_infinity_is_named(sampler, index, bad):
    logits = make_logits(3, 0)
    logits[1, 123] = bad
    rows = [make_row(0), make_row(index), make_row(5)]
    batch = sampler.sample(logits, rows)
    with pytest.raises(RunError, match=r"row 1 of 3 has no token to sample.*NaN") as caught:
        batch.read()
    assert "\n" not in str(caught.value)
    assert caught.value.exit_status == 3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_every_id_impossible_is_named(sampler, temperature):
    logits = torch.zeros(2, 4)
    free = row_state(SamplingParams(temperature=temperature), seed=0, valid_vocab=4)
    banned = row_state(
        SamplingParams(temperature=temperature), seed=0, valid_vocab=4, banned_ids=range(4)
    )
    with pytest.raises(RunError, match="row 1 of 2"):
        sampler.sample(logits, [free, banned]).read()
    logits[0] = -math.inf
    with pytest.raises(RunError, match="row 0 of 2"):
        sampler.sample(logits, [free, free]).read()


def test_the_callers_logits_are_never_written(sampler):
    for dtype in (torch.float32, torch.bfloat16):
        logits = make_logits(len(MIXES), 2).to(dtype)
        before = logits.clone()
        sampler.sample(logits, [make_row(index, vocab=4000) for index in range(len(MIXES))])
        assert torch.equal(logits, before)


def test_rows_may_differ_in_vocabulary_and_columns_past_it_do_not_exist(sampler):
    logits = make_logits(3, 5)
    logits[:, 10:] += 100.0
    params = SamplingParams(temperature=0, logprobs=20)
    rows = [row_state(params, seed=0, valid_vocab=vocab) for vocab in (10, 20, 10)]
    batch = sampler.sample(logits, rows)
    for i, vocab in enumerate((10, 20, 10)):
        expected = torch.log_softmax(logits[i, :vocab], dim=0)
        record = batch.logprobs[i]
        assert record.token_id == int(expected.argmax())
        assert len(record.top) == vocab
        assert record.logprob == pytest.approx(float(expected.max()), abs=1e-5)


def test_equal_logits_are_ranked_by_id_everywhere(sampler):
    logits = torch.tensor([[0.0, -0.0, 1.0, 1.0, 0.0, -2.0, -1.0, -2.0]]).bfloat16()
    greedy = row_state(SamplingParams(temperature=0, logprobs=8), seed=0, valid_vocab=8)
    record = sampler.sample(logits, [greedy]).logprobs[0]
    assert record.token_id == 2
    assert [pair[0] for pair in record.top] == [2, 3, 0, 1, 4, 6, 5, 7]


def test_impossible_ids_are_left_out_of_the_top(sampler):
    logits = torch.tensor([[0.0, -math.inf, 1.0, -math.inf]])
    row = row_state(SamplingParams(logprobs=4), seed=0, valid_vocab=4)
    record = sampler.sample(logits, [row]).logprobs[0]
    assert [pair[0] for pair in record.top] == [2, 0]


def test_only_rows_that_ask_get_logprobs(sampler):
    rows = [make_row(0), make_row(1), make_row(4)]
    batch = sampler.sample(make_logits(3, 0), rows)
    lengths = [None if record is None else len(record.top) for record in batch.logprobs]
    assert lengths == [None, 3, 0]
    assert batch.token_ids.dtype == torch.int64
    assert batch.token_ids.tolist() == batch.read()


def test_an_empty_batch_and_strided_or_grad_requiring_logits(sampler):
    empty = sampler.sample(torch.empty(0, VOCAB), [])
    assert empty.read() == []
    assert empty.logprobs == []
    logits = make_logits(6, 0)
    rows = [make_row(index) for index in (0, 3, 12)]
    expected = sampler.sample(logits[::2].contiguous(), rows).read()
    assert sampler.sample(logits[::2], rows).read() == expected
    assert sampler.sample(logits.T.contiguous().T[::2], rows).read() == expected
    assert sampler.sample(logits[::2].clone().requires_grad_(), rows).read() == expected


def test_shapes_that_do_not_fit_are_refused(sampler):
    row = make_row(0)
    for logits in (torch.zeros(2, VOCAB), torch.zeros(VOCAB), torch.zeros(1, VOCAB).long()):
        with pytest.raises(RunError, match="for 1 rows; expected"):
            sampler.sample(logits, [row])
    with pytest.raises(RunError, match="may use 5000 ids but the logits have 4999 columns"):
        sampler.sample(torch.zeros(1, VOCAB - 1), [row])


def test_ids_that_the_vocabulary_lacks_are_refused_when_the_request_names_them():
    for values in ({"logit_bias": {50: 1.0}}, {"stop_token_ids": [50]}):
        with pytest.raises(SamplingError, match=r"50 is not in the vocabulary; expected 0 to 49"):
            row_state(SamplingParams(**values), seed=0, valid_vocab=50)
    # What the checkpoint or a prompt names is not the user's mistake.
    params = SamplingParams(repetition_penalty=1.1)
    row = row_state(
        params, seed=0, valid_vocab=50, eos_ids=[50], prompt_ids=[49, 50, -1], output_ids=[70]
    )
    assert row.seen is not None
    assert row.seen.ids.tolist() == [49]


def test_extreme_values_stay_inside_float32(sampler):
    logits = torch.tensor([[3e38, -3e38, 0.0, -math.inf]])
    extremes = {"temperature": 1e-5, "logit_bias": {2: 100.0}}
    for values in (extremes, {**extremes, "top_p": 0.5}, {"temperature": 100, "min_p": 0.5}):
        row = row_state(SamplingParams(**values), seed=1, valid_vocab=4)
        assert sampler.sample(logits, [row]).read() == [0]


def test_the_random_number_depends_on_seed_and_step_only():
    row = make_row(3)
    produced = row.num_produced
    other = row_state(
        dataclasses.replace(row.params, top_k=5),
        seed=row.seed,
        valid_vocab=VOCAB,
        output_ids=[1] * produced,
    )
    assert other.uniform() == row.uniform()
    other.advance()
    assert other.uniform() != row.uniform()
