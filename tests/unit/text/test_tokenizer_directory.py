"""Tokenizers from Hugging Face directories, against transformers on the same files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
from tiny_vocabularies import SAMPLES, from_directory, write_json
from tokenizers import models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from layline.errors import CorruptFileError, PromptError, UnsupportedFormatError
from layline.text.tokenizer import AbsentTokenizer, Tokenizer


def copy_directory(source: Path, target: Path, **settings: object) -> Path:
    """A copy of a tokenizer directory with entries of tokenizer_config.json replaced."""
    target.mkdir(exist_ok=True)
    for path in source.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    config = json.loads((target / "tokenizer_config.json").read_text())
    write_json(target / "tokenizer_config.json", {**config, **settings})
    return target


@pytest.fixture(params=["byte_level_directory", "sentencepiece_directory"])
def directory(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("text", SAMPLES)
def test_encode_and_decode_equal_transformers(directory: Path, text: str) -> None:
    reference = PreTrainedTokenizerFast.from_pretrained(directory)
    ours = from_directory(directory)
    ids = reference(text)["input_ids"]
    assert ours.encode(text) == ids
    bare = reference(text, add_special_tokens=False)["input_ids"]
    assert ours.encode(text, add_special=False) == bare
    for skip in (True, False):
        expected = reference.decode(
            ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
        )
        assert ours.decode(ids, skip_special=skip) == expected


def test_a_long_text_is_encoded_like_a_short_one(directory: Path) -> None:
    """It goes another way, in which other threads can run."""
    text = "".join(SAMPLES) * 100
    assert len(text) > 1 << 13
    reference = PreTrainedTokenizerFast.from_pretrained(directory)
    ours = from_directory(directory)
    assert ours.encode(text) == reference(text)["input_ids"]
    assert (
        ours.encode(text, add_special=False)
        == reference(text, add_special_tokens=False)["input_ids"]
    )
    with pytest.raises(PromptError, match="surrogate"):
        ours.encode(text + "\ud83d")


def test_ids_and_sizes(byte_level_tokenizer: Tokenizer) -> None:
    ours = byte_level_tokenizer
    assert (ours.bos_id, ours.eos_ids, ours.special_ids) == (1, {2}, {0, 1, 2})
    assert ours.chat_template is None
    last = ours.vocab_size - 1
    assert ours.token_bytes(last) != b""
    for outside in (ours.vocab_size, ours.vocab_size + 1000, -1):
        assert ours.token_bytes(outside) == b""
        assert ours.decode([outside]) == ""


def test_vocab_size_counts_ids_not_tokens(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(models.BPE(vocab={"a": 0, "b": 7}, merges=[]))
    backend.save(str(tmp_path / "tokenizer.json"))
    assert from_directory(tmp_path).vocab_size == 8


def test_token_bytes_join_to_the_text(directory: Path) -> None:
    ours = from_directory(directory)
    for text in SAMPLES:
        ids = ours.encode(text, add_special=False)
        joined = b"".join(ours.token_bytes(i) for i in ids)
        # The encoder of the SentencePiece-like vocabulary puts a space first.
        assert joined.decode().removeprefix(" ") == text.removeprefix(" ") or joined == (
            b" " + text.encode()
        )


def test_token_bytes_of_each_kind(sentencepiece_tokenizer: Tokenizer) -> None:
    ours = sentencepiece_tokenizer
    assert ours.token_bytes(3 + 0x0A) == b"\n"
    assert ours.token_bytes(3 + 0xE4) == b"\xe4"
    assert ours.token_bytes(ours.encode("the", add_special=False)[-1]).endswith(b"the")
    assert ours.token_bytes(1) == b"<s>"


def test_added_tokens_are_spelled_as_themselves(byte_level_directory: Path, tmp_path: Path) -> None:
    """ "é" is in the byte alphabet, where it stands for the byte E9."""
    copy = copy_directory(byte_level_directory, tmp_path / "copy")
    backend = tokenizers.Tokenizer.from_file(str(copy / "tokenizer.json"))
    backend.add_tokens([tokenizers.AddedToken("<é\uff5c>", normalized=False)])
    backend.add_tokens([tokenizers.AddedToken("Ġé", normalized=False)])
    backend.save(str(copy / "tokenizer.json"))
    ours = from_directory(copy)
    assert ours.token_bytes(ours.vocab_size - 2).decode() == "<é\uff5c>"
    assert ours.token_bytes(ours.vocab_size - 1).decode() == "Ġé"


class TestBos:
    """One BOS, never two."""

    def test_added_once(self, sentencepiece_tokenizer: Tokenizer) -> None:
        ours = sentencepiece_tokenizer
        assert ours.encode("hello")[:1] == [1]
        assert ours.encode("hello").count(1) == 1
        assert ours.encode("<s>hello").count(1) == 1
        assert ours.encode("<s><s>hello").count(1) == 1
        assert ours.encode("hello <s>").count(1) == 2  # one inside the text is the user's own

    def test_not_added(self, sentencepiece_tokenizer: Tokenizer) -> None:
        ours = sentencepiece_tokenizer
        assert 1 not in ours.encode("hello", add_special=False)
        assert ours.encode("<s>hello", add_special=False).count(1) == 1
        assert ours.encode("", add_special=False) == []

    @pytest.mark.parametrize("flag", [True, False])
    def test_tokenizer_json_decides(
        self, sentencepiece_directory: Path, tmp_path: Path, flag: bool
    ) -> None:
        """Not add_bos_token and add_eos_token beside it, which are often stale."""
        copy = copy_directory(
            sentencepiece_directory, tmp_path / "copy", add_bos_token=flag, add_eos_token=flag
        )
        reference = PreTrainedTokenizerFast.from_pretrained(copy)
        ids = from_directory(copy).encode("hello")
        assert ids == reference("hello")["input_ids"]
        assert (ids[0] == 1, ids[-1] == 2) == (True, False)

    def test_chat_template_writes_it(self, sentencepiece_directory: Path, tmp_path: Path) -> None:
        template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
        copy = copy_directory(sentencepiece_directory, tmp_path / "copy", chat_template=template)
        assert from_directory(copy).apply_chat([{"role": "user", "content": "hi"}]).count(1) == 1


def test_eos_is_a_union(byte_level_directory: Path) -> None:
    ours = from_directory(
        byte_level_directory, generation={"eos_token_id": [0, 7]}, config={"eos_token_id": 9}
    )
    assert ours.eos_ids == {0, 2, 7, 9}


@pytest.mark.parametrize("value", [None, True, "2", [None, "x"], -1])
def test_eos_values_that_are_no_ids_are_ignored(byte_level_directory: Path, value: object) -> None:
    assert from_directory(byte_level_directory, config={"eos_token_id": value}).eos_ids == {2}


def test_special_tokens_map_and_listed_tokens(byte_level_directory: Path, tmp_path: Path) -> None:
    """Tokens beside tokenizer.json, as older checkpoints have them."""
    copy = copy_directory(byte_level_directory, tmp_path / "copy")
    size = from_directory(copy).vocab_size
    listed = {
        str(size): {"content": "<think>", "special": False, "normalized": False},
        str(size + 1): {"content": "<|pad|>", "special": True, "normalized": False},
    }
    write_json(copy / "tokenizer_config.json", {"added_tokens_decoder": listed})
    write_json(copy / "special_tokens_map.json", {"eos_token": {"content": "<|im_end|>"}})
    ours = from_directory(copy)
    reference = PreTrainedTokenizerFast.from_pretrained(copy)
    text = "a <think>b<|pad|>c<|im_end|>"
    assert ours.encode(text) == reference(text)["input_ids"]
    assert ours.vocab_size == size + 2
    assert size + 1 in ours.special_ids
    assert size not in ours.special_ids
    assert ours.decode(ours.encode(text)) == "a <think>bc"
    assert ours.eos_ids == {2}


def test_named_token_becomes_special(byte_level_directory: Path, tmp_path: Path) -> None:
    copy = copy_directory(byte_level_directory, tmp_path / "copy", pad_token="z", mask_token="?!?")
    ours = from_directory(copy)
    assert b"z" in {ours.token_bytes(i) for i in ours.special_ids}
    assert ours.decode(ours.encode("zoo")) == "oo"
    # A name without a token must not grow the vocabulary past the embedding.
    assert ours.vocab_size == from_directory(byte_level_directory).vocab_size


def test_padding_and_truncation_of_the_file_do_not_apply(
    byte_level_directory: Path, tmp_path: Path
) -> None:
    copy = copy_directory(byte_level_directory, tmp_path / "copy")
    backend = tokenizers.Tokenizer.from_file(str(copy / "tokenizer.json"))
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    backend.save(str(copy / "tokenizer.json"))
    text = SAMPLES[0]
    assert from_directory(copy).encode(text) == from_directory(byte_level_directory).encode(text)


def test_decoder_of_another_kind(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(
        models.WordLevel({"[UNK]": 0, "red": 1, "green": 2}, unk_token="[UNK]")
    )
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.save(str(tmp_path / "tokenizer.json"))
    ours = from_directory(tmp_path)
    assert ours.encode("red green") == [1, 2]
    assert ours.decode([1, 2, 99, -1]) == "red green"
    assert ours.token_bytes(2) == b"green"


def test_vocabulary_files_through_transformers(byte_level_directory: Path, tmp_path: Path) -> None:
    """vocab.json and merges.txt alone, as GPT-2 and Qwen2 were once published."""
    model = json.loads((byte_level_directory / "tokenizer.json").read_text())["model"]
    write_json(tmp_path / "vocab.json", model["vocab"])
    merges = "\n".join(" ".join(merge) for merge in model["merges"])
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + merges + "\n", encoding="utf-8")
    write_json(
        tmp_path / "tokenizer_config.json",
        {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|im_end|>"},
    )
    ours = from_directory(tmp_path)
    text = "The harbour was quiet<|im_end|>"
    assert ours.decode(ours.encode(text), skip_special=False) == text
    assert ours.encode(text)[-1] == 2
    assert ours.eos_ids == {2}


def test_vocabulary_files_without_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"sentencepiece")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UnsupportedFormatError, match="transformers, which is not installed"):
        from_directory(tmp_path)


def test_vocabulary_files_that_transformers_cannot_read(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"not a model")
    with pytest.raises(UnsupportedFormatError) as caught:
        from_directory(tmp_path)
    assert "\n" not in str(caught.value)


class TestAbsent:
    def test_ids_only(self, tmp_path: Path) -> None:
        config = {"vocab_size": 128, "eos_token_id": 5, "bos_token_id": 4}
        ours = from_directory(tmp_path, config=config)
        assert isinstance(ours, AbsentTokenizer)
        assert (ours.vocab_size, ours.bos_id, ours.eos_ids) == (128, 4, {5})
        assert ours.decode([1, 2, 3]) == ""
        assert ours.token_bytes(3) == b""
        with pytest.raises(PromptError, match="token ids"):
            ours.encode("hello")
        with pytest.raises(PromptError, match="no chat template"):
            ours.apply_chat([{"role": "user", "content": "hi"}])


class TestBadFiles:
    @pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b'{"model": 1}'])
    @pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
    def test_unreadable(
        self, byte_level_directory: Path, tmp_path: Path, name: str, content: bytes
    ) -> None:
        copy = copy_directory(byte_level_directory, tmp_path / "copy")
        (copy / name).write_bytes(content)
        if name == "tokenizer_config.json" and content.startswith(b'{"'):
            from_directory(copy)
            return
        with pytest.raises(CorruptFileError, match=name) as caught:
            from_directory(copy)
        assert "\n" not in str(caught.value)

    def test_ids_that_contradict(self, byte_level_directory: Path, tmp_path: Path) -> None:
        listed = {"9000": {"content": "<think>"}}
        copy = copy_directory(byte_level_directory, tmp_path / "copy", added_tokens_decoder=listed)
        with pytest.raises(CorruptFileError, match="has id 9000"):
            from_directory(copy)

    @pytest.mark.parametrize("listed", [{"x": {"content": "a"}}, {"5": {}}, {"5": {"content": 3}}])
    def test_listed_token_malformed(
        self, byte_level_directory: Path, tmp_path: Path, listed: dict[str, object]
    ) -> None:
        copy = copy_directory(byte_level_directory, tmp_path / "copy", added_tokens_decoder=listed)
        with pytest.raises(CorruptFileError, match="added_tokens_decoder"):
            from_directory(copy)

    def test_link_out_of_the_folder(self, byte_level_directory: Path, tmp_path: Path) -> None:
        copy = copy_directory(byte_level_directory, tmp_path / "copy")
        secret = tmp_path / "secret.json"
        secret.write_text("{}")
        (copy / "special_tokens_map.json").symlink_to(secret)
        with pytest.raises(CorruptFileError, match="outside the checkpoint"):
            from_directory(copy)

    def test_links_of_the_hub_cache(self, byte_level_directory: Path, tmp_path: Path) -> None:
        snapshot = tmp_path / "snapshots" / "0123"
        blobs = tmp_path / "blobs"
        snapshot.mkdir(parents=True)
        blobs.mkdir()
        for path in byte_level_directory.iterdir():
            (blobs / path.name).write_bytes(path.read_bytes())
            (snapshot / path.name).symlink_to(blobs / path.name)
        assert from_directory(snapshot).encode("hello")


@pytest.mark.parametrize(("prompt", "words"), [("\ud83d", "surrogate"), (5, "int"), (None, "None")])
def test_prompt_that_is_no_text(
    byte_level_tokenizer: Tokenizer, prompt: object, words: str
) -> None:
    with pytest.raises(PromptError, match=words):
        byte_level_tokenizer.encode(prompt)


class TestTemplatesInTheDirectory:
    def test_named_templates(self, byte_level_directory: Path, tmp_path: Path) -> None:
        copy = copy_directory(
            byte_level_directory,
            tmp_path / "copy",
            chat_template=[
                {"name": "default", "template": "plain"},
                {"name": "tool_use", "template": "tools"},
            ],
        )
        template = from_directory(copy).chat_template
        assert template is not None
        messages = [{"role": "user", "content": "hi"}]
        assert template.render(messages) == "plain"
        assert template.render(messages, tools=[{"type": "function"}]) == "tools"

    def test_files_win(self, byte_level_directory: Path, tmp_path: Path) -> None:
        copy = copy_directory(byte_level_directory, tmp_path / "copy", chat_template="entry")
        (copy / "chat_template.jinja").write_text("file")
        (copy / "additional_chat_templates").mkdir()
        (copy / "additional_chat_templates" / "tool_use.jinja").write_text("tools file")
        template = from_directory(copy).chat_template
        assert template is not None
        assert template.sources == {"default": "file", "tool_use": "tools file"}

    def test_older_json_file(self, byte_level_directory: Path, tmp_path: Path) -> None:
        copy = copy_directory(byte_level_directory, tmp_path / "copy")
        write_json(copy / "chat_template.json", {"chat_template": "older"})
        template = from_directory(copy).chat_template
        assert template is not None
        assert template.sources == {"default": "older"}

    @pytest.mark.parametrize("entries", [[{"name": "x"}], ["text"]])
    def test_malformed(
        self, byte_level_directory: Path, tmp_path: Path, entries: list[object]
    ) -> None:
        copy = copy_directory(byte_level_directory, tmp_path / "copy", chat_template=entries)
        with pytest.raises(CorruptFileError, match="chat_template"):
            from_directory(copy)

    def test_file_too_large(self, byte_level_directory: Path, tmp_path: Path) -> None:
        copy = copy_directory(byte_level_directory, tmp_path / "copy")
        (copy / "chat_template.jinja").write_text("x" * (1 << 20) + "x")
        with pytest.raises(CorruptFileError, match="larger"):
            from_directory(copy)


def test_imports_stay_light() -> None:
    modules = ["tokenizer", "detokenize", "stop", "template", "gguf_vocab", "directory_vocab"]
    imports = "; ".join(f"import layline.text.{name}" for name in modules)
    check = (
        f"{imports}; import sys; print({{'torch', 'transformers', 'jinja2'}} & set(sys.modules))"
    )
    result = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "set()"
