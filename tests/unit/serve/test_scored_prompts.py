"""Prompts with log-probabilities (echo), as OpenAI's client sees them, against transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from layline import LLM
from support.bytewise import save_bytewise
from support.serving import NAME, client_on, sdk_on, service_on

TEXT = "w2 w6 w8 w100 w20"
IDS = [5, 9, 11, 103, 23]
WORDS = TEXT.split()
SCORED: dict[str, Any] = {"model": NAME, "max_tokens": 0, "echo": True, "logprobs": 2}


@torch.inference_mode()
def table(model: Any, ids: list[int]) -> torch.Tensor:
    found: torch.Tensor = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
    return found


def word(token_id: int) -> str:
    return ("<unk>", "<s>", "</s>")[token_id] if token_id < 3 else f"w{token_id - 3}"


def check(model: Any, logprobs: Any, ids: list[int], top: int = 2) -> None:
    """The first ``len(ids)`` entries of ``logprobs`` against the reference."""
    assert (logprobs.token_logprobs[0], logprobs.top_logprobs[0]) == (None, None)
    rows = table(model, ids)
    for at, token_id in enumerate(ids[1:], start=1):
        row = rows[at - 1]
        assert logprobs.token_logprobs[at] == pytest.approx(float(row[token_id]), abs=2e-4)
        best = row.topk(top)
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        wanted = {word(i): value for i, value in pairs}
        wanted[word(token_id)] = float(row[token_id])
        assert logprobs.top_logprobs[at] == pytest.approx(wanted, abs=2e-4)


@pytest.mark.parametrize("prompt", [TEXT, IDS], ids=["text", "ids"])
def test_a_prompt_is_scored_without_an_answer(sdk: Any, checkpoint: Any, prompt: Any) -> None:
    found = sdk.completions.create(prompt=prompt, **SCORED)
    (choice,) = found.choices
    assert choice.finish_reason == "length"
    assert choice.text == (TEXT if prompt is TEXT else "".join(WORDS))
    assert choice.logprobs.tokens == WORDS
    assert choice.logprobs.bytes == [list(word.encode()) for word in WORDS]
    places = [0, 2, 5, 8, 13] if prompt is TEXT else [0, 2, 4, 6, 10]
    assert choice.logprobs.text_offset == places
    check(checkpoint[1], choice.logprobs, IDS)
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (5, 0)


def test_the_harness_sum_over_a_continuation(sdk: Any, checkpoint: Any) -> None:
    """What evaluation does: the log-probability of the end of a text, and whether it is greedy."""
    likely = [*IDS, int(table(checkpoint[1], IDS)[-1].argmax())]
    found = sdk.completions.create(prompt=[likely, [*IDS, 7]], **{**SCORED, "logprobs": 1})
    greedy = []
    for ids, choice in zip((likely, [*IDS, 7]), found.choices, strict=True):
        total = sum(choice.logprobs.token_logprobs[3:])
        rows = table(checkpoint[1], ids)
        wanted = sum(float(rows[at - 1, ids[at]]) for at in range(3, 6))
        assert total == pytest.approx(wanted, abs=5e-4)
        top = choice.logprobs.top_logprobs[-1]
        greedy.append(max(top, key=top.get) == choice.logprobs.tokens[-1])
    assert greedy == [True, False]


@pytest.mark.parametrize("stream", [False, True])
def test_scores_come_before_those_of_the_answer(sdk: Any, checkpoint: Any, stream: bool) -> None:
    options = {**SCORED, "max_tokens": 6, "temperature": 0, "n": 2, "prompt": [TEXT, "w4 w5"]}
    found = sdk.completions.create(**options, stream=stream)
    plain = sdk.completions.create(**{**options, "echo": False})
    pieces: dict[int, list[Any]] = {i: [] for i in range(4)}
    for event in found if stream else [found]:
        for choice in event.choices:
            pieces[choice.index].append(choice)
    for index, ids in ((0, IDS), (1, IDS), (2, [7, 8]), (3, [7, 8])):
        prompt = TEXT if index < 2 else "w4 w5"
        mine, alone = pieces[index], plain.choices[index]
        assert "".join(piece.text for piece in mine) == prompt + alone.text
        assert mine[-1].finish_reason == "length"
        for name in ("tokens", "token_logprobs", "top_logprobs", "bytes"):
            joined = [one for piece in mine for one in getattr(piece.logprobs, name)]
            later = getattr(alone.logprobs, name)
            if name in ("tokens", "bytes"):
                assert joined[len(ids) :] == later
            assert len(joined) == len(ids) + 6
        offsets = [at for piece in mine for at in piece.logprobs.text_offset]
        assert offsets[len(ids) :] == [at + len(prompt) for at in alone.logprobs.text_offset]
        check(checkpoint[1], mine[0].logprobs, ids)


def test_a_prompt_as_long_as_the_context(sdk: Any, checkpoint: Any) -> None:
    ids = [3 + 7 * n % 190 for n in range(512)]
    choice = sdk.completions.create(prompt=[ids], **SCORED).choices[0]
    check(checkpoint[1], choice.logprobs, ids)
    with pytest.raises(openai.BadRequestError) as caught:
        sdk.completions.create(prompt=[[*ids, 5]], **SCORED)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
    with pytest.raises(openai.BadRequestError, match="leaves no room"):
        sdk.completions.create(prompt=[ids], **{**SCORED, "max_tokens": 1})


def test_one_token_says_nothing(sdk: Any) -> None:
    choice = sdk.completions.create(prompt=[5], **SCORED).choices[0]
    assert choice.logprobs.token_logprobs == [None]
    assert choice.logprobs.text_offset == [0]


def test_a_stop_string_is_looked_for_in_the_answer_alone(sdk: Any) -> None:
    plain = sdk.completions.create(model=NAME, prompt=TEXT, max_tokens=4, temperature=0)
    stop = plain.choices[0].text[-3:]
    options = {**SCORED, "max_tokens": 4, "temperature": 0, "stop": ["w2", stop]}
    choice = sdk.completions.create(prompt=TEXT, **options).choices[0]
    assert choice.text.startswith(TEXT)
    assert len(choice.logprobs.tokens) >= len(IDS)
    assert choice.finish_reason == "stop"


@pytest.fixture(scope="module")
def bytewise(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    path: Path = tmp_path_factory.mktemp("bytewise")
    save_bytewise(path)
    with service_on(LLM(str(path), threads=1)) as service, client_on(service) as client:
        yield sdk_on(client)


def test_tokens_that_are_parts_of_characters(bytewise: Any) -> None:
    text = "aé€z"
    options = {"max_tokens": 40, "echo": True, "logprobs": 1, "seed": 3, "temperature": 1}
    choice = bytewise.completions.create(model=NAME, prompt=text, **options).choices[0]
    found = choice.logprobs
    assert [bytes(one) for one in found.bytes[:7]] == [bytes([b]) for b in text.encode()]
    assert found.text_offset[:7] == [0, 1, 1, 2, 2, 2, 3]
    names = ["a", "bytes:\\xc3", "bytes:\\xa9", "bytes:\\xe2", "bytes:\\x82", "bytes:\\xac", "z"]
    assert found.tokens[:7] == names
    whole = b"".join(map(bytes, found.bytes))
    assert whole.decode("utf-8", "replace") == choice.text
    ids = bytewise.completions.create(model=NAME, prompt=list(text.encode()), **options)
    assert ids.choices[0].logprobs == found
    assert ids.choices[0].text == choice.text


def test_parts_of_characters_in_a_chat(bytewise: Any) -> None:
    options = {"max_tokens": 40, "logprobs": True, "top_logprobs": 2, "seed": 5}
    messages = [{"role": "user", "content": "é"}]
    whole = bytewise.chat.completions.create(model=NAME, messages=messages, **options).choices[0]
    entries = whole.logprobs.content
    joined = b"".join(bytes(entry.bytes) for entry in entries)
    assert joined.decode("utf-8", "replace") == whole.message.content
    partial = [entry for entry in entries if entry.bytes[0] >= 0x80]
    assert partial
    assert all(entry.token == f"\\x{entry.bytes[0]:02x}" for entry in partial)
    stream = bytewise.chat.completions.create(model=NAME, messages=messages, stream=True, **options)
    choices = [event.choices[0] for event in stream]
    assert "".join(choice.delta.content or "" for choice in choices) == whole.message.content
    streamed = [e for c in choices if c.logprobs for e in c.logprobs.content]
    assert streamed == entries
