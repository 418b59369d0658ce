"""Fixtures: the tiny vocabularies, as directories and as tokenizers."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from tiny_vocabularies import (
    byte_level_backend,
    from_directory,
    sentencepiece_backend,
    write_json,
)

from layline.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def byte_level() -> tokenizers.Tokenizer:
    return byte_level_backend()


@pytest.fixture(scope="session")
def byte_level_directory(
    byte_level: tokenizers.Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    directory = tmp_path_factory.mktemp("byte-level")
    byte_level.save(str(directory / "tokenizer.json"))
    write_json(
        directory / "tokenizer_config.json",
        {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>"},
    )
    return directory


@pytest.fixture(scope="session")
def sentencepiece_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sentencepiece-like")
    sentencepiece_backend().save(str(directory / "tokenizer.json"))
    write_json(
        directory / "tokenizer_config.json",
        {
            "bos_token": "<s>",
            "eos_token": {"__type": "AddedToken", "content": "</s>"},
            "unk_token": "<unk>",
            "add_bos_token": True,
            "add_eos_token": False,
        },
    )
    return directory


@pytest.fixture(scope="session")
def byte_level_tokenizer(byte_level_directory: Path) -> Tokenizer:
    return from_directory(byte_level_directory)


@pytest.fixture(scope="session")
def sentencepiece_tokenizer(sentencepiece_directory: Path) -> Tokenizer:
    return from_directory(sentencepiece_directory)
