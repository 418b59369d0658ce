"""The tokenizer of a checkpoint: text to ids and back, whichever files it was read from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from layline.errors import PromptError
from layline.text.directory_vocab import read_directory
from layline.text.gguf_vocab import read_gguf
from layline.text.template import ChatTemplate
from layline.text.vocabulary import Decoding, TokenBytes, Vocabulary, id_set

_LONG_TEXT = 1 << 13  # characters, some milliseconds


class TextSource(Protocol):
    """Where a vocabulary is: at most one of a directory and the metadata of a GGUF file."""

    @property
    def directory(self) -> Path | None: ...

    @property
    def gguf_metadata(self) -> Mapping[str, Any] | None: ...


class TextCheckpoint(Protocol):
    """The part of a checkpoint that ``load_tokenizer`` reads."""

    @property
    def path(self) -> Path: ...

    @property
    def config(self) -> dict[str, Any]: ...

    @property
    def generation(self) -> dict[str, Any]: ...

    def vocabulary(self) -> TextSource: ...


class Tokenizer:
    """Encodes prompts and decodes completions.

    Attributes:
        vocab_size: one more than the largest token id; a model's embedding may have more rows.
        bos_id: the token that begins a text, or None.
        eos_ids: every token that ends a completion.
        special_ids: tokens that are no text (turn markers, padding), left out by ``decode``.
        chat_template: None when the checkpoint has none.
        unused_ids: ids below ``vocab_size`` that stand for no token.
        decoding, pieces: how tokens become bytes, for ``IncrementalDecoder``.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._backend = vocabulary.backend
        self.unused_ids: frozenset[int] = frozenset()
        if vocabulary.backend.get_vocab_size(with_added_tokens=True) < vocabulary.size:
            used = vocabulary.backend.get_vocab(with_added_tokens=True).values()
            self.unused_ids = frozenset(range(vocabulary.size)).difference(used)
        self.vocab_size = vocabulary.size
        self.bos_id = vocabulary.bos_id
        self.eos_ids = vocabulary.eos_ids
        self.special_ids = vocabulary.special_ids
        self.decoding = vocabulary.decoding
        self.pieces = vocabulary.pieces
        self.chat_template = (
            ChatTemplate(vocabulary.templates, vocabulary.names) if vocabulary.templates else None
        )

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """The token ids of ``text``.

        Special tokens written out in ``text`` ("<|im_end|>") become those tokens, as in the
        Hugging Face tokenizers; text from someone who must not write them has to be checked first.

        Args:
            text: any text without lone surrogates.
            add_special: add what the model expects around a text (usually one BOS before it; never
                a second one when the text already begins with it). False adds nothing.

        Raises:
            PromptError: ``text`` is not a string, or holds half of a surrogate pair.
        """
        try:
            ids = self._encode(text, add_special)
        except TypeError:
            raise PromptError(_not_text(text)) from None
        if add_special:
            while len(ids) > 1 and ids[0] == ids[1] == self.bos_id:
                del ids[0]
        return ids

    def encode_placed(self, text: str) -> tuple[list[int], list[int]]:
        """The token ids of ``text`` as ``encode`` gives them, and where in it each begins.

        A token begins where the one before it ends, what lies between two included; the parts of a
        divided character begin where it does. Raises PromptError as ``encode`` does.
        """
        try:
            (found,) = self._backend.encode_batch([text], add_special_tokens=True)
        except TypeError:
            raise PromptError(_not_text(text)) from None
        ids, places, end = list(found.ids), [], 0
        for start, stop in found.offsets:
            # What stands for no text, as the token that begins it, has an empty range at 0.
            places.append(end if start == stop else min(start, end))
            end = max(end, stop)
        while len(ids) > 1 and ids[0] == ids[1] == self.bos_id:
            del ids[0], places[0]
        return ids, places

    def _encode(self, text: str, add_special: bool) -> list[int]:
        if len(text) < _LONG_TEXT:
            ids: list[int] = self._backend.encode(text, add_special_tokens=add_special).ids
            return ids
        # The library keeps the interpreter to itself while it encodes one text, for seconds where
        # that is long, and gives way to other threads only in a batch.
        (found,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special)
        return list(found.ids)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of ``ids``: their bytes as UTF-8, broken sequences as replacement characters.

        Nothing is tidied (no spaces removed before punctuation); ids without a token give nothing.
        """
        if not self.decoding.exact:
            known = [i for i in ids if 0 <= i < self.vocab_size]
            text: str = self._backend.decode(known, skip_special_tokens=skip_special)
            return text
        skipped = self.special_ids if skip_special else frozenset()
        text = b"".join([self.pieces[i] for i in ids if i not in skipped]).decode(
            "utf-8", "replace"
        )
        return text.removeprefix(" ") if self.decoding.drops_first_space else text

    def apply_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **template_vars: Any,
    ) -> list[int]:
        """The token ids of a conversation, with the template's own BOS and no other.

        Raises:
            PromptError: the checkpoint has no chat template, the messages are malformed, or the
                template refuses them.
        """
        if self.chat_template is None:
            raise PromptError(
                "this checkpoint has no chat template, so chat is not possible; "
                "use generate with a plain prompt"
            )
        text = self.chat_template.render(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, **template_vars
        )
        return self.encode(text, add_special=False)

    def token_ids(self) -> dict[str, int] | None:
        """Every token with its id; None where the tokens are not known."""
        found: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        return found

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of one token, possibly part of a character; b"" for an unknown id.

        A special token gives the bytes of its name, such as b"<|im_end|>".
        """
        return self.pieces[token_id]


class AbsentTokenizer(Tokenizer):
    """Stands in for a checkpoint without tokenizer files: token ids go in and come out, no text."""

    def __init__(
        self, path: Path, config: Mapping[str, Any], generation: Mapping[str, Any]
    ) -> None:
        self._path = path
        self.vocab_size = int(config.get("vocab_size", 0))
        self.bos_id = next(iter(id_set(config.get("bos_token_id"))), None)
        self.eos_ids = _stated_eos(config, generation)
        self.special_ids = frozenset()
        self.unused_ids = frozenset()
        self.decoding = Decoding(scheme="byte-level")
        self.pieces = TokenBytes(lambda _: None, self.decoding, {}, lambda _: "")
        self.chat_template = None

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Always refuses.

        Raises:
            PromptError: there is no tokenizer to encode with.
        """
        raise PromptError(
            f"{self._path} has no tokenizer files, so it takes no text; give token ids in Python, "
            "or measure it with layline bench latency"
        )

    def token_ids(self) -> dict[str, int] | None:
        """None: there is no tokenizer that would know them."""
        return None


def load_tokenizer(checkpoint: TextCheckpoint) -> Tokenizer:
    """The tokenizer in ``checkpoint``, or an ``AbsentTokenizer`` where it has no tokenizer files.

    Raises:
        CorruptFileError: a tokenizer file is unreadable or contradicts itself.
        UnsupportedFormatError: the vocabulary is of a kind that is not read.
    """
    source = checkpoint.vocabulary()
    stated_eos = _stated_eos(checkpoint.config, checkpoint.generation)
    vocabulary: Vocabulary | None = None
    if source.gguf_metadata is not None:
        vocabulary = read_gguf(source.gguf_metadata, checkpoint.path, stated_eos)
    elif source.directory is not None:
        stated_bos = id_set(checkpoint.generation.get("bos_token_id")) or id_set(
            checkpoint.config.get("bos_token_id")
        )
        vocabulary = read_directory(source.directory, next(iter(stated_bos), None), stated_eos)
    if vocabulary is None:
        return AbsentTokenizer(checkpoint.path, checkpoint.config, checkpoint.generation)
    return Tokenizer(vocabulary)


def _stated_eos(config: Mapping[str, Any], generation: Mapping[str, Any]) -> frozenset[int]:
    return id_set(generation.get("eos_token_id")) | id_set(config.get("eos_token_id"))


def _not_text(text: object) -> str:
    if isinstance(text, str):
        return "the prompt holds half of a surrogate pair, which is no Unicode text"
    return f"the prompt is {type(text).__name__}; expected a string"
