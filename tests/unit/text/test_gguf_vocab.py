"""Tokenizers from GGUF metadata, against other readers of the same vocabulary."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tiny_vocabularies import CORPUS, SAMPLES, from_metadata, gguf_metadata
from tokenizers import Regex, normalizers, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel, Digits, Split
from transformers import AutoTokenizer

from layline.errors import CorruptFileError, UnsupportedFormatError
from layline.text.pretokenize import RULES, pre_tokenizer
from layline.text.tokenizer import Tokenizer

# How the tokenizer.json of models with these rules spells them.
_SPACES = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + _SPACES
_QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + _SPACES
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def by_pattern(*patterns: str) -> pre_tokenizers.PreTokenizer:
    splits = [Split(Regex(pattern), behavior="isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*splits, ByteLevel(add_prefix_space=False, use_regex=False)])


_WORDS = {
    "gpt-2": ByteLevel(add_prefix_space=False),
    "smollm": pre_tokenizers.Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    ),
    "llama-bpe": by_pattern(_LLAMA3),
    "smaug-bpe": by_pattern(_LLAMA3),
    "qwen2": by_pattern(_QWEN2),
    "deepseek-r1-qwen": by_pattern(_QWEN2),
    "tekken": by_pattern(_TEKKEN),
}


@pytest.mark.parametrize("pre", sorted(_WORDS))
@pytest.mark.parametrize("text", [*SAMPLES, "I'LL 12345 3½ a/b//\n\n x \n \n", "ǅabc ABCdef"])
def test_words(pre: str, text: str) -> None:
    # The individual digits of SmolLM2 are those of Unicode's N, of which "½" is one.
    assert pre_tokenizer(RULES[pre]).pre_tokenize_str(text) == _WORDS[pre].pre_tokenize_str(text)


def test_words_of_the_default_rules() -> None:
    words = pre_tokenizer(RULES["default"]).pre_tokenize_str("it's 12345, a+b  c")
    expected = "it|'|s|Ġ|123|45|,|Ġa|+|b|Ġ|Ġc"
    assert "|".join(word for word, _ in words) == expected


def test_words_of_the_deepseek_rules() -> None:
    text = "a1234 .x\n天1"
    coder = pre_tokenizer(RULES["deepseek-coder"]).pre_tokenize_str(text)
    assert [text[a:b] for _, (a, b) in coder] == ["a", *"1234", " .", "x", "\n", "天", "1"]
    third = pre_tokenizer(RULES["deepseek-v3"]).pre_tokenize_str(text)
    assert [text[a:b] for _, (a, b) in third] == ["a", "123", "4", " .", "x", "\n", "天", "1"]


@pytest.mark.parametrize("pre", sorted(_WORDS))
def test_encode_equals_the_vocabulary_it_came_from(
    byte_level: tokenizers.Tokenizer, pre: str
) -> None:
    reference = tokenizers.Tokenizer.from_str(byte_level.to_str())
    reference.pre_tokenizer = _WORDS[pre]
    if pre == "qwen2":
        reference.normalizer = normalizers.NFC()
    ours = from_metadata(gguf_metadata(byte_level, pre))
    for text in SAMPLES:
        ids = reference.encode(text, add_special_tokens=False).ids
        assert ours.encode(text) == ids
        assert ours.decode(ids) == reference.decode(ids)
        assert ours.decode(ids, skip_special=False) == reference.decode(
            ids, skip_special_tokens=False
        )


@pytest.mark.parametrize("pre", ["llama-bpe", "smollm"])
def test_encode_equals_transformers_on_a_gguf_file(
    byte_level: tokenizers.Tokenizer, tmp_path: Path, pre: str
) -> None:
    gguf = pytest.importorskip("gguf")
    metadata = gguf_metadata(byte_level, pre, token_type=None)
    tokens, merges = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.merges"]
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_merges(merges)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_eos_token_id(2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    reference = AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    fields = gguf.GGUFReader(tmp_path / "model.gguf").fields
    ours = from_metadata({key: field.contents() for key, field in fields.items()})
    for text in SAMPLES:
        if pre == "smollm" and any(c.isdigit() for c in text):
            continue  # transformers does not split the digits of this vocabulary
        assert ours.encode(text) == reference(text, add_special_tokens=False)["input_ids"]


def test_whole_words_first() -> None:
    """A word that is a token is that token, though merges would end elsewhere."""
    values = {
        "model": "gpt2",
        "tokens": ["a", "b", "c", "ab", "bc", "abc"],
        "merges": ["b c", "a b"],
    }
    metadata = {f"tokenizer.ggml.{key}": value for key, value in values.items()}
    llama3 = from_metadata({**metadata, "tokenizer.ggml.pre": "llama-bpe"})
    gpt2 = from_metadata({**metadata, "tokenizer.ggml.pre": "gpt-2"})
    assert llama3.encode("abc") == [5]
    assert gpt2.encode("abc") == [0, 4]


class TestBosAndEos:
    @pytest.mark.parametrize(
        ("pre", "flag", "adds"),
        [
            ("smollm", None, False),
            ("smollm", True, True),
            ("llama-bpe", None, True),
            ("llama-bpe", False, False),
            ("tekken", None, True),
            ("qwen2", None, False),
        ],
    )
    def test_bos(
        self, byte_level: tokenizers.Tokenizer, pre: str, flag: bool | None, adds: bool
    ) -> None:
        ours = from_metadata(gguf_metadata(byte_level, pre, bos_token_id=1, add_bos_token=flag))
        assert ours.bos_id == 1
        assert (ours.encode("hello")[0] == 1) == adds
        assert ours.encode("<|im_start|>hello").count(1) == 1
        assert 1 not in ours.encode("hello", add_special=False)

    def test_eos_after_a_text(self, byte_level: tokenizers.Tokenizer) -> None:
        more = {"eos_token_id": 2, "add_eos_token": True}
        ours = from_metadata(gguf_metadata(byte_level, "smollm", **more))
        assert ours.encode("hello")[-1] == 2
        assert 2 not in ours.encode("hello", add_special=False)

    def test_ending_ids(self, byte_level: tokenizers.Tokenizer) -> None:
        stated = {"eos_token_id": 9, "eot_token_id": 10, "eom_token_id": 11}
        ours = from_metadata(
            gguf_metadata(byte_level, "smollm", **stated), generation={"eos_token_id": [12, 9]}
        )
        # 0 and 2 are <|endoftext|> and <|im_end|>, known by their text.
        assert ours.eos_ids == {0, 2, 9, 10, 11, 12}

    def test_ending_text_that_is_no_control_token(self, byte_level: tokenizers.Tokenizer) -> None:
        tokens = byte_level.get_vocab_size()
        types = [1] * tokens
        ours = from_metadata(gguf_metadata(byte_level, "smollm", token_type=types))
        assert ours.eos_ids == frozenset()
        assert ours.special_ids == frozenset()


class TestTokenTypes:
    def test_user_defined_and_unused(self, byte_level: tokenizers.Tokenizer) -> None:
        metadata = gguf_metadata(byte_level, "qwen2")
        size = len(metadata["tokenizer.ggml.tokens"])
        metadata["tokenizer.ggml.tokens"] += ["<think>", "[PAD0]", "[PAD1]"]
        metadata["tokenizer.ggml.token_type"] += [4, 5, 5]
        ours = from_metadata(metadata)
        assert ours.vocab_size == size + 1
        ids = ours.encode("<think>so<|im_end|>")
        assert (ids[0], ids[-1]) == (size, 2)
        assert ours.decode(ids) == "<think>so"
        assert ours.token_bytes(size) == b"<think>"
        assert ours.token_bytes(size + 1) == b""
        assert ours.decode([size + 1]) == ""
        assert size + 2 not in ours.encode("[PAD1]")

    def test_arrays_of_numbers(self, byte_level: tokenizers.Tokenizer) -> None:
        metadata = gguf_metadata(byte_level, "smollm")
        metadata["tokenizer.ggml.token_type"] = np.array(metadata["tokenizer.ggml.token_type"])
        metadata["tokenizer.ggml.eos_token_id"] = np.uint32(2)
        ours = from_metadata(metadata)
        assert ours.special_ids == {0, 1, 2}
        assert ours.decode(ours.encode("hello<|im_end|>")) == "hello"


class LazyMapping(Mapping[str, Any]):
    """Metadata whose arrays are decoded on access, as a file reader gives them."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values_by_key = values
        self.read: list[str] = []

    def __getitem__(self, key: str) -> Any:
        value = self.values_by_key[key]
        self.read.append(key)
        return list(value) if isinstance(value, list) else value

    def __iter__(self) -> Iterator[str]:
        return iter(self.values_by_key)

    def __len__(self) -> int:
        return len(self.values_by_key)


def test_arrays_are_read_once(byte_level: tokenizers.Tokenizer) -> None:
    metadata = LazyMapping(
        {**gguf_metadata(byte_level, "smollm"), "tokenizer.chat_template": "x", "other": [1]}
    )
    ours = from_metadata(metadata)
    for text in SAMPLES:
        ours.decode(ours.encode(text))
    assert metadata.read.count("tokenizer.ggml.tokens") == 1
    assert metadata.read.count("tokenizer.ggml.merges") == 1
    assert "other" not in metadata.read


def test_templates_and_names(byte_level: tokenizers.Tokenizer) -> None:
    metadata = gguf_metadata(byte_level, "smollm", bos_token_id=1, eos_token_id=2)
    metadata["tokenizer.chat_template"] = "{{ bos_token }}{{ eos_token }}"
    metadata["tokenizer.chat_template.tool_use"] = "tools"
    template = from_metadata(metadata).chat_template
    assert template is not None
    assert template.render([{"role": "user", "content": "hi"}]) == "<|im_start|><|im_end|>"
    assert template.sources["tool_use"] == "tools"
    assert from_metadata(gguf_metadata(byte_level, "smollm")).chat_template is None


@pytest.fixture(scope="module")
def model() -> Any:
    sentencepiece = pytest.importorskip("sentencepiece")
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([t for t in CORPUS if t.isascii()]),
        model_writer=written,
        model_type="bpe",
        vocab_size=420,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        user_defined_symbols=["<think>"],
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())


@pytest.fixture(scope="module")
def metadata(model: Any) -> dict[str, Any]:
    def kind(i: int) -> int:
        if model.is_unknown(i):
            return 2
        if model.is_control(i):
            return 3
        if model.is_byte(i):
            return 6
        return 4 if model.id_to_piece(i) == "<think>" else 1

    ids = range(model.vocab_size())
    values = {
        "model": "llama",
        "tokens": [model.id_to_piece(i) for i in ids],
        "scores": [model.get_score(i) for i in ids],
        "token_type": [kind(i) for i in ids],
        "bos_token_id": model.bos_id(),
        "eos_token_id": model.eos_id(),
        "unknown_token_id": model.unk_id(),
    }
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}


@pytest.fixture(scope="module")
def ours(metadata: dict[str, Any]) -> Tokenizer:
    return from_metadata(metadata)


class TestSentencePiece:
    """Against the sentencepiece library itself, on a model it trained."""

    # The library drops a NUL, and ends words at its user-defined symbols in its own way.
    @pytest.mark.parametrize("text", [t for t in SAMPLES if "\x00" not in t])
    def test_encode_and_decode(self, model: Any, ours: Tokenizer, text: str) -> None:
        ids = ours.encode(text, add_special=False)
        assert ids == model.encode(text)
        assert ours.decode(ids) == model.decode(ids)
        assert ours.encode(text) == [model.bos_id(), *ids]

    def test_scores_decide(self) -> None:
        """Not the order of ids, and not the length."""
        values = {
            "model": "llama",
            "tokens": ["<unk>", "a", "b", "c", "ab", "bc"],
            "token_type": [2, 1, 1, 1, 1, 1],
            "scores": [0.0, -9.0, -9.0, -9.0, -2.0, -1.0],
            "add_space_prefix": False,
            "unknown_token_id": 0,
        }
        metadata = {f"tokenizer.ggml.{key}": value for key, value in values.items()}
        assert from_metadata(metadata).encode("abc") == [1, 5]
        metadata["tokenizer.ggml.scores"][4] = -0.5
        assert from_metadata(metadata).encode("abc") == [4, 3]

    def test_bytes_of_tokens(self, ours: Tokenizer, model: Any) -> None:
        assert ours.token_bytes(model.piece_to_id("<0xE4>")) == b"\xe4"
        the = model.encode("the harbour")[0]
        assert ours.token_bytes(the).startswith(b" ")
        assert ours.decode([the, the]) == (ours.token_bytes(the) * 2).decode()[1:]

    def test_added_symbols(self, ours: Tokenizer, model: Any) -> None:
        think = model.piece_to_id("<think>")
        ids = ours.encode("a<think>b</s>", add_special=False)
        assert think in ids
        assert ids[-1] == model.eos_id()
        assert ours.decode(ids) == "a<think> b"  # the prefix of the text after a symbol stays
        assert ours.special_ids == {model.unk_id(), model.bos_id(), model.eos_id()}

    def test_no_space_prefix(self, metadata: dict[str, Any]) -> None:
        ours = from_metadata({**metadata, "tokenizer.ggml.add_space_prefix": False})
        ids = ours.encode(" harbour", add_special=False)
        assert ours.decode(ids) == " harbour"
        assert ours.encode("harbour", add_special=False) != ids

    def test_no_bos(self, metadata: dict[str, Any]) -> None:
        ours = from_metadata({**metadata, "tokenizer.ggml.add_bos_token": False})
        assert ours.encode("a") == ours.encode("a", add_special=False)


class TestRefusals:
    @pytest.mark.parametrize(
        ("pre", "words"),
        [("qwen", "did you mean 'qwen2'"), (None, "pre None is not one of"), ("bloom", "bloom")],
    )
    def test_unknown_words(
        self, byte_level: tokenizers.Tokenizer, pre: str | None, words: str
    ) -> None:
        with pytest.raises(UnsupportedFormatError, match=words) as caught:
            from_metadata(gguf_metadata(byte_level, pre))
        assert "model.gguf" in str(caught.value)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize("model", ["bert", "t5", None])
    def test_unknown_model(self, byte_level: tokenizers.Tokenizer, model: str | None) -> None:
        with pytest.raises(UnsupportedFormatError, match=r"tokenizer\.ggml\.model"):
            from_metadata(gguf_metadata(byte_level, "smollm", model=model))

    @pytest.mark.parametrize(
        ("more", "words"),
        [
            ({"tokens": None}, "tokens is missing"),
            ({"tokens": []}, "tokens is missing"),
            ({"token_type": [1, 2]}, "token_type has 2 entries"),
            ({"merges": ["a zzz"]}, "merges do not fit"),
            ({"merges": ["ab"]}, "merges do not fit"),
            ({"bos_token_id": 10_000}, "bos_token_id is 10000"),
            ({"eot_token_id": -1}, "eot_token_id is -1"),
        ],
    )
    def test_contradictions(
        self, byte_level: tokenizers.Tokenizer, more: dict[str, Any], words: str
    ) -> None:
        with pytest.raises(CorruptFileError, match=words):
            from_metadata(gguf_metadata(byte_level, "smollm", **more))

    def test_repeated_tokens(self, byte_level: tokenizers.Tokenizer) -> None:
        metadata = gguf_metadata(byte_level, "smollm")
        metadata["tokenizer.ggml.tokens"][-1] = metadata["tokenizer.ggml.tokens"][-2]
        with pytest.raises(CorruptFileError, match="differ"):
            from_metadata(metadata)

    @pytest.mark.parametrize("scores", [None, [0.0]])
    def test_scores(self, scores: list[float] | None) -> None:
        metadata = {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": ["a", "b"],
            "tokenizer.ggml.scores": scores,
        }
        with pytest.raises(CorruptFileError, match="scores"):
            from_metadata(metadata)
