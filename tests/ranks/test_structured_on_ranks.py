"""Answers that follow a grammar where other processes sample them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from layline import LLM, Grammar, SamplingParams
from layline.errors import SamplingError
from support.writer import save_writer

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 99, "minimum": 0}, "b": {"enum": ["é"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"tp": 2, "attn_dp": 2}], ids="-".join)
def test_every_leader_follows_its_requests(tmp_path: Path, mesh: dict[str, Any]) -> None:
    save_writer(tmp_path)
    prompts = ["The harbour", "In 2024", "x", "Paris"]
    given = [
        SamplingParams(
            temperature=1.0, seed=seed, max_tokens=120, grammar=Grammar.json_schema(SCHEMA)
        )
        for seed in range(len(prompts))
    ]
    wanted = LLM(str(tmp_path), threads=1).generate(prompts, given)
    with LLM(str(tmp_path), threads=1, **mesh) as llm:
        with pytest.raises(SamplingError, match="invalid regex"):
            llm.generate("x", SamplingParams(grammar=Grammar.regex("[")))
        found = llm.generate(prompts, given)
    assert [one.token_ids for one in found] == [one.token_ids for one in wanted]
    for one in found:
        jsonschema_rs.validate(SCHEMA, json.loads(one.text))
