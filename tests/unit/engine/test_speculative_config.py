"""Flags of speculation that do not go together."""

from __future__ import annotations

from typing import Any

import pytest

from layline import LLM
from layline.config import EngineConfig
from layline.errors import UsageError

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "kind": ({"speculative": "eagle"}, r"speculative 'eagle' is not one of off, ngram, draft"),
    "none": ({"speculative": None}, r"speculative None is not one of off, ngram, draft"),
    "tokens": ({"speculative_tokens": 0}, "speculative_tokens 0 must be a positive integer"),
    "many": ({"speculative_tokens": 65}, "speculative_tokens 65 is too large; the most is 64"),
    "no model": (
        {"speculative": "draft"},
        "speculative 'draft' needs a draft model; expected speculative_model .* 'ngram'",
    ),
    "model alone": (
        {"speculative_model": "m"},
        "speculative_model 'm' is for a draft model; expected speculative 'draft' .* 'off'",
    ),
    "policy alone": (
        {"speculative": "ngram", "speculative_boundary_reduction": "ar"},
        "speculative_boundary_reduction 'ar' is for a draft model; .* found 'ngram'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_go_together_is_refused(name: str) -> None:
    flags, message = REFUSED[name]
    with pytest.raises(UsageError, match=message) as caught:
        EngineConfig(**flags)
    assert "\n" not in str(caught.value)


def test_keywords_are_checked_by_name() -> None:
    with pytest.raises(UsageError, match=r"'speculative_token' .* 'speculative_tokens'"):
        LLM("m", speculative_token=3)
