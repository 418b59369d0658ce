"""What a gate replays: steps of fixed tokens, in the calls of the loop under test. No torch here.

Every scenario starts with an empty cache and has its sequences' blocks to itself. Its tokens are
random, the same for the same seed: what a step computes never depends on what another arm drew.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from layline.engine.scheduler import BLOCK_SIZE
from layline.engine.step import MeshStep, RankStep, ordinary_step
from layline.layers.spans import SequenceSpan

LOOPS = ("eager", "batch", "verify", "graph", "prime")
PROMPT, STEPS = 16, 32
"""Tokens of the eager scenario: of the prompt, and decoded after it."""
ROUNDS = 8
CHUNKS = 8


@dataclass(frozen=True)
class Call:
    """One call of a loop.

    ``window`` is how many steps may be in flight before the first is read, of ``deferred`` alone;
    ``num_prompts`` how many share the chunks of ``prime``. With ``whole`` the hidden states of all
    rows are compared too.
    """

    loop: str
    steps: tuple[MeshStep, ...]
    window: int = 1
    num_prompts: int = 1
    whole: bool = False


@dataclass(frozen=True)
class Expected:
    """What an arm's counters must do: ``moving`` ones move, ``still`` ones stay.

    Those of ``overlaps`` move too where streams run freely.
    """

    moving: tuple[str, ...] = ()
    overlaps: tuple[str, ...] = ()
    still: tuple[str, ...] = ()


@dataclass(frozen=True)
class Way:
    """An arm over the stages: the doors that it changes, and what its counters must do."""

    name: str
    doors: Mapping[str, bool]
    expected: Expected


@dataclass(frozen=True)
class Scenario:
    """A replay of one loop, once for each of ``ways``; ``num_blocks`` of the cache are used."""

    name: str
    loop: str
    calls: tuple[Call, ...]
    num_blocks: int
    ways: tuple[Way, ...]

    @property
    def steps(self) -> Iterator[tuple[Call, MeshStep]]:
        """Every step with its call, in order."""
        for call in self.calls:
            for step in call.steps:
                yield call, step


class Tape:
    """One sequence: its blocks, and how many of its tokens were fed."""

    def __init__(self, draw: random.Random, vocab: int, blocks: Iterator[int], most: int) -> None:
        self.blocks = [next(blocks) for _ in range(-(-most // BLOCK_SIZE))]
        self.length = 0
        self._draw = draw
        self._vocab = vocab

    def rows(self, count: int) -> tuple[SequenceSpan, list[int]]:
        """The next ``count`` tokens as rows of one span."""
        span = SequenceSpan(self.length, count, self.blocks, self.length + count)
        self.length += count
        return span, [self._draw.randrange(self._vocab) for _ in range(count)]


class ScenarioMaker:
    """Makes the scenarios of one model over ``num_stages``."""

    def __init__(self, vocab: int, num_stages: int, chunk: int, seed: int = 0) -> None:
        """``chunk`` is the tokens of a prefill chunk."""
        self._vocab = vocab
        self._num_stages = num_stages
        self._chunk = chunk
        self._seed = seed

    def of(self, loop: str) -> list[Scenario]:
        """The scenarios of a loop, or of ``all``."""
        made: dict[str, Callable[[], list[Scenario]]] = {
            "eager": lambda: [self.eager(), *[self.deferred(n) for n in (1, 2, 3, 4)]],
            "batch": lambda: [self.batch(n) for n in (1, 4, 8)],
            "verify": lambda: [self.verify(n) for n in (2, 5, 9)],
            "graph": lambda: [self.graph(), self.graph(window=3)],
            "prime": lambda: [self.prime(), self.prime_together()],
        }
        names = LOOPS if loop == "all" else (loop,)
        return [scenario for name in names for scenario in made[name]()]

    def eager(self, steps: int = STEPS) -> Scenario:
        """A prompt, and ``steps`` tokens decoded one at a time."""
        tape, (one,) = self._tapes([PROMPT + steps])
        calls = [_call("eager", prefill([(one, PROMPT)]))]
        calls += [_call("eager", decode([one])) for _ in range(steps)]
        one_stream = Way("one stream", {"streams": False}, Expected(still=("eager_splits",)))
        return tape.scenario("eager", "eager", calls, _split("eager_splits"), one_stream)

    def deferred(self, window: int, steps: int = 8) -> Scenario:
        """Decode with up to ``window`` steps that were not read."""
        tape, (one,) = self._tapes([PROMPT + steps])
        first = _call("eager", prefill([(one, PROMPT)]))
        replayed = tuple(decode([one]) for _ in range(steps))
        call = Call("deferred", replayed, window)
        moving = ("deferred_splits",) if window == 1 else ("deferred_splits", "slot_switches")
        overlaps = ("step_overlaps",) if window > 1 else ()
        way = _split(*moving, overlaps=overlaps)
        return tape.scenario(f"deferred, window {window}", "eager", [first, call], way)

    def batch(self, size: int, rounds: int = ROUNDS) -> Scenario:
        """``size`` requests of uneven lengths in as many microbatches as there are stages."""
        lengths = [5 + 3 * number for number in range(size)]
        tape, tapes = self._tapes([length + rounds for length in lengths])
        pairs = list(zip(tapes, lengths, strict=True))
        groups = [pairs[first :: self._num_stages] for first in range(self._num_stages)]
        groups = [group for group in groups if group]
        calls = [_call("eager", prefill(group)) for group in groups]
        calls += [
            _call("batch", *[decode([each for each, _ in group]) for group in groups])
            for _ in range(rounds)
        ]
        if len(groups) > 1:
            way = _split("batch_splits", "slot_switches", overlaps=("step_overlaps",))
        else:
            way = _split("batch_splits")
        return tape.scenario(f"batch of {size}", "batch", calls, way)

    def verify(self, drafts: int, rounds: int = 4) -> Scenario:
        """Steps of several rows for one request, of which the next one keeps some."""
        prompt = 7
        tape, (one,) = self._tapes([prompt + rounds * drafts + drafts])
        calls = [_call("eager", prefill([(one, prompt)]))]
        for number in range(rounds):
            calls.append(_call("verify", decode([one] * drafts)))
            # What was not accepted is overwritten.
            one.length -= number % drafts
        way = _split("verify_splits")
        return tape.scenario(f"verify {drafts} rows", "verify", calls, way)

    def graph(self, steps: int = 8, window: int = 1) -> Scenario:
        """Decode captured once and replayed, with up to ``window`` steps that were not read."""
        tape, tapes = self._tapes([PROMPT + steps] * 3)
        first = _call("eager", prefill([(each, PROMPT - 3) for each in tapes]))
        call = Call("graph", tuple(decode(tapes) for _ in range(steps)), window)
        way = _split("graph_captures", "graph_splits")
        name = f"captured, window {window}"
        return tape.scenario(name, "graph", [first, call], way)

    def prime(self, chunks: int = CHUNKS, after: int = 8, last: int | None = None) -> Scenario:
        """A prompt in chunks, the last of which is shorter, and tokens decoded after it."""
        sizes = [self._chunk] * (chunks - 1) + [last or max(1, self._chunk // 3)]
        tape, (one,) = self._tapes([sum(sizes) + after])
        pieces = tuple(prefill([(one, size)]) for size in sizes)
        calls = [Call("prime", pieces, whole=True)]
        calls += [_call("eager", decode([one])) for _ in range(after)]
        name = f"prime of {chunks} chunks"
        return tape.scenario(name, "prime", calls, *_prime_ways("prime_split_chunks"))

    def growing(self, chunks: int = 4) -> Scenario:
        """A prompt whose every chunk is longer than the one before."""
        sizes = [self._chunk * number for number in range(1, chunks + 1)]
        tape, (one,) = self._tapes([sum(sizes)])
        pieces = tuple(prefill([(one, size)]) for size in sizes)
        ways = _prime_ways("prime_split_chunks")[:1]
        return tape.scenario("growing chunks", "prime", [Call("prime", pieces)], *ways)

    def prime_together(self, chunks: int = 4, after: int = 4) -> Scenario:
        """Two prompts of other lengths in the same chunks."""
        size = max(2, self._chunk // 2)
        tape, (one, other) = self._tapes([chunks * size + after, chunks * (size - 1) + after])
        pieces = tuple(prefill([(one, size), (other, size - 1)]) for _ in range(chunks))
        calls = [Call("prime", pieces, num_prompts=2, whole=True)]
        calls += [_call("eager", decode([one, other])) for _ in range(after)]
        counters = ("prime_split_chunks", "prime_batches", "prime_batch_splits")
        return tape.scenario("prime of 2 prompts", "prime", calls, *_prime_ways(*counters))

    def _tapes(self, lengths: Sequence[int]) -> tuple[_Made, list[Tape]]:
        draw, blocks = random.Random(self._seed), itertools.count(1)
        made = _Made(blocks)
        return made, [Tape(draw, self._vocab, blocks, length) for length in lengths]


@dataclass(frozen=True)
class _Made:
    """Gives scenarios as many blocks as their sequences took, and the null block."""

    blocks: Iterator[int]

    def scenario(self, name: str, loop: str, calls: Sequence[Call], *ways: Way) -> Scenario:
        return Scenario(name, loop, tuple(calls), next(self.blocks), ways)


def _split(*moving: str, overlaps: tuple[str, ...] = ()) -> Way:
    """The arm that a gate is about."""
    return Way("split", {}, Expected(moving, overlaps, ("remote_reads", "late_growths")))


def _prime_ways(*counters: str) -> tuple[Way, ...]:
    """Chunks that overlap, chunks one at a time, and no split at all."""
    pipe = "prime_pipe_overlaps"
    serial = Expected(counters, still=("remote_reads", pipe))
    unsplit = Expected(still=("prime_split_chunks", pipe))
    return (
        _split(*counters, overlaps=(pipe,)),
        Way("serial", {"prime_pipe": False}, serial),
        Way("unsplit", {"prime": False, "prime_pipe": False}, unsplit),
    )


def decode(tapes: Sequence[Tape]) -> MeshStep:
    """A step of one row for each, all sampled; one that comes again has its next token."""
    rows = [tape.rows(1) for tape in tapes]
    return _step(len(rows), rows)


def prefill(pieces: Sequence[tuple[Tape, int]]) -> MeshStep:
    """A step with so many tokens of each prompt, whose last rows are sampled."""
    return _step(0, [tape.rows(count) for tape, count in pieces])


def _step(num_decode: int, rows: Sequence[tuple[SequenceSpan, list[int]]]) -> MeshStep:
    spans = tuple(span for span, _ in rows)
    ids = tuple(itertools.chain.from_iterable(each for _, each in rows))
    return ordinary_step([RankStep(num_decode, spans, ids, (True,) * len(spans))], 1)


def _call(loop: str, *steps: MeshStep) -> Call:
    return Call(loop, steps)
