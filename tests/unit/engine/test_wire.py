"""Control messages: they arrive as they were sent, in pieces of any size, and nothing else does."""

from __future__ import annotations

import contextlib
import math
import struct
from itertools import pairwise
from types import UnionType
from typing import Any, get_args, get_origin

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layline.boundary.layout import BatchVariant
from layline.boundary.rows import DpPadding, StepRows
from layline.engine import wire
from layline.engine.balance import SampleRow
from layline.engine.outcome import FailedRow
from layline.engine.rank_codec import packed_tokens, spec_of
from layline.engine.reading import RowRead
from layline.engine.remote import params_fields, readings_of, tokens_of
from layline.engine.step import IDLE, MeshStep, RankStep, ordinary_step
from layline.engine.step_codec import KEPT_STEPS, StepDecoder, StepEncoder
from layline.engine.wire import FrameReader, WireError, frame, from_rank_reader, to_rank_reader
from layline.layers.spans import SequenceSpan
from layline.sampling import SamplingParams, TokenLogprobs

NATURAL = st.integers(0, 1 << 40)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 63) - 1) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=4,
)
PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    int: NATURAL,
    float: st.floats(allow_nan=False),
    str: st.text(max_size=20),
    bool: st.booleans(),
    type(None): st.none(),
    Any: JSON,
}


def strategy_of(annotation: Any) -> st.SearchStrategy[Any]:
    """Values of a message field's type."""
    if annotation in PLAIN:
        return PLAIN[annotation]
    inner = [strategy_of(each) for each in get_args(annotation)]
    if isinstance(annotation, UnionType):
        return st.one_of(inner)
    origin = get_origin(annotation)
    if origin is list:
        return st.lists(inner[0], max_size=4)
    if origin is tuple:
        return st.tuples(*inner)
    if origin is dict:
        return st.dictionaries(*inner, max_size=4)
    return messages_of(annotation)


def messages_of(kind: Any) -> st.SearchStrategy[Any]:
    hints = {each.name: each.type for each in msgspec.structs.fields(kind)}
    return st.builds(kind, **{name: strategy_of(hint) for name, hint in hints.items()})


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    ends = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    return [data[a:b] for a, b in pairwise(ends)]


@pytest.mark.parametrize("direction", [wire.ToRank, wire.FromRank])
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_messages_survive_the_way_in_any_pieces(direction: Any, data: Any) -> None:
    kinds = st.one_of([messages_of(kind) for kind in get_args(direction)])
    sent = data.draw(st.lists(kinds, min_size=1, max_size=4))
    stream = b"".join(map(frame, sent))
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=6))
    reader: FrameReader[Any] = FrameReader(direction)
    found = [message for piece in pieces(stream, cuts) for message in reader.feed(piece)]
    assert found == sent
    assert [type(message) for message in found] == [type(message) for message in sent]


@given(st.binary(min_size=4, max_size=60))
@settings(deadline=None)
def test_noise_is_refused_or_waits_but_never_passes(noise: bytes) -> None:
    found: list[Any] = []
    with contextlib.suppress(WireError):
        found = to_rank_reader().feed(noise)
    assert all(isinstance(message, get_args(wire.ToRank)) for message in found)


@pytest.mark.parametrize(
    "data",
    [
        b"hello, world",
        struct.pack(">I", 0),
        struct.pack(">I", wire.MAX_FRAME + 1),
        struct.pack(">I", 2) + b"\xc1\xc1",
        struct.pack(">I", 3) + msgspec.msgpack.encode([1, 2])[:3].ljust(3, b"\0"),
        frame(wire.Beat()),
    ],
)
def test_what_is_no_message_to_a_rank_is_refused(data: bytes) -> None:
    with pytest.raises(WireError, match="a frame"):
        to_rank_reader().feed(data)


def test_a_rank_cannot_be_sent_to_the_driver() -> None:
    with pytest.raises(WireError):
        from_rank_reader().feed(frame(wire.Stop(0)))


def a_step(tables: list[list[int]], start: int = 0) -> MeshStep:
    spans = tuple(
        SequenceSpan(start, count + 1, table, rope_length=start + 9)
        for count, table in enumerate(tables)
    )
    ids = tuple(range(sum(span.count for span in spans)))
    part = RankStep(1, spans, ids, tuple(i % 2 == 0 for i in range(len(spans))))
    rows = StepRows(BatchVariant.ORDINARY, ((len(ids),), (0,)), DpPadding.SUM_LEN)
    return MeshStep((part, IDLE), rows)


def through(encoder: StepEncoder, decoder: StepDecoder, number: int, step: MeshStep) -> Any:
    rows = [[SampleRow(3, number)], []]
    message = encoder.encode(number, step, rows)
    encoder.sent()
    (arrived,) = to_rank_reader().feed(frame(message))
    found, found_rows = decoder.decode(arrived)  # type: ignore[arg-type]
    assert found == step
    assert found_rows == rows
    return arrived


def test_a_step_arrives_whole_and_a_table_only_once() -> None:
    encoder, decoder = StepEncoder(), StepDecoder()
    tables = [[1, 2, 3], [4, 5]]
    assert len(through(encoder, decoder, 1, a_step(tables)).tables) == 2
    assert through(encoder, decoder, 2, a_step(tables, 7)).tables == {}
    # An equal list is another sequence's, and one that grew is sent again.
    assert list(through(encoder, decoder, 3, a_step([[1, 2, 3]])).tables.values()) == [[1, 2, 3]]
    tables[0].append(9)
    assert list(through(encoder, decoder, 4, a_step(tables)).tables.values()) == [[1, 2, 3, 9]]
    assert through(encoder, decoder, 5, a_step(tables)).tables == {}


def test_a_step_that_was_not_sent_leaves_nothing_behind() -> None:
    encoder, decoder = StepEncoder(), StepDecoder()
    step = a_step([[1, 2]])
    encoder.encode(1, step, [[], []])  # Interrupted before it was on its way.
    assert list(through(encoder, decoder, 2, step).tables.values()) == [[1, 2]]


def test_tables_out_of_use_are_forgotten_on_both_sides() -> None:
    encoder, decoder = StepEncoder(), StepDecoder()
    for number in range(3 * KEPT_STEPS):
        through(encoder, decoder, number, a_step([[number]]))
    assert len(decoder._tables) <= KEPT_STEPS + 2
    assert len(encoder._known) <= KEPT_STEPS + 2


def test_a_table_that_never_came_is_an_error() -> None:
    encoder = StepEncoder()
    step = a_step([[1, 2]])
    encoder.encode(1, step, [[], []])
    encoder.sent()
    with pytest.raises(WireError, match="step 2 names what is not known"):
        StepDecoder().decode(encoder.encode(2, step, [[], []]))


def test_sampling_parameters_arrive_as_they_were() -> None:
    params = SamplingParams(
        temperature=0.5,
        logit_bias={3: 1.5},
        stop=("a", "b"),
        stop_token_ids=(4, 5),
        seed=-7,
        top_k=3,
    )
    message = wire.Admit(7, params_fields(params), 2**62, 100, [1, 2], [2], [9])
    (arrived,) = to_rank_reader().feed(frame(message))
    spec = spec_of(arrived)  # type: ignore[arg-type]
    assert spec.params == params
    assert (spec.seed, spec.valid_vocab, list(spec.prompt_ids)) == (2**62, 100, [1, 2])
    assert (spec.eos_ids, spec.banned_ids) == ({2}, {9})


def test_logprobs_arrive_as_they_were() -> None:
    found = TokenLogprobs(5, -0.25, ((5, -0.25), (9, -1.5)))
    drawn = [(5, found), (6, None), FailedRow("NaN", "line 3")]
    (arrived,) = from_rank_reader().feed(frame(packed_tokens(1, drawn, [])))
    assert isinstance(arrived, wire.Tokens)
    assert tokens_of(arrived) == drawn


def test_readings_arrive_as_they_were() -> None:
    scored = (TokenLogprobs(5, -0.25, ((5, -0.25),)), TokenLogprobs(7, -math.inf, ()))
    readings = [(0.5, -1.0), FailedRow("NaN"), scored]
    reads = [RowRead(0, 3, 4), RowRead(1, 0, 1), RowRead(2, 0, 2, (5, 7), 1, 90)]
    (arrived,) = from_rank_reader().feed(frame(packed_tokens(1, [], readings)))
    assert isinstance(arrived, wire.Tokens)
    assert readings_of(reads, arrived) == readings
    part = RankStep(0, (SequenceSpan(0, 4, [1], 4),), (1, 2, 3, 4), (True,), tuple(reads))
    step = ordinary_step((part,), 1)
    decoded, _ = StepDecoder().decode(StepEncoder().encode(1, step, [[]]))
    assert decoded.parts[0].reads == tuple(reads)
