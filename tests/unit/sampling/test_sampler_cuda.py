"""The sampler on a CUDA device: the CPU's tokens, no wait for the device, bad rows at read time."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from layline.errors import RunError
from layline.layers.sampler import Sampler
from layline.layers.sampling_state import RowState
from layline.sampling import SamplingParams
from support.row_states import row_state

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

VOCAB = 20_000
MIXES = [
    {"temperature": 0, "logprobs": 4},
    {},
    {"top_k": 40, "min_p": 0.01},
    {"top_p": 0.9, "logprobs": 0},
    {"top_k": 3000, "top_p": 0.99, "temperature": 1.5},
    {"temperature": 0, "repetition_penalty": 1.2, "logit_bias": {5: 3.0}},
    {"repetition_penalty": 1.1, "top_p": 0.95, "min_tokens": 50, "stop_token_ids": [9]},
]


def make_rows(order: list[int], trial: int) -> list[RowState]:
    numbers = random.Random(trial)
    return [
        row_state(
            SamplingParams(**MIXES[index]),
            seed=numbers.getrandbits(60),
            valid_vocab=VOCAB - 7,
            prompt_ids=[numbers.randrange(VOCAB - 7) for _ in range(40)],
            output_ids=[numbers.randrange(VOCAB - 7) for _ in range(5)],
            eos_ids=[2],
        )
        for index in order
    ]


def make_logits(rows: int, trial: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(trial)
    return (torch.randn(rows, VOCAB, generator=generator) * 3).to(dtype)


@contextmanager
def no_waiting() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_cuda_gives_the_tokens_of_the_cpu_without_waiting(dtype):
    groups = [[0], [1], [2], [3], [0, 0], [2, 2, 2], [1, 3, 4], list(range(len(MIXES))) * 3]
    for trial, order in enumerate(groups):
        rows = make_rows(order, trial)
        logits = make_logits(len(order), trial, dtype)
        on_device = logits.cuda()
        with no_waiting():
            batch = Sampler().sample(on_device, rows)
        reference = Sampler().sample(logits, rows)
        assert batch.token_ids.is_cuda
        assert batch.read() == reference.read()
        for ours, theirs in zip(batch.logprobs, reference.logprobs, strict=True):
            assert (ours is None) == (theirs is None)
            if ours is not None and theirs is not None:
                assert [pair[0] for pair in ours.top] == [pair[0] for pair in theirs.top]
                assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_alone_and_in_any_batch_gives_the_same_token(dtype):
    for trial in range(6):
        order = random.Random(trial).choices(range(len(MIXES)), k=30)
        rows = make_rows(order, trial)
        logits = make_logits(len(order), trial, dtype).cuda()
        together = Sampler().sample(logits, rows)
        alone = [Sampler().sample(logits[i : i + 1], [row]) for i, row in enumerate(rows)]
        assert together.read() == [single.read()[0] for single in alone]
        assert together.logprobs == [single.logprobs[0] for single in alone]


def test_a_bad_row_raises_when_read():
    for bad in (math.nan, math.inf):
        for index in range(len(MIXES)):
            rows = make_rows([1, index, 0], 0)
            logits = make_logits(3, 0, torch.float32).cuda()
            logits[1, 77] = bad
            with no_waiting():
                batch = Sampler().sample(logits, rows)
            assert batch.token_ids.tolist()[1] == -1
            with pytest.raises(RunError, match="row 1 of 3"):
                batch.read()


def test_equal_logits_and_signed_zeros_are_ranked_by_id():
    logits = torch.zeros(1, VOCAB)
    logits[0, ::2] = -0.0
    for params, allowed in (
        (SamplingParams(temperature=0), 1),
        (SamplingParams(top_k=5), 5),
        (SamplingParams(top_k=5000), 5000),
        (SamplingParams(top_p=0.1), 2000),
    ):
        rows = [row_state(params, seed=seed, valid_vocab=VOCAB) for seed in range(200)]
        for source in (logits, logits.cuda()):
            tokens = Sampler().sample(source.expand(200, -1), rows).read()
            assert max(tokens) < allowed
        assert tokens == Sampler().sample(logits.expand(200, -1), rows).read()
