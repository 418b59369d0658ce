"""What a reader of tokenizer files hands to ``Tokenizer``, and the exact bytes of each token."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import tokenizers

SPACE_MARK = "▁"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> dict[str, int]:
    """{character: byte} for the printable characters of a byte-level vocabulary.

    Bytes that print keep their own character; the others are numbered from U+0100 in byte order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + rank): byte for rank, byte in enumerate(hidden)})
    return alphabet


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """How token strings become text: ``scheme`` is "byte-level", "sentencepiece" or "other".

    ``drops_first_space`` is the rule of SentencePiece models: one space at the very start of a
    text was put there by the encoder and is not part of it.
    """

    scheme: str
    drops_first_space: bool = False

    @property
    def exact(self) -> bool:
        """Whether the text is the UTF-8 decoding of the tokens' bytes, one after the other."""
        return self.scheme != "other"


def decoding_of(backend: tokenizers.Tokenizer) -> Decoding:
    """Classify the decoder of ``backend``; anything not known to be bytewise is "other"."""
    if backend.decoder is None:
        return Decoding(scheme="other")
    steps = _flat(json.loads(backend.decoder.__getstate__()))
    kinds = [step["type"] for step in steps]
    if kinds in (["ByteLevel"], ["ByteLevel", "Fuse"]):
        return Decoding(scheme="byte-level")
    marks_to_spaces = {"type": "Replace", "pattern": {"String": SPACE_MARK}, "content": " "}
    one_space = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    if not steps or steps[0] != marks_to_spaces:
        return Decoding(scheme="other")
    if kinds[1:] in (["ByteFallback"], ["ByteFallback", "Fuse"]):
        return Decoding(scheme="sentencepiece")
    if kinds[1:] == ["ByteFallback", "Fuse", "Strip"] and steps[-1] == one_space:
        return Decoding(scheme="sentencepiece", drops_first_space=True)
    return Decoding(scheme="other")


def _flat(step: dict[str, Any]) -> list[dict[str, Any]]:
    if step["type"] != "Sequence":
        return [step]
    return [inner for part in step["decoders"] for inner in _flat(part)]


class TokenBytes(dict[int, bytes]):
    """{token id: its exact bytes}, filled as ids are asked for; b"" for an id that has no token."""

    def __init__(
        self,
        text_of: Callable[[int], str | None],
        decoding: Decoding,
        added: Mapping[int, str],
        decode_other: Callable[[int], str],
    ) -> None:
        super().__init__()
        self._text_of = text_of
        self._decode_other = decode_other
        self._scheme = decoding.scheme
        self._added = added
        self._alphabet = byte_alphabet() if decoding.scheme == "byte-level" else {}

    def __missing__(self, token_id: int) -> bytes:
        text = self._text_of(token_id) if token_id >= 0 else None
        if text is None:
            return b""  # not kept: ids beyond the vocabulary must not fill the table
        piece = self[token_id] = self._bytes(token_id, text)
        return piece

    def _bytes(self, token_id: int, text: str) -> bytes:
        if self._scheme == "byte-level":
            if token_id in self._added:  # an added token is spelled as itself, not in the alphabet
                return text.encode()
            try:
                return bytes([self._alphabet[character] for character in text])
            except KeyError:
                return text.encode()
        if self._scheme == "sentencepiece":
            if match := _BYTE_TOKEN.fullmatch(text):
                return bytes([int(match[1], 16)])
            return text.replace(SPACE_MARK, " ").encode()
        return self._decode_other(token_id).encode()


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """Everything read from a checkpoint about its text, whichever files it came from.

    ``size`` is one more than the largest id that stands for a token. ``names`` maps what templates
    call tokens ("bos_token", "eos_token", ...) to token strings; ``templates`` maps template names
    ("default", "tool_use") to their source.
    """

    backend: tokenizers.Tokenizer
    size: int
    pieces: TokenBytes
    decoding: Decoding
    bos_id: int | None = None
    eos_ids: frozenset[int] = frozenset()
    special_ids: frozenset[int] = frozenset()
    names: Mapping[str, str] = field(default_factory=dict)
    templates: Mapping[str, str] = field(default_factory=dict)


def id_set(value: object) -> frozenset[int]:
    """The token ids in a configuration value that may be missing, one id or a list of ids."""
    values = value if isinstance(value, list | tuple) else [value]
    return frozenset(v for v in values if isinstance(v, int) and not isinstance(v, bool) and v >= 0)
