"""Flags of generate that say what the text must look like."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from layline import Grammar

SCHEMA = '{"type": "object"}'


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ([], None),
        (["--json-schema", SCHEMA], Grammar.json_schema(SCHEMA)),
        (["--json-schema", "schema.json"], Grammar.json_schema(f"{SCHEMA}\n")),
        (["--json-schema", "true"], Grammar.json_schema("true")),
        (["--regex", "[ab]+"], Grammar.regex("[ab]+")),
        (["--regex", ""], Grammar.regex("")),
        (["--grammar", "text.lark"], Grammar.lark('start: "a"\n')),
    ],
)
def test_the_grammar_of_the_flags(
    layline: Any,
    loader: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    wanted: Grammar | None,
) -> None:
    (tmp_path / "schema.json").write_text(f"{SCHEMA}\n", encoding="utf-8")
    (tmp_path / "text.lark").write_text('start: "a"\n', encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    result = layline("generate", "hello", *arguments)
    assert (result.status, result.err) == (0, "")
    assert loader.llm.params[0].grammar == wanted


def test_files_that_are_no_text(layline: Any, loader: Any, tmp_path: Path) -> None:
    path = tmp_path / "bytes"
    path.write_bytes(b"\xff\xfe")
    for flag in ("--json-schema", "--grammar"):
        result = layline("generate", "hello", flag, str(path))
        assert result.status == 2
        assert "not UTF-8 text" in result.err
    path.write_text("x" * ((1 << 20) + 1), encoding="utf-8")
    assert "larger than" in layline("generate", "hello", "--grammar", str(path)).err
    assert loader.opened == []
