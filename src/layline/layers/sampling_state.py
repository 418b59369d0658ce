"""What the sampler knows about one request: its parameters, its seed and the ids seen so far.

Everything here is NumPy, kept up to date token by token, so that a step costs time proportional
to the ids that a penalty, a ban or a bias touches, and never to rows times vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from layline.errors import SamplingError
from layline.sampling import SamplingParams, uniform
from layline.text.constraint import GrammarState, PackedIds

IdArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]

_NO_IDS: IdArray = np.empty(0, dtype=np.int64)
_NO_IDS.flags.writeable = False


class SeenIds:
    """The distinct ids of a prompt and output, and how often each one was generated."""

    def __init__(self, prompt_ids: Iterable[int], limit: int) -> None:
        """Start from a prompt; ids outside [0, ``limit``) have no logit and are left out."""
        ids = np.unique(np.fromiter(prompt_ids, dtype=np.int64))
        ids = ids[(ids >= 0) & (ids < limit)]
        self._limit = limit
        self._length = len(ids)
        self._slot = {int(token_id): slot for slot, token_id in enumerate(ids)}
        self._ids: IdArray = np.concatenate([ids, np.zeros(64, dtype=np.int64)])
        self._counts: FloatArray = np.zeros(len(self._ids), dtype=np.float32)

    def add(self, token_id: int) -> None:
        """Count one generated id."""
        if not 0 <= token_id < self._limit:
            return
        slot = self._slot.get(token_id)
        if slot is None:
            slot = self._slot[token_id] = self._length
            if slot == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[slot] = token_id
            self._length += 1
        self._counts[slot] += 1.0

    def copied(self) -> SeenIds:
        """The same ids and counts, to be counted on apart from these."""
        other = copy.copy(self)
        other._slot = dict(self._slot)
        other._ids, other._counts = self._ids.copy(), self._counts.copy()
        return other

    @property
    def ids(self) -> IdArray:
        """The distinct ids, in the order they were first seen (a view)."""
        return self._ids[: self._length]

    @property
    def counts(self) -> FloatArray:
        """How often each of ``ids`` was generated; 0 for ids of the prompt only (a view)."""
        return self._counts[: self._length]


class RowState:
    """One request as the sampler sees it. The engine keeps it for the request's whole life.

    ``valid_vocab`` is the number of ids that the tokenizer knows; the embedding's further rows
    are never sampled. One that is given its former tokens by :meth:`append` draws what it would
    have drawn had it never been interrupted. ``grammar`` is how far its text has come in a grammar.

    Raises:
        SamplingError: the parameters name an id that the vocabulary does not have.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        seed: int,
        valid_vocab: int,
        prompt_ids: Sequence[int] = (),
        eos_ids: Iterable[int] = (),
        banned_ids: Iterable[int] = (),
        grammar: GrammarState | None = None,
    ) -> None:
        self.params = params
        self.seed = seed
        self.valid_vocab = valid_vocab
        self.num_produced = 0
        self._num_observed = 0
        self.grammar = grammar
        ends = frozenset((*eos_ids, *params.stop_token_ids))
        # Where they end the answer whatever else is asked.
        self._ends = frozenset() if grammar is None else ends
        bias = params.logit_bias or {}
        self._check_known("logit_bias token id", bias)
        self._check_known("stop_token_ids", params.stop_token_ids)
        self.bias_ids: IdArray = np.fromiter(bias.keys(), dtype=np.int64)
        self.bias_values: FloatArray = np.fromiter(bias.values(), dtype=np.float32)
        always = tuple(banned_ids)
        self._banned = self._array_of(always)
        self._banned_early = self._array_of((*always, *ends))
        self.seen: SeenIds | None = None
        if params.needs_penalties:
            self.seen = SeenIds(prompt_ids if params.needs_repetition else (), valid_vocab)

    def _check_known(self, name: str, ids: Iterable[int]) -> None:
        for token_id in ids:
            if token_id >= self.valid_vocab:
                raise SamplingError(
                    f"{name} {token_id} is not in the vocabulary; "
                    f"expected 0 to {self.valid_vocab - 1}"
                )

    def _array_of(self, ids: Iterable[int]) -> IdArray:
        # A checkpoint may declare an end-of-sequence id that its vocabulary lacks.
        known = sorted({int(i) for i in ids if 0 <= i < self.valid_vocab})
        return np.array(known, dtype=np.int64) if known else _NO_IDS

    @property
    def needs_history(self) -> bool:
        """Whether a draw depends on the ids of the tokens before it, and not just their number."""
        return self.seen is not None or self.grammar is not None

    def append(self, token_id: int) -> None:
        """Record a generated token: the next draw is for the token after it."""
        self.advance()
        self.observe(token_id)

    def ahead(self, token_ids: Iterable[int]) -> RowState:
        """This request as if it had generated ``token_ids`` as well; this state stays as it is."""
        assert self.grammar is None, "a grammar's state cannot be tried and taken back"
        other = copy.copy(self)
        if self.seen is not None:
            other.seen = self.seen.copied()
        for token_id in token_ids:
            other.append(token_id)
        return other

    def advance(self) -> None:
        """Move to the next token before its predecessor's id has been read back."""
        self.num_produced += 1

    def observe(self, token_id: int) -> None:
        """Hand in the id of a token that ``advance`` went past; penalties need it in order."""
        self._num_observed += 1
        if self.seen is not None:
            self.seen.add(token_id)
        if token_id in self._ends:
            # A step that was launched before this was known may still draw: for nobody.
            self.grammar = None
        elif self.grammar is not None:
            self.grammar.consume(token_id)

    def uniform(self, stream: int = 0) -> float:
        """The random number of the token about to be drawn."""
        return uniform(self.seed, self.num_produced, stream)

    @property
    def banned(self) -> IdArray:
        """Distinct ids that may not be chosen for the token about to be drawn."""
        early = self.num_produced < self.params.min_tokens
        if self.grammar is None:
            return self._banned_early if early else self._banned
        # Where nothing may follow the text, it ends: an end id is all that is left.
        early = (early or self.params.ignore_eos) and self._may_go_on()
        return self._banned_early if early else self._banned

    @property
    def allowed(self) -> PackedIds | None:
        """A bit for each id that the grammar lets the token about to be drawn be; None for all."""
        if self.grammar is None:
            return None
        assert self._num_observed == self.num_produced, "a grammar needs every earlier token's id"
        return self.grammar.allowed()

    def _may_go_on(self) -> bool:
        """Whether the grammar allows more than what ends the text."""
        assert self.allowed is not None
        left = np.unpackbits(self.allowed, bitorder="little")
        left[self._banned_early[self._banned_early < len(left)]] = 0
        return bool(left.any())

    @property
    def edits_logits(self) -> bool:
        """Whether a ban, bias, penalty or grammar changes this row's logits at this token."""
        if self.seen is not None or self.grammar is not None:
            return True
        return len(self.bias_ids) > 0 or len(self.banned) > 0

    def penalties(self) -> tuple[IdArray, FloatArray]:
        """The distinct ids to penalise and what to subtract after the repetition penalty.

        Returns: ids int64 [seen], offsets float32 [seen].
        """
        assert self.seen is not None, "this row has no penalties"
        assert self._num_observed == self.num_produced, "a penalty needs every earlier token's id"
        counts = self.seen.counts
        offsets = counts * np.float32(self.params.frequency_penalty)
        offsets += (counts > 0) * np.float32(self.params.presence_penalty)
        return self.seen.ids, offsets
