"""/v1/completions on a tiny model, against transformers on the same checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from support.serving import NAME, events

PROMPT = [5, 9, 11]
TEXT = "w2 w6 w8"  # the same, word by word


def ask(client: Any, **fields: Any) -> Any:
    body = {"model": NAME, "prompt": PROMPT, "temperature": 0, "max_tokens": 8, **fields}
    return client.post("/v1/completions", json=body)


def answer(client: Any, **fields: Any) -> Any:
    response = ask(client, **fields)
    assert response.status_code == 200, response.text
    return response.json()


@torch.no_grad()
def greedy(model: Any, prompt: list[int], count: int) -> tuple[list[int], list[torch.Tensor]]:
    """Ids and log-probabilities [vocabulary] of each, by transformers."""
    ids, found = list(prompt), []
    for _ in range(count):
        found.append(model(torch.tensor([ids])).logits[0, -1].float().log_softmax(-1))
        ids.append(int(found[-1].argmax()))
    return ids[len(prompt) :], found


def words(ids: list[int]) -> str:
    return "".join(f"w{token_id - 3}" for token_id in ids)


@pytest.fixture
def wanted(checkpoint: tuple[Path, Any]) -> tuple[list[int], list[torch.Tensor]]:
    return greedy(checkpoint[1], PROMPT, 8)


def test_greedy_text_is_that_of_transformers(client: Any, wanted: Any) -> None:
    found = answer(client)
    assert found["object"] == "text_completion"
    (choice,) = found["choices"]
    assert choice["text"] == words(wanted[0])
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "length", None)
    details = found["usage"].pop("prompt_tokens_details")
    assert found["usage"] == {"prompt_tokens": 3, "completion_tokens": 8, "total_tokens": 11}
    assert set(details) == {"cached_tokens"}


def test_prompts_are_text_or_ids_alone_or_many(client: Any) -> None:
    alone = answer(client)["choices"][0]["text"]
    other = answer(client, prompt=[7, 8])["choices"][0]["text"]
    assert answer(client, prompt=TEXT)["choices"][0]["text"] == alone
    many = answer(client, prompt=[PROMPT, [7, 8]], n=2)
    assert [choice["index"] for choice in many["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in many["choices"]] == [alone, alone, other, other]
    assert (many["usage"]["prompt_tokens"], many["usage"]["completion_tokens"]) == (5, 32)
    texts = answer(client, prompt=[TEXT, "w4 w5"])
    assert [choice["text"] for choice in texts["choices"]] == [alone, other]


def test_logprobs_are_those_of_transformers(client: Any, wanted: Any) -> None:
    ids, logprobs = wanted
    found = answer(client, logprobs=3)["choices"][0]["logprobs"]
    assert found["tokens"] == [words([token_id]) for token_id in ids]
    assert found["bytes"] == [list(words([token_id]).encode()) for token_id in ids]
    for place, (value, top) in enumerate(
        zip(found["token_logprobs"], found["top_logprobs"], strict=True)
    ):
        best = logprobs[place].topk(3)
        assert value == pytest.approx(float(best.values[0]), abs=1e-4)
        expected = {
            words([int(i)]): pytest.approx(float(v), abs=1e-4)
            for i, v in zip(best.indices, best.values, strict=True)
        }
        assert top == expected
    offsets = [0]
    for token in found["tokens"][:-1]:
        offsets.append(offsets[-1] + len(token))
    assert found["text_offset"] == offsets


def test_a_stop_string_cuts_text_and_logprobs(client: Any, wanted: Any) -> None:
    whole = words(wanted[0])
    third = words(wanted[0][:2])
    stop = whole[len(third) : len(third) + 3]
    choice = answer(client, stop=[stop, "never"], logprobs=0)["choices"][0]
    assert choice["text"] == whole[: whole.index(stop)]
    assert choice["finish_reason"] == "stop"
    assert "".join(choice["logprobs"]["tokens"]).startswith(choice["text"])
    assert len(choice["logprobs"]["tokens"]) == 2
    streamed = events(ask(client, stop=stop, logprobs=0, stream=True))[:-1]
    pieces = [event["choices"][0] for event in streamed]
    assert "".join(piece["text"] for piece in pieces) == choice["text"]
    tokens = [token for piece in pieces for token in piece["logprobs"]["tokens"]]
    assert tokens == choice["logprobs"]["tokens"]


def test_stop_token_ids_and_ignore_eos(client: Any, wanted: Any) -> None:
    third = wanted[0][2]
    at = wanted[0].index(third)
    choice = answer(client, stop_token_ids=[third], logprobs=0)["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["text"] == words(wanted[0][:at])
    assert len(choice["logprobs"]["tokens"]) == at, "the token that ended it is none of the text"
    biased = {"2": 100}
    ended = answer(client, logit_bias=biased)["choices"][0]
    assert (ended["text"], ended["finish_reason"]) == ("", "stop")
    went_on = answer(client, logit_bias=biased, ignore_eos=True, max_tokens=3)
    assert went_on["choices"][0]["finish_reason"] == "length"
    assert went_on["usage"]["completion_tokens"] == 3


def test_echo_gives_the_prompt_back(client: Any) -> None:
    alone = answer(client)["choices"][0]["text"]
    assert answer(client, prompt=TEXT, echo=True)["choices"][0]["text"] == TEXT + alone
    nothing = answer(client, prompt=[TEXT, "w1"], echo=True, max_tokens=0)
    assert [choice["text"] for choice in nothing["choices"]] == [TEXT, "w1"]
    assert nothing["usage"]["completion_tokens"] == 0
    streamed = events(ask(client, prompt=TEXT, echo=True, stream=True))
    assert "".join(event["choices"][0]["text"] for event in streamed[:-1]) == TEXT + alone


def test_a_stream_is_the_same_answer_in_events(client: Any) -> None:
    whole = answer(client, n=2, temperature=1, seed=4)
    streamed = events(
        ask(client, n=2, temperature=1, seed=4, stream=True, stream_options={"include_usage": True})
    )
    assert streamed[-1] == "[DONE]"
    assert streamed[-2]["choices"] == []
    assert streamed[-2]["usage"] == whole["usage"]
    assert all(event["usage"] is None for event in streamed[:-2])
    for choice in whole["choices"]:
        all_pieces = [event["choices"][0] for event in streamed[:-2]]
        pieces = [piece for piece in all_pieces if piece["index"] == choice["index"]]
        assert "".join(piece["text"] for piece in pieces) == choice["text"]
        assert [piece["finish_reason"] for piece in pieces][-1] == choice["finish_reason"]
        assert all(piece["finish_reason"] is None for piece in pieces[:-1])
    assert len({event["id"] for event in streamed[:-1]}) == 1
    assert "usage" not in events(ask(client, stream=True))[0]


def test_seeds_repeat_and_answers_of_one_request_differ(client: Any) -> None:
    first = answer(client, temperature=1.5, seed=7, n=4)
    again = answer(client, temperature=1.5, seed=7, n=4)
    texts = [choice["text"] for choice in first["choices"]]
    assert texts == [choice["text"] for choice in again["choices"]]
    assert len(set(texts)) == 4
    assert answer(client, temperature=1.5, seed=7)["choices"][0]["text"] == texts[0]


def test_top_p_zero_is_the_likeliest_token(client: Any, wanted: Any) -> None:
    assert answer(client, temperature=2, top_p=0)["choices"][0]["text"] == words(wanted[0])


def test_tokenize_and_back(client: Any) -> None:
    found = client.post("/tokenize", json={"prompt": TEXT}).json()
    assert found == {"tokens": PROMPT, "count": 3, "max_model_len": 512}
    back = client.post("/detokenize", json={"tokens": PROMPT}).json()
    assert back == {"prompt": "w2w6w8"}
    bad = client.post("/detokenize", json={"tokens": [5, 9999]})
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "tokens[1]")
