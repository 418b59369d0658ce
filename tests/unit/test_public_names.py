"""What ``import layline`` offers, and the code that docs/ shows of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import layline

DOCS = Path(__file__).parents[2] / "docs"
PUBLIC = ["LLM", "AsyncEngine", "Grammar", "SamplingParams", "Submission", "__version__"]


def test_the_public_names() -> None:
    assert sorted(layline.__all__) == sorted(PUBLIC)
    for name in PUBLIC:
        assert getattr(layline, name) is not None
        assert name in dir(layline)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        layline.Nothing  # noqa: B018


@pytest.mark.parametrize("name", ["python.md", "serving.md"])
def test_code_in_the_documents_compiles(name: str) -> None:
    text = (DOCS / name).read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert blocks
    for block in blocks:
        compile(block, name, "exec")
        for names in re.findall(r"^from layline import (.*)$", block, re.MULTILINE):
            assert set(names.split(", ")) <= set(PUBLIC)
