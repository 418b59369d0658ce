"""Following a grammar token by token, with llguidance. No torch here.

A constraint is compiled once for a request, in any thread; each of its answers follows a copy. The
automaton that copies share grows with what they meet, so constraints are not kept for later
requests: one that met too much would end theirs.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from layline.errors import SamplingError, UsageError
from layline.grammar import JSON_OBJECT, JSON_SCHEMA, REGEX, Grammar
from layline.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import llguidance

PackedIds = npt.NDArray[np.uint8]
"""A bit for each id, the lowest first."""

WHITESPACE = r"[ \n\r\t]{1,32}"
"""Between the tokens of JSON: room for indentation, and an end to it."""

# Below llguidance's own bounds: a step of an engine waits for the mask of each row.
_LIMITS = {
    "max_items_in_row": 2_000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 20_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}
_SHOWN = 240


class ConstraintCompiler:
    """Compiles grammars for one vocabulary, which is read when the first one comes.

    Any thread may use it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._vocabulary: llguidance.LLTokenizer | None = None

    def compile(self, grammar: Grammar) -> Constraint:
        """The grammar, ready to be followed.

        Raises:
            SamplingError: it cannot be read, is too complex, allows no text, or the model has no
                vocabulary or end-of-sequence id.
            UsageError: llguidance is not installed.
        """
        library = load_library()
        vocabulary = self._read_vocabulary(library)
        limits = library.LLParserLimits(**_LIMITS)
        try:
            source = source_of(grammar)
            matcher = library.LLMatcher(vocabulary, source, log_level=0, limits=limits)
        except ValueError as error:
            raise SamplingError(f"grammar cannot be compiled: {_line(str(error))}") from None
        # What stops at its first token is refused now instead of in the middle of a step.
        mask = b"" if matcher.is_error() else matcher.compute_bitmask()
        if matcher.is_error():
            raise SamplingError(_refusal(matcher))
        if not any(mask):
            raise SamplingError("grammar allows no text that this model's vocabulary can write")
        return Constraint(matcher, vocabulary)

    def _read_vocabulary(self, library: Any) -> llguidance.LLTokenizer:
        with self._lock:
            if self._vocabulary is None:
                words = _Words(self._tokenizer)
                self._vocabulary = library.LLTokenizer(words, eos_token=words.end_ids)
            return self._vocabulary


class Constraint:
    """A compiled grammar at its beginning."""

    def __init__(self, matcher: llguidance.LLMatcher, vocabulary: llguidance.LLTokenizer) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary

    def follow(self, stop_ids: Iterable[int] = ()) -> GrammarState:
        """A new answer. Of ``stop_ids`` those that are no text end it as end ids do."""
        known = [i for i in stop_ids if i < self._vocabulary.vocab_size]
        ends = [i for i in known if self._vocabulary.is_special_token(i)]
        return GrammarState(self._matcher.deep_copy(), ends)


class GrammarState:
    """How far one answer has come in its grammar."""

    def __init__(self, matcher: llguidance.LLMatcher, end_ids: Sequence[int] = ()) -> None:
        self._matcher = matcher
        self._end_ids = np.array(end_ids, dtype=np.int64)
        self._allowed: PackedIds | None = None

    def allowed(self) -> PackedIds:
        """Which ids may come next, packed; end ids where the text is complete.

        No bit is set when the grammar has become too complex to be followed.
        """
        if self._allowed is None:
            self._allowed = self._compute()
        return self._allowed

    def consume(self, token_id: int) -> None:
        """Go past a token that was allowed."""
        self._allowed = None
        if not self._matcher.is_error():
            self._matcher.consume_token(token_id)

    def _compute(self) -> PackedIds:
        bits = bytearray() if self._matcher.is_error() else self._matcher.compute_bitmask()
        if self._matcher.is_error():
            # The library would allow end ids now, as if the text were complete.
            return np.zeros(1, dtype=np.uint8)
        allowed = np.frombuffer(bits, dtype=np.uint8).copy()
        if len(self._end_ids) and self._matcher.is_accepting():
            np.bitwise_or.at(allowed, self._end_ids >> 3, (1 << (self._end_ids & 7)).astype("u1"))
        return allowed


class _Words:
    """A vocabulary as llguidance reads it: the bytes of every id, and which ids are no text."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer) -> None:
        if not tokenizer.decoding.exact:
            raise SamplingError(
                "grammar needs a vocabulary whose text is the bytes of its tokens, byte-level or "
                "SentencePiece; this model's is of another kind"
            )
        self.tokens = [tokenizer.pieces[i] for i in range(tokenizer.vocab_size)]
        if not any(self.tokens):
            raise SamplingError(
                "grammar needs the model's vocabulary, and this checkpoint has no tokenizer files"
            )
        self.end_ids = sorted(i for i in tokenizer.eos_ids if i < len(self.tokens))
        if not self.end_ids:
            raise SamplingError(
                "grammar cannot be followed to its end: this model has no end-of-sequence id"
            )
        self.eos_token_id = self.end_ids[0]
        self.bos_token_id = tokenizer.bos_id
        self.special_token_ids = sorted(tokenizer.special_ids | set(self.end_ids))
        self._tokenizer = tokenizer
        self._special = frozenset(self.special_token_ids)
        self._by_bytes: dict[bytes, int] = {}
        for token_id, piece in enumerate(self.tokens):
            if piece and token_id not in self._special:
                self._by_bytes.setdefault(piece, token_id)
        self._longest = max(map(len, self._by_bytes), default=0)

    def __call__(self, text: str | bytes) -> list[int]:
        """Ids of a text that the grammar leaves no choice about, those that the model expects."""
        data = text.encode() if isinstance(text, str) else text
        # A line break before it takes what a vocabulary puts in front of a text.
        for before in ("", "\n"):
            written = before + data.decode("utf-8", "replace")
            ids = self._tail(self._tokenizer.encode(written, add_special=False), data)
            if ids is not None:
                return ids
        return self._greedy(data)

    def _tail(self, ids: list[int], data: bytes) -> list[int] | None:
        """The last of ``ids`` that are exactly ``data``, as text."""
        left = len(data)
        for place in range(len(ids) - 1, -1, -1):
            piece = self.tokens[ids[place]]
            if not piece or ids[place] in self._special or not data[:left].endswith(piece):
                break
            left -= len(piece)
            if left == 0:
                return ids[place:]
        return [] if not data else None

    def _greedy(self, data: bytes) -> list[int]:
        """The longest token at each place, as far as there are any."""
        ids, place = [], 0
        while place < len(data):
            for length in range(min(self._longest, len(data) - place), 0, -1):
                token_id = self._by_bytes.get(data[place : place + length])
                if token_id is not None:
                    ids.append(token_id)
                    place += length
                    break
            else:
                break
        return ids


def check_readable(grammar: Grammar) -> None:
    """Raise SamplingError for a grammar that no vocabulary could follow; needs no model."""
    library = load_library()
    limits = library.LLParserLimits(**_LIMITS)
    try:
        told = library.LLMatcher.validate_grammar(source_of(grammar), limits=limits)
    except ValueError as error:
        told = str(error)
    if told and not told.startswith("WARNING"):
        raise SamplingError(f"grammar cannot be compiled: {_line(told)}")


def load_library() -> Any:
    """llguidance. Raises UsageError where it is not installed."""
    try:
        import llguidance
    except ImportError:
        raise UsageError(
            "grammar needs the package llguidance, which is not installed; "
            "expected: pip install 'layline[structured]'"
        ) from None
    return llguidance


def source_of(grammar: Grammar) -> str:
    """The grammar in llguidance's own form. Raises ValueError."""
    library = load_library()
    if grammar.kind in (JSON_OBJECT, JSON_SCHEMA):
        schema = '{"type": "object"}' if grammar.kind == JSON_OBJECT else grammar.text
        if schema.strip() in ("true", "false"):
            schema = "{}" if schema.strip() == "true" else '{"enum": []}'
        options = schema_options(lenient=grammar.lenient)
        source: str = library.LLMatcher.grammar_from_json_schema(schema, overrides=options)
        return source
    text = grammar.text
    if grammar.kind == REGEX:
        # As elsewhere a digit is 0 to 9 and not one of any script.
        text = f"start: /{library.regex_to_lark(text, use_ascii='d')}/"
    # In an envelope, so that a text that looks like one is not taken for it.
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def schema_options(*, lenient: bool) -> dict[str, Any]:
    """How JSON is written, and what becomes of keywords that cannot be enforced."""
    return {"whitespace_pattern": WHITESPACE, "lenient": lenient, "coerce_one_of": lenient}


def _refusal(matcher: llguidance.LLMatcher) -> str:
    told = _line(matcher.get_error())
    if told.startswith("NoExtension"):
        return "grammar allows no text that this model's vocabulary can write"
    return f"grammar cannot be compiled: {told}"


def _line(message: str) -> str:
    lines = [line.strip() for line in message.splitlines()]
    kept = [line for line in lines if line and line != "<non-verbose/>"] or ["unknown error"]
    return kept[0] if len(kept[0]) <= _SHOWN else f"{kept[0][:_SHOWN]}..."
