"""SmolLM2 fills in a schema: its vocabulary of 49,152 ids, its own words where they are free."""

from __future__ import annotations

import json
import re

import jsonschema_rs
import pytest

from layline import LLM, Grammar, SamplingParams
from support.model import smollm2_path

pytestmark = pytest.mark.smollm2

CITY = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "country": {"enum": ["France", "Germany", "Japan"]},
        "capital": {"type": "boolean"},
        "population": {"type": "integer", "minimum": 0, "maximum": 99999999},
    },
    "required": ["name", "country", "capital", "population"],
    "additionalProperties": False,
}


def test_a_schema_an_expression_and_free_text_together() -> None:
    llm = LLM(smollm2_path(), threads=1, max_model_len=512)
    asked = [{"role": "user", "content": "Describe the city of Paris as JSON."}]
    prompt = llm.tokenizer.apply_chat(asked)
    given = [
        SamplingParams(temperature=0.0, max_tokens=100, grammar=Grammar.json_schema(CITY)),
        SamplingParams(temperature=0.0, max_tokens=100, grammar=Grammar.regex("[A-Z][a-z]{2,8}!")),
        SamplingParams(temperature=0.0, max_tokens=5),
    ]
    city, word, free = llm.generate([prompt] * 3, given)
    found = json.loads(city.text)
    jsonschema_rs.validate(CITY, found)
    assert (found["name"], found["country"]) == ("Paris", "France")
    assert city.finish_reason == word.finish_reason == "stop"
    assert re.fullmatch("[A-Z][a-z]{2,8}!", word.text)
    alone = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=5))[0]
    assert free.token_ids == alone.token_ids
