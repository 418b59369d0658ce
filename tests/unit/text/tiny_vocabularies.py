"""Tiny tokenizers, trained here: byte-level BPE, and SentencePiece-like with byte fallback."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from layline.text.tokenizer import Tokenizer, load_tokenizer

CORPUS = [
    "The harbour was quiet before the morning ferries, and the gulls were loud above it.",
    "In 2024 the line carried 1234567 people; by 2025 it's said they'll carry more.",
    "Ein schöner Tag über den Dächern, größer als gestern. Déjà vu, naïve café.",
    "Здравствуйте, как ваши дела? Мы едем домой.",
    "你好\uff0c世界。今天的天气很好。こんにちは世界、元気ですか。",
    "def add(left, right):\n    return left + right  # two numbers\n\n\nprint(add(1, 2))",
    "👋🏽 hello 🌍 👨‍👩‍👧 tabs\tand  double   spaces ",
    "She'd SAY it'S fine, WE'LL see. can't won't",
]
TURNS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SAMPLES = [
    *CORPUS,
    "",
    " ",
    "  leading and trailing  ",
    "line\r\nline\n\n  indented",
    "e\u0301 combining, \u212b angstrom",
    "\ufffd already broken",
    "½ ² ١٢٣ digits 007",
    "a<|im_end|>b <|im_start|>user",
    "\x00\x7f\u200b",
]


@dataclass
class Source:
    """Where a vocabulary is, as a checkpoint says it."""

    directory: Path | None = None
    gguf_metadata: Mapping[str, Any] | None = None


@dataclass
class FakeCheckpoint:
    """The part of a checkpoint that the tokenizer reads."""

    source: Source
    path: Path = Path("model.gguf")
    config: dict[str, Any] = field(default_factory=dict)
    generation: dict[str, Any] = field(default_factory=dict)

    def vocabulary(self) -> Source:
        return self.source


def from_directory(directory: Path, **parts: Any) -> Tokenizer:
    return load_tokenizer(FakeCheckpoint(Source(directory=directory), directory, **parts))


def from_metadata(metadata: Mapping[str, Any], **parts: Any) -> Tokenizer:
    return load_tokenizer(FakeCheckpoint(Source(gguf_metadata=metadata), **parts))


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def byte_level_backend() -> tokenizers.Tokenizer:
    """Byte-level BPE of 600 tokens with the words of SmolLM2."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=600,
            special_tokens=list(TURNS),
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    return backend


def sentencepiece_backend() -> tokenizers.Tokenizer:
    """BPE over marked spaces with byte fallback, as in a Llama 2 tokenizer.json."""
    plain = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    plain.normalizer = normalizers.Replace(" ", "▁")
    plain.train_from_iterator(
        [text for text in CORPUS if text.isascii()],
        trainers.BpeTrainer(
            vocab_size=250, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False
        ),
    )
    trained = json.loads(plain.to_str())["model"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    names += [text for text in trained["vocab"] if text not in names]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={text: i for i, text in enumerate(names)},
            merges=[tuple(merge) for merge in trained["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return backend


def gguf_metadata(backend: tokenizers.Tokenizer, pre: str, **more: Any) -> dict[str, Any]:
    """The ``tokenizer.ggml`` keys of a byte-level ``backend``; ``more`` adds or replaces keys."""
    model = json.loads(backend.to_str())["model"]
    tokens = [backend.id_to_token(i) for i in range(backend.get_vocab_size())]
    special = {t.content for t in backend.get_added_tokens_decoder().values() if t.special}
    values = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "merges": [" ".join(merge) for merge in model["merges"]],
        "token_type": [3 if token in special else 1 for token in tokens],
        **more,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not None}
