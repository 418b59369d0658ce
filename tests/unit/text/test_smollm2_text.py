"""The real SmolLM2 tokenizer, where ``layline pull`` has fetched it, against golden ids."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tiny_vocabularies import SAMPLES

from layline.errors import LaylineError
from layline.text.detokenize import IncrementalDecoder
from layline.text.tokenizer import Tokenizer, load_tokenizer

pytestmark = pytest.mark.smollm2

GOLDEN = Path(__file__).parents[2] / "golden" / "smollm2.json"
CASES = json.loads(GOLDEN.read_text(encoding="utf-8"))["cases"]


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    from layline.weights.opening import open_checkpoint

    try:
        checkpoint = open_checkpoint("smollm2-135m")
    except LaylineError as error:
        pytest.skip(f"the checkpoint is not in the cache (layline pull fetches it): {error}")
    tokenizer = load_tokenizer(checkpoint)
    checkpoint.close()
    return tokenizer


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_golden_ids(smollm2: Tokenizer, case: dict[str, Any]) -> None:
    if case["kind"] == "chat":
        assert smollm2.chat_template is not None
        assert smollm2.chat_template.render(case["messages"]) == case["prompt"]
        ids = smollm2.apply_chat(case["messages"])
    else:
        ids = smollm2.encode(case["prompt"])
    assert ids == case["prompt_ids"]
    assert smollm2.decode(ids, skip_special=False) == case["prompt"]


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_golden_text(smollm2: Tokenizer, case: dict[str, Any]) -> None:
    ids, text = case["greedy_ids"], case["greedy_text"]
    assert smollm2.decode(ids, skip_special=False) == text
    decoder = IncrementalDecoder(smollm2, case["prompt_ids"], skip_special=False)
    assert "".join(map(decoder.add, ids)) + decoder.finish() == text
    for top in case["top5"]:
        token = top["token"].replace("Ġ", " ").replace("Ċ", "\n")
        assert smollm2.token_bytes(top["id"]).decode() == token


def test_facts(smollm2: Tokenizer) -> None:
    assert (smollm2.vocab_size, smollm2.bos_id) == (49152, 1)
    assert smollm2.special_ids == frozenset(range(17))
    assert smollm2.eos_ids == {0, 2}  # <|endoftext|> beside the stated <|im_end|>
    assert smollm2.encode("hello")[0] != 1  # its file says that no BOS is added


def test_text_goes_around(smollm2: Tokenizer) -> None:
    for text in SAMPLES:
        ids = smollm2.encode(text)
        assert smollm2.decode(ids, skip_special=False) == text


def test_random_tokens(smollm2: Tokenizer) -> None:
    draw = random.Random(7)
    for _ in range(20):
        ids = [draw.randrange(49152 + 10) for _ in range(200)]
        decoder = IncrementalDecoder(smollm2, [])
        assert "".join(map(decoder.add, ids)) + decoder.finish() == smollm2.decode(ids)
