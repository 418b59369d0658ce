"""A grammar beside bans, bias and filters: it takes ids away and changes nothing else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from layline import Grammar
from layline.layers.sampler import Sampler
from layline.layers.sampling_state import RowState
from layline.sampling import SamplingParams
from layline.text.constraint import ConstraintCompiler
from layline.text.tokenizer import Tokenizer, load_tokenizer
from support.writer import END, MISTRAL, save_vocabulary


class Source:
    """A folder with a tokenizer and nothing else."""

    def __init__(self, directory: Path) -> None:
        self.path = self.directory = directory
        self.gguf_metadata = None
        self.config: dict[str, object] = {}
        self.generation: dict[str, object] = {}

    def vocabulary(self) -> Source:
        return self


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("vocabulary")
    save_vocabulary(path, MISTRAL)
    return load_tokenizer(Source(path))


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> ConstraintCompiler:
    return ConstraintCompiler(tokenizer)


@pytest.fixture(scope="module")
def logits(tokenizer: Tokenizer) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    # Some rows of an embedding stand for no token.
    return torch.randn(tokenizer.vocab_size + 13, generator=generator)


class Rows:
    """Makes rows that follow grammars."""

    def __init__(self, tokenizer: Tokenizer, compiler: ConstraintCompiler) -> None:
        self.tokenizer = tokenizer
        self.compiler = compiler

    def row(self, pattern: str | None, **params: object) -> RowState:
        grammar = None if pattern is None else Grammar.regex(pattern)
        given = SamplingParams(grammar=grammar, **params)  # type: ignore[arg-type]
        state = None
        if grammar is not None:
            state = self.compiler.compile(grammar).follow(given.stop_token_ids)
        return RowState(
            given,
            seed=11,
            valid_vocab=self.tokenizer.vocab_size,
            eos_ids=self.tokenizer.eos_ids,
            banned_ids=self.tokenizer.unused_ids,
            grammar=state,
        )

    def id_of(self, piece: bytes) -> int:
        return next(i for i in range(3, 500) if self.tokenizer.pieces[i] == piece)


@pytest.fixture
def rows(tokenizer: Tokenizer, compiler: ConstraintCompiler) -> Rows:
    return Rows(tokenizer, compiler)


def drawn(sampler: Sampler, logits: torch.Tensor, *rows: RowState) -> list[int]:
    return sampler.sample(logits.expand(len(rows), -1), rows).read()


def test_only_allowed_ids_are_drawn(sampler: Sampler, logits: torch.Tensor, rows: Rows) -> None:
    digits = {rows.id_of(str(d).encode()) for d in range(10)}
    for temperature in (0.0, 1.0, 3.0):
        row = rows.row(r"[0-9]{40}", temperature=temperature)
        seen = set()
        for _ in range(40):
            (token,) = drawn(sampler, logits, row)
            assert rows.tokenizer.pieces[token].isdigit()
            seen.add(token)
            if len(rows.tokenizer.pieces[token]) > 1:
                break
            row.append(token)
        assert temperature == 0.0 or seen & digits


def test_the_best_allowed_id_is_the_greedy_one(
    sampler: Sampler, logits: torch.Tensor, rows: Rows
) -> None:
    row = rows.row(r"[a-z]+", temperature=0.0)
    assert row.allowed is not None
    allowed = np.flatnonzero(np.unpackbits(row.allowed, bitorder="little"))
    (token,) = drawn(sampler, logits, row)
    assert token == int(allowed[logits.numpy()[allowed].argmax()])


def test_neighbours_change_nothing(sampler: Sampler, logits: torch.Tensor, rows: Rows) -> None:
    def make() -> list[RowState]:
        return [
            rows.row(None, temperature=1.0),
            rows.row(r"[0-9]+", temperature=1.0),
            rows.row(None, temperature=0.0, repetition_penalty=1.3),
            rows.row(r"[a-z]{3}", temperature=0.0),
            rows.row(r"\{.*", temperature=1.0, top_k=5, top_p=0.9),
        ]

    together = drawn(sampler, logits, *make())
    alone = [drawn(sampler, logits, row)[0] for row in make()]
    assert together == alone
    assert together[1] != together[0]


def test_both_ways_draw_the_same(logits: torch.Tensor, rows: Rows) -> None:
    patterns = [r"[0-9]+", r"[a-zA-Z ]+", r"(?s:.*)", None, r"\{\"a\": [0-9]+\}"]
    for temperature in (0.0, 1.0):
        made = [
            [rows.row(pattern, temperature=temperature) for pattern in patterns] for _ in range(2)
        ]
        by_row, batched = made
        assert drawn(Sampler(batched=False), logits, *by_row) == drawn(
            Sampler(batched=True), logits, *batched
        )


def test_logits_stay_and_logprobs_are_the_models(
    sampler: Sampler, logits: torch.Tensor, rows: Rows
) -> None:
    before = logits.clone()
    free = sampler.sample(logits.expand(1, -1), [rows.row(None, temperature=0.0, logprobs=5)])
    bound = sampler.sample(logits.expand(1, -1), [rows.row("[0-9]", temperature=0.0, logprobs=5)])
    (without,), (within,) = free.logprobs, bound.logprobs
    assert without is not None
    assert within is not None
    assert within.top == without.top
    expected = torch.log_softmax(logits[: rows.tokenizer.vocab_size].double(), -1)[within.token_id]
    assert within.logprob == pytest.approx(float(expected), abs=1e-5)
    assert torch.equal(logits, before)


def test_banned_stays_banned(sampler: Sampler, logits: torch.Tensor, rows: Rows) -> None:
    a, b = rows.id_of(b"a"), rows.id_of(b"b")
    row = rows.row("[ab]", temperature=0.0, logit_bias={a: 100.0, b: -100.0})
    assert drawn(sampler, logits, row) == [a]
    spec = SamplingParams(temperature=0.0, grammar=Grammar.regex("[ab]"))
    banned = RowState(
        spec,
        seed=0,
        valid_vocab=rows.tokenizer.vocab_size,
        banned_ids=[a],
        grammar=rows.compiler.compile(Grammar.regex("[ab]")).follow(),
    )
    assert drawn(sampler, logits, banned) == [b]


def test_bias_cannot_bring_in_what_is_not_allowed(
    sampler: Sampler, logits: torch.Tensor, rows: Rows
) -> None:
    a, b = rows.id_of(b"a"), rows.id_of(b"b")
    row = rows.row("a", temperature=0.0, logit_bias={b: 100.0}, repetition_penalty=2.0)
    assert drawn(sampler, logits, row) == [a]


@pytest.mark.parametrize("params", [{"min_tokens": 3}, {"ignore_eos": True}])
def test_the_end_waits_while_the_text_can_go_on(
    sampler: Sampler, logits: torch.Tensor, rows: Rows, params: dict[str, object]
) -> None:
    x = rows.id_of(b"x")
    likes_the_end = logits.clone()
    likes_the_end[END] = 50.0
    row = rows.row("x{0,2}", temperature=0.0, **params)
    found = []
    for _ in range(3):
        found += drawn(sampler, likes_the_end, row)
        row.append(found[-1])
    # Nothing can follow two of them, so the end comes although it was to wait.
    assert found == [x, x, END]
    assert drawn(sampler, likes_the_end, rows.row("x{0,2}", temperature=0.0)) == [END]


def test_a_state_follows_tokens_and_not_draws(
    sampler: Sampler, logits: torch.Tensor, rows: Rows
) -> None:
    row = rows.row("[a-z]{9}", temperature=1.0)
    first = drawn(sampler, logits, row)
    assert drawn(sampler, logits, row) == first
    again = rows.row("[a-z]{9}", temperature=1.0)
    row.append(first[0])
    again.append(first[0])
    assert drawn(sampler, logits, row) == drawn(sampler, logits, again)


def test_a_grammar_needs_every_earlier_token(
    sampler: Sampler, logits: torch.Tensor, rows: Rows
) -> None:
    row = rows.row("[a-z]{9}", temperature=1.0)
    assert row.params.needs_history
    row.advance()
    with pytest.raises(AssertionError, match="every earlier token"):
        drawn(sampler, logits, row)
