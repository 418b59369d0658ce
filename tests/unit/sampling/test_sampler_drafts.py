"""Rows of drafts: a request as it would be had it generated them, and the tokens fed so far."""

from __future__ import annotations

import pytest
import torch

from layline.engine.balance import SampleRow
from layline.engine.executor import RowSpec, SamplingRows
from layline.engine.step import RankStep
from layline.layers.sampler import Sampler
from layline.layers.sampling_state import RowState
from layline.layers.spans import SequenceSpan
from layline.sampling import SamplingParams
from support.row_states import row_state

VOCAB = 40
PARAMS = {
    "plain": SamplingParams(temperature=1.1, seed=3),
    "penalties": SamplingParams(
        temperature=0.8, seed=4, repetition_penalty=1.5, presence_penalty=0.7, frequency_penalty=0.4
    ),
    "bans": SamplingParams(temperature=1.0, seed=5, min_tokens=4, stop_token_ids=(1, 2, 3)),
    "greedy": SamplingParams(temperature=0.0, repetition_penalty=2.0, min_tokens=3),
}
PROMPT = [7, 8, 8]


def state(params: SamplingParams, output: list[int]) -> RowState:
    return row_state(
        params,
        seed=params.seed or 0,
        valid_vocab=VOCAB,
        prompt_ids=PROMPT,
        output_ids=output,
        eos_ids=[2],
        banned_ids=[39],
    )


def logits(rows: int) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(1)) * 3


@pytest.mark.parametrize("name", PARAMS)
def test_a_row_ahead_is_the_row_of_a_request_that_has_the_drafts(
    name: str, sampler: Sampler
) -> None:
    params, drafts = PARAMS[name], [9, 7, 9, 12]
    before = state(params, [5])
    rows = [before.ahead(drafts[:count]) for count in range(5)]
    wanted = [state(params, [5, *drafts[:count]]) for count in range(5)]
    scores = logits(5)
    assert sampler.sample(scores, rows).read() == sampler.sample(scores, wanted).read()
    for row, other in zip(rows, wanted, strict=True):
        assert row.uniform() == other.uniform()
        assert row.banned.tolist() == other.banned.tolist()
    # The request itself has none of them.
    assert before.num_produced == 1
    assert (
        sampler.sample(scores[:1], [before]).read()
        == sampler.sample(scores[:1], [state(params, [5])]).read()
    )
    before.append(30)
    assert rows[0].num_produced == 1


def fed(*tokens: int) -> RankStep:
    spans = tuple([SequenceSpan(n, 1, [1, 2], n + 1) for n in range(len(tokens))])
    return RankStep(len(tokens), spans, tokens, (True,) * len(tokens))


@pytest.fixture
def rows() -> SamplingRows:
    found = SamplingRows()
    params, none = PARAMS["penalties"], frozenset[int]()
    found.admit(
        4,
        RowSpec(
            params=params,
            seed=4,
            valid_vocab=VOCAB,
            prompt_ids=PROMPT,
            eos_ids=none,
            banned_ids=none,
        ),
    )
    return found


def seen(rows: SamplingRows, part: RankStep, *asked: SampleRow) -> list[dict[int, float]]:
    """How often each id counts as generated, in each row."""
    return [
        {int(i): float(n) for i, n in zip(s.seen.ids, s.seen.counts, strict=True) if n}
        for s in rows.at(part, asked)
        if s.seen is not None
    ]


def test_accepted_drafts_are_the_requests_tokens(rows: SamplingRows) -> None:
    assert seen(rows, fed(8), SampleRow(4, 0)) == [{}]
    step = fed(20, 21, 22), SampleRow(4, 1), SampleRow(4, 2, 1), SampleRow(4, 3, 2)
    counts = [{20: 1}, {20: 1, 21: 1}, {20: 1, 21: 1, 22: 1}]
    assert seen(rows, *step) == counts
    assert seen(rows, *step) == counts, "a step that is run again is the same"
    # Both were right, and 30 came after them.
    assert seen(rows, fed(30), SampleRow(4, 4)) == [{20: 1, 21: 1, 22: 1, 30: 1}]
    assert rows._requests[4].fed == {}


def test_a_rejected_draft_is_forgotten(rows: SamplingRows) -> None:
    seen(rows, fed(8), SampleRow(4, 0))
    seen(rows, fed(20, 21, 22), SampleRow(4, 1), SampleRow(4, 2, 1), SampleRow(4, 3, 2))
    # 21 was right and 22 was not: 31 came instead.
    assert seen(rows, fed(31, 32), SampleRow(4, 3), SampleRow(4, 4, 1)) == [
        {20: 1, 21: 1, 31: 1},
        {20: 1, 21: 1, 31: 1, 32: 1},
    ]
    # And now not even the first.
    assert seen(rows, fed(33), SampleRow(4, 4)) == [{20: 1, 21: 1, 31: 1, 33: 1}]


def test_drafts_are_remembered_from_the_steps_that_made_them(rows: SamplingRows) -> None:
    """A draft model is fed one after the other, and the verified step begins at the start again."""
    seen(rows, fed(8), SampleRow(4, 0))
    assert seen(rows, fed(20), SampleRow(4, 1)) == [{20: 1}]
    assert seen(rows, fed(21), SampleRow(4, 2, 1)) == [{20: 1, 21: 1}]
    assert seen(rows, fed(22), SampleRow(4, 3, 2)) == [{20: 1, 21: 1, 22: 1}]
    step = fed(20, 21, 22, 23), *[SampleRow(4, 1 + n, n) for n in range(4)]
    assert seen(rows, *step)[-1] == {20: 1, 21: 1, 22: 1, 23: 1}
    assert seen(rows, fed(24), SampleRow(4, 5)) == [dict.fromkeys(range(20, 25), 1)]
