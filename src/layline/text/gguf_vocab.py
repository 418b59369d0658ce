"""The vocabulary inside a GGUF file.

Two kinds are read. "gpt2" is byte-level BPE: tokens in the byte alphabet, ranked merges, and the
name of the rules that cut a text into words before merging (``tokenizer.ggml.pre``). "llama" is
SentencePiece BPE: tokens with scores, where the two neighbours that make the token with the highest
score merge first, and characters without a token fall back to byte tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, processors

from layline.errors import CorruptFileError, UnsupportedFormatError, nearest
from layline.text.pretokenize import RULES, pre_tokenizer
from layline.text.vocabulary import SPACE_MARK, Decoding, TokenBytes, Vocabulary

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_MODELS = ("gpt2", "llama")
_NAMED_IDS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",  # spelled like this in the format
    "pad_token": "padding_token_id",
    "mask_token": "mask_token_id",
}
_ENDING_IDS = ("eos_token_id", "eot_token_id", "eom_token_id")
# Files often name one end token and leave the others to be known by their text.
_ENDING_TEXTS = frozenset(
    (
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<end_of_turn>",
    )
)


def read_gguf(
    metadata: Mapping[str, Any], path: Path, stated_eos: frozenset[int] = frozenset()
) -> Vocabulary:
    """Build the vocabulary described by the ``tokenizer.*`` keys of a GGUF file.

    Args:
        metadata: the file's keys and values; arrays of strings as sequences of str.
        path: the file, for messages.
        stated_eos: EOS ids known from elsewhere.

    Raises:
        CorruptFileError: a key is missing, or ids, scores, types or merges contradict the tokens.
        UnsupportedFormatError: the model or pre-tokenizer is not one that is read.
    """
    return _Reader(metadata, path).read(stated_eos)


class _Reader:
    def __init__(self, metadata: Mapping[str, Any], path: Path) -> None:
        self.metadata = metadata
        self.path = path
        model = self.get("model")
        if model not in _MODELS:
            raise UnsupportedFormatError(
                f"{path}: tokenizer.ggml.model {model!r} is not one of {', '.join(_MODELS)}"
                f"{nearest(str(model), _MODELS)}"
            )
        self.model: str = model
        self.tokens: Sequence[str] = self.required("tokens")
        self.types = self._types()

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(f"tokenizer.ggml.{key}", default)

    def required(self, key: str) -> Any:
        value = self.get(key)
        if value is None or not len(value):
            raise CorruptFileError(f"{self.path}: tokenizer.ggml.{key} is missing or empty")
        return value

    def _types(self) -> list[int]:
        types = self.get("token_type")
        if types is None:
            return [_NORMAL] * len(self.tokens)
        if len(types) != len(self.tokens):
            raise CorruptFileError(
                f"{self.path}: tokenizer.ggml.token_type has {len(types)} entries for "
                f"{len(self.tokens)} tokens"
            )
        return types.tolist() if hasattr(types, "tolist") else list(types)

    def token_id(self, key: str) -> int | None:
        """A token id among the metadata; None when absent."""
        value = self.get(key)
        if value is None:
            return None
        if not 0 <= int(value) < len(self.tokens):
            raise CorruptFileError(
                f"{self.path}: tokenizer.ggml.{key} is {value}; expected an id below "
                f"{len(self.tokens)}"
            )
        return int(value)

    def of_type(self, *types: int) -> list[int]:
        return list(compress(range(len(self.tokens)), map(types.__contains__, self.types)))

    def read(self, stated_eos: frozenset[int]) -> Vocabulary:
        if self.model == "gpt2":
            backend, decoding, adds_bos = self._byte_level()
        else:
            backend, decoding, adds_bos = self._sentencepiece()
        special = self.of_type(_UNKNOWN, _CONTROL)
        user_defined = self.of_type(_USER_DEFINED)
        self._add_tokens(backend, special, special=True)
        self._add_tokens(backend, user_defined, special=False)
        named = {name: self.token_id(key) for name, key in _NAMED_IDS.items()}
        names = {
            name: self.tokens[token_id] for name, token_id in named.items() if token_id is not None
        }
        self._surround(backend, named, adds_bos)
        return Vocabulary(
            backend=backend,
            size=self._size(),
            pieces=TokenBytes(
                _text_of(self.tokens, frozenset(self.of_type(_UNUSED))),
                decoding,
                {i: self.tokens[i] for i in [*special, *user_defined]},
                str,
            ),
            decoding=decoding,
            bos_id=named["bos_token"],
            eos_ids=stated_eos | self._ending_ids(special),
            special_ids=frozenset(special),
            names=names,
            templates=self._templates(),
        )

    def _size(self) -> int:
        """Unused entries at the end are padding of the embedding, not tokens."""
        size = len(self.tokens)
        while size and self.types[size - 1] == _UNUSED:
            size -= 1
        return size

    def _ids_by_text(self) -> dict[str, int]:
        ids = dict(zip(self.tokens, range(len(self.tokens)), strict=True))
        if len(ids) != len(self.tokens):
            raise CorruptFileError(
                f"{self.path}: tokenizer.ggml.tokens has {len(self.tokens)} entries of which only "
                f"{len(ids)} differ"
            )
        return ids

    def _byte_level(self) -> tuple[tokenizers.Tokenizer, Decoding, bool]:
        name = self.get("pre")
        if name not in RULES:
            raise UnsupportedFormatError(
                f"{self.path}: tokenizer.ggml.pre {name!r} is not one of "
                f"{', '.join(sorted(RULES))}{nearest(str(name), RULES)}"
            )
        rules = RULES[name]
        merges = [tuple(merge.split(" ", 1)) for merge in self.get("merges", ())]
        backend = tokenizers.Tokenizer(
            self._bpe(merges, ignore_merges=rules.whole_words_first, byte_fallback=False)
        )
        if rules.composes:
            backend.normalizer = normalizers.NFC()
        backend.pre_tokenizer = pre_tokenizer(rules)
        backend.decoder = decoders.ByteLevel()
        return backend, Decoding(scheme="byte-level"), rules.adds_bos

    def _sentencepiece(self) -> tuple[tokenizers.Tokenizer, Decoding, bool]:
        unknown = self.token_id("unknown_token_id")
        backend = tokenizers.Tokenizer(
            self._bpe(
                self._merges_by_score(),
                byte_fallback=True,
                fuse_unk=True,
                unk_token=None if unknown is None else self.tokens[unknown],
            )
        )
        prefixed = bool(self.get("add_space_prefix", True))
        marks = normalizers.Replace(" ", SPACE_MARK)
        spaces = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
        if prefixed:
            backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE_MARK), marks])
            spaces.append(decoders.Strip(" ", 1, 0))
        else:
            backend.normalizer = marks
        backend.decoder = decoders.Sequence(spaces)
        return backend, Decoding(scheme="sentencepiece", drops_first_space=prefixed), True

    def _bpe(self, merges: list[Any], **options: Any) -> models.BPE:
        ids = self._ids_by_text()
        try:
            return models.BPE(vocab=ids, merges=merges, **options)
        except Exception as error:  # the library raises plain Exception for a merge of no token
            raise CorruptFileError(
                f"{self.path}: tokenizer.ggml.merges do not fit the tokens: {error}"
            ) from None

    def _merges_by_score(self) -> list[tuple[str, str]]:
        """Every way to make a token from two tokens, the tokens with the highest scores first."""
        scores = self.required("scores")
        if len(scores) != len(self.tokens):
            raise CorruptFileError(
                f"{self.path}: tokenizer.ggml.scores has {len(scores)} entries for "
                f"{len(self.tokens)} tokens"
            )
        ids = {self.tokens[i]: i for i in self.of_type(_NORMAL)}
        ranked = sorted(ids.items(), key=lambda item: -scores[item[1]])
        merges: list[tuple[str, str]] = []
        for text, _ in ranked:
            pairs = [
                (text[:cut], text[cut:])
                for cut in range(1, len(text))
                if text[:cut] in ids and text[cut:] in ids
            ]
            if len(pairs) > 1:
                pairs.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
            merges += pairs
        return merges

    def _add_tokens(
        self, backend: tokenizers.Tokenizer, ids: Sequence[int], *, special: bool
    ) -> None:
        """Have these tokens matched in the text before anything else is done to it."""
        backend.add_tokens(
            [AddedToken(self.tokens[i], normalized=False, special=special) for i in ids]
        )

    def _surround(
        self, backend: tokenizers.Tokenizer, named: Mapping[str, int | None], adds_bos: bool
    ) -> None:
        wanted = {
            "bos_token": self.get("add_bos_token", adds_bos),
            "eos_token": self.get("add_eos_token", False),
        }
        backend.post_processor = _around_text(
            {
                name: (self.tokens[token_id], token_id)
                for name, adds in wanted.items()
                if adds and (token_id := named[name]) is not None
            }
        )

    def _ending_ids(self, special: Sequence[int]) -> frozenset[int]:
        stated = (self.token_id(key) for key in _ENDING_IDS)
        known = (i for i in special if self.tokens[i] in _ENDING_TEXTS)
        return frozenset(i for i in (*stated, *known) if i is not None)

    def _templates(self) -> dict[str, str]:
        templates = {}
        if isinstance(default := self.metadata.get("tokenizer.chat_template"), str):
            templates["default"] = default
        prefix = "tokenizer.chat_template."
        for key in self.metadata:
            if key.startswith(prefix) and isinstance(source := self.metadata[key], str):
                templates[key.removeprefix(prefix)] = source
        return templates


def _text_of(tokens: Sequence[str], unused: frozenset[int]) -> Callable[[int], str | None]:
    """A look-up that keeps the tokens alive and nothing else of the file."""

    def text_of(token_id: int) -> str | None:
        if token_id >= len(tokens) or token_id in unused:
            return None
        return tokens[token_id]

    return text_of


def _around_text(tokens: Mapping[str, tuple[str, int]]) -> processors.TemplateProcessing:
    """A post-processor that puts ``tokens["bos_token"]`` before and "eos_token" after a text."""
    before = ["bos_token"] if "bos_token" in tokens else []
    after = ["eos_token"] if "eos_token" in tokens else []
    return processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, *before, "$B", *after],
        special_tokens=[
            {"id": name, "ids": [token_id], "tokens": [text]}
            for name, (text, token_id) in tokens.items()
        ],
    )
