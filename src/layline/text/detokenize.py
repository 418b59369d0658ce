"""Token ids to text, one token at a time.

The text of a completion is what its bytes add after the prompt's: with P and C the bytes of prompt
and completion, the pieces given out join to decode(P + C) without its first characters that were
complete in decode(P). Two cases need care:

- P ends inside a character. If C goes on with that character, the whole character belongs to the
  completion. If it does not, the broken bytes were the prompt's, and nothing is given out for them.
- A SentencePiece model's first space is dropped only where the whole text starts, so a completion
  after a prompt keeps its leading space.

For byte-level and SentencePiece vocabularies this works on bytes, at constant cost for a token.
Other decoders are run on a short window of tokens.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from itertools import islice

from layline.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_LONGEST_CHARACTER = 4  # bytes in UTF-8
_WINDOW = 8  # tokens of context that a decoder of unknown kind is given


class IncrementalDecoder:
    """Decodes one completion; holds back bytes that do not yet form a character.

    Args:
        tokenizer: whose ids these are.
        prompt_ids: the ids before the completion; their text is never given out.
        skip_special: leave out special tokens (end of text, turn markers), as ``decode`` does.
        shown_ids: special tokens that are not left out.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        *,
        skip_special: bool = True,
        shown_ids: frozenset[int] = frozenset(),
    ) -> None:
        skipped = tokenizer.special_ids - shown_ids if skip_special else frozenset()
        stream: _Bytes | _Window
        if tokenizer.decoding.exact:
            stream = _Bytes(tokenizer, prompt_ids, skipped)
        else:
            stream = _Window(tokenizer, prompt_ids, skip_special and not shown_ids)
        self._skipped = skipped
        self._stream = stream

    def add(self, token_id: int) -> str:
        """The text that this token made certain; often "", never a part of a character."""
        if token_id in self._skipped:
            return ""
        return self._stream.add(token_id)

    def finish(self) -> str:
        """What was still held: at most one replacement character for bytes that never completed."""
        return self._stream.finish()


class _Bytes:
    """Joins token bytes through an incremental UTF-8 decoder."""

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skipped: frozenset[int]
    ) -> None:
        self._pieces = tokenizer.pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        shown = (self._pieces[i] for i in prompt_ids if i not in skipped)
        at_start = not any(shown)
        self._drops_space = at_start and tokenizer.decoding.drops_first_space
        self._open = b"" if at_start else self._open_character(prompt_ids, skipped)

    def _open_character(self, prompt_ids: Sequence[int], skipped: frozenset[int]) -> bytes:
        """The bytes at the prompt's end that start a character and do not complete it."""
        tail = b""
        for token_id in reversed(prompt_ids):
            if token_id not in skipped:
                tail = self._pieces[token_id] + tail
            if len(tail) >= _LONGEST_CHARACTER:
                break
        return _incomplete_suffix(tail[-_LONGEST_CHARACTER:])

    def add(self, token_id: int) -> str:
        piece = self._pieces[token_id]
        if self._open:
            return self._after_open_character(piece)
        text = self._decoder.decode(piece)
        if self._drops_space and piece:
            self._drops_space = False
            return text.removeprefix(" ")
        return text

    def _after_open_character(self, piece: bytes) -> str:
        if not piece:
            return ""
        opened, self._open = self._open, b""
        return self._decoder.decode(opened + piece if _goes_on(opened + piece[:1]) else piece)

    def finish(self) -> str:
        text = self._decoder.decode(b"", True)
        self._decoder.reset()
        return text


def _goes_on(data: bytes) -> bool:
    """Whether ``data``, an open character and one byte more, is a character or still begins one."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data"
    return True


def _incomplete_suffix(data: bytes) -> bytes:
    """The last bytes of ``data`` when they begin a UTF-8 character that they do not complete."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data)
    pending: bytes = decoder.getstate()[0]
    return pending


class _Window:
    """Runs the tokenizer's own decoder on a few tokens and gives out what a new token appended."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._ids = list(islice(_shown_from_end(tokenizer, prompt_ids, skip_special), _WINDOW))[
            ::-1
        ]
        self._known = len(self._ids)
        # A broken character at the prompt's end is given out whole once it is completed.
        self._before = self._decode(self._ids).rstrip(_REPLACEMENT)

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special=self._skip_special)

    def add(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._decode(self._ids)
        if text.endswith(_REPLACEMENT) or len(text) <= len(self._before):
            return ""
        new = text[len(self._before) :]
        self._ids = self._ids[self._known :]
        self._known = len(self._ids)
        self._before = self._decode(self._ids)
        return new

    def finish(self) -> str:
        text = self._decode(self._ids)[len(self._before) :]
        self._before += text
        return text


def _shown_from_end(tokenizer: Tokenizer, ids: Sequence[int], skip_special: bool) -> Iterable[int]:
    return (i for i in reversed(ids) if not (skip_special and i in tokenizer.special_ids))
