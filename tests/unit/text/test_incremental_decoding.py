"""Incremental decoding, against decoding all at once."""

from __future__ import annotations

import codecs
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_vocabularies import (
    SAMPLES,
    byte_level_backend,
    from_directory,
    from_metadata,
    gguf_metadata,
    sentencepiece_backend,
)
from tokenizers import models, pre_tokenizers

from layline.text.detokenize import IncrementalDecoder
from layline.text.tokenizer import Tokenizer


def pieces(
    tokenizer: Tokenizer, prompt: list[int], completion: list[int], **how: bool
) -> list[str]:
    decoder = IncrementalDecoder(tokenizer, prompt, **how)
    return [*map(decoder.add, completion), decoder.finish()]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    directory = tmp_path_factory.mktemp("vocabularies")
    tokenizers_by_name = {}
    for name, make in (("bytes", byte_level_backend), ("marks", sentencepiece_backend)):
        (directory / name).mkdir()
        make().save(str(directory / name / "tokenizer.json"))
        tokenizers_by_name[name] = from_directory(directory / name)
    return tokenizers_by_name


texts = st.one_of(st.text(max_size=30), st.sampled_from(SAMPLES))
kinds = st.sampled_from(["bytes", "marks"])


@settings(max_examples=300, deadline=None, database=None)
@given(kind=kinds, text=texts, cut=st.integers(0, 60))
def test_text_split_anywhere(both: dict[str, Tokenizer], kind: str, text: str, cut: int) -> None:
    """Also inside a character: then the completion finishes it and gives it out whole."""
    tokenizer = both[kind]
    ids = tokenizer.encode(text, add_special=False)
    prompt, completion = ids[:cut], ids[cut:]
    given_out = pieces(tokenizer, prompt, completion, skip_special=False)
    if not prompt:
        assert "".join(given_out) == tokenizer.decode(ids, skip_special=False)
    else:
        before = b"".join(map(tokenizer.token_bytes, prompt))
        complete = codecs.utf_8_decode(before, "strict", False)[1]
        everything = b"".join(map(tokenizer.token_bytes, ids))
        assert "".join(given_out) == everything[complete:].decode()
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in given_out)


@settings(max_examples=400, deadline=None, database=None)
@given(data=st.data(), kind=kinds, skip=st.booleans())
def test_any_tokens(both: dict[str, Tokenizer], data: st.DataObject, kind: str, skip: bool) -> None:
    """Broken bytes, special tokens and ids beyond the vocabulary included."""
    tokenizer = both[kind]
    token_ids = st.integers(0, tokenizer.vocab_size + 3)
    if kind == "marks":
        token_ids = st.one_of(token_ids, st.integers(3, 3 + 255))  # mostly single bytes
    prompt = data.draw(st.lists(token_ids, max_size=6))
    completion = data.draw(st.lists(token_ids, max_size=12))
    given_out = pieces(tokenizer, prompt, completion, skip_special=skip)
    text = "".join(given_out)
    everything = tokenizer.decode(prompt + completion, skip_special=skip)
    shown = [i for i in prompt if not (skip and i in tokenizer.special_ids)]
    before = b"".join(map(tokenizer.token_bytes, shown))
    if not before:
        assert text == everything
        return
    open_bytes = codecs.getincrementaldecoder("utf-8")("replace")
    stable = open_bytes.decode(before)
    if tokenizer.decoding.drops_first_space:
        stable = stable.removeprefix(" ")
    # Bytes of the prompt that no completion goes on with stay the prompt's.
    abandoned = [stable, stable + "\ufffd"] if open_bytes.getstate()[0] else [stable]
    assert everything in [prefix + text for prefix in abandoned]


@pytest.mark.parametrize("character", ["é", "你", "🌍", "\ufffd"])
def test_prompt_ends_inside_a_character(sentencepiece_tokenizer: Tokenizer, character: str) -> None:
    ids = [3 + byte for byte in character.encode()]
    for cut in range(1, len(ids)):
        given_out = pieces(sentencepiece_tokenizer, [1, *ids[:cut]], [*ids[cut:], 3 + 0x21])
        assert given_out == [*[""] * (len(ids) - cut - 1), character, "!", ""]


def test_prompt_bytes_that_nothing_completes(sentencepiece_tokenizer: Tokenizer) -> None:
    opened = [3 + 0xE4, 3 + 0xBD]
    assert pieces(sentencepiece_tokenizer, opened, [3 + 0x21]) == ["!", ""]
    assert pieces(sentencepiece_tokenizer, opened, []) == [""]
    assert pieces(sentencepiece_tokenizer, opened, [2]) == ["", ""]
    # A byte that goes on without completing makes the broken character the completion's.
    assert pieces(sentencepiece_tokenizer, opened[:1], [3 + 0xBD, 3 + 0x21]) == ["", "\ufffd!", ""]


def test_held_until_finish(sentencepiece_tokenizer: Tokenizer) -> None:
    assert pieces(sentencepiece_tokenizer, [1], [3 + 0xF0, 3 + 0x9F]) == ["", "", "\ufffd"]


def test_finish_twice(sentencepiece_tokenizer: Tokenizer) -> None:
    decoder = IncrementalDecoder(sentencepiece_tokenizer, [])
    decoder.add(3 + 0xF0)
    assert (decoder.finish(), decoder.finish()) == ("\ufffd", "")


def test_first_space(sentencepiece_tokenizer: Tokenizer) -> None:
    """Dropped where the text starts, kept after a prompt."""
    ids = sentencepiece_tokenizer.encode("The harbour", add_special=False)
    assert "".join(pieces(sentencepiece_tokenizer, [], ids)) == "The harbour"
    assert "".join(pieces(sentencepiece_tokenizer, [1], ids)) == "The harbour"
    beyond = sentencepiece_tokenizer.vocab_size
    assert "".join(pieces(sentencepiece_tokenizer, [beyond], [beyond, *ids])) == "The harbour"
    assert "".join(pieces(sentencepiece_tokenizer, [1, *ids], ids)) == " The harbour"


def test_special_tokens(byte_level_tokenizer: Tokenizer) -> None:
    ids = byte_level_tokenizer.encode("one<|im_end|>two", add_special=False)
    assert "".join(pieces(byte_level_tokenizer, [], ids)) == "onetwo"
    shown = pieces(byte_level_tokenizer, [], ids, skip_special=False)
    assert "".join(shown) == "one<|im_end|>two"


def test_from_gguf_tokens(byte_level: tokenizers.Tokenizer) -> None:
    tokenizer = from_metadata(gguf_metadata(byte_level, "smollm"))
    for text in SAMPLES:
        ids = tokenizer.encode(text)
        assert "".join(pieces(tokenizer, [], ids)) == tokenizer.decode(ids)


class TestDecoderOfAnotherKind:
    """A vocabulary whose text is not its tokens' bytes goes through its own decoder."""

    @pytest.fixture
    def words(self, tmp_path: Path) -> Tokenizer:
        vocabulary = {"[UNK]": 0, "red": 1, "green": 2, "blue": 3}
        backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
        backend.pre_tokenizer = pre_tokenizers.Whitespace()
        backend.add_special_tokens(["[UNK]"])
        backend.save(str(tmp_path / "tokenizer.json"))
        return from_directory(tmp_path)

    def test_equals_decode(self, words: Tokenizer) -> None:
        ids = [1, 2, 3, 0, 2, 1, 99] * 20
        assert "".join(pieces(words, [], ids)) == words.decode(ids)
        assert pieces(words, [1, 2], [3, 1]) == [" blue", " red", ""]

    def test_long_text_keeps_a_short_window(self, words: Tokenizer) -> None:
        decoder = IncrementalDecoder(words, [1] * 1000)
        for _ in range(1000):
            decoder.add(2)
        assert len(decoder._stream._ids) <= 10
