"""Which kind of batch a step is, and that a boundary never takes another one's path."""

from __future__ import annotations

import pytest

from layline.boundary import BatchVariant
from layline.boundary.residual import batch
from layline.boundary.rows import (
    ORDINARY,
    DpPadding,
    StepRows,
    batch_kind,
    effective_padding,
    kind_of,
    rank_rows,
)
from layline.engine.balance import StepRules
from layline.engine.step import IDLE, RankStep
from layline.layers.spans import Phase, SequenceSpan
from layline.topology import Topology
from support.one_rank import entered, forward_batch, layer, rows


def part(phase: Phase, tokens: int) -> RankStep:
    span = SequenceSpan(0, tokens, [1], rope_length=tokens)
    if phase is Phase.PREFILL:
        return RankStep(0, (span,), tuple(range(tokens)), (True,))
    ones = tuple([SequenceSpan(0, 1, [1 + i], rope_length=1) for i in range(tokens)])
    return RankStep(tokens, ones, tuple(range(tokens)), (True,) * tokens)


PREFILL, DECODE = part(Phase.PREFILL, 8), part(Phase.DECODE, 1)
EVERYTHING = {"tp": 4, "attn_cp": 2, "sequence_parallel": True, "input_scattered": True}


def variant(step: RankStep, **rules: object) -> BatchVariant:
    return StepRules(**rules).rows([step]).variant  # type: ignore[arg-type]


def test_sequence_parallel_comes_first_then_scattered_then_context_parallel() -> None:
    # boundary G15
    rules = dict(EVERYTHING)
    assert variant(PREFILL, **rules) is BatchVariant.SEQUENCE_PARALLEL
    rules["sequence_parallel"] = False
    assert variant(PREFILL, **rules) is BatchVariant.INPUT_SCATTERED
    rules["input_scattered"] = False
    assert variant(PREFILL, **rules) is BatchVariant.CONTEXT_PARALLEL
    rules["attn_cp"] = 1
    assert variant(PREFILL, **rules) is BatchVariant.ORDINARY


def test_a_decode_is_neither_sequence_nor_context_parallel() -> None:  # boundary G17, G19
    assert variant(DECODE, tp=4, sequence_parallel=True) is BatchVariant.ORDINARY
    assert variant(DECODE, tp=4, attn_cp=2) is BatchVariant.ORDINARY
    assert variant(PREFILL, tp=4, attn_cp=2) is BatchVariant.CONTEXT_PARALLEL
    mixed = StepRules(tp=4, attn_cp=2).rows([PREFILL, DECODE])
    assert mixed.variant is BatchVariant.ORDINARY
    idle = StepRules(tp=4, attn_cp=2).rows([PREFILL, IDLE])
    assert idle.variant is BatchVariant.CONTEXT_PARALLEL
    assert idle.counts == ((4, 4), (0, 0))
    assert mixed.counts == ((8, 8), (1, 1))


def test_scattered_rows_divide_by_the_ranks() -> None:  # boundary G18
    rules = StepRules(tp=4, input_scattered=True)
    assert rules.rows([part(Phase.DECODE, 8)]).variant is BatchVariant.INPUT_SCATTERED
    assert rules.rows([part(Phase.DECODE, 7)]).variant is BatchVariant.ORDINARY


@pytest.mark.parametrize("absent", [v for v in BatchVariant if v is not BatchVariant.ORDINARY])
def test_an_absent_path_is_refused_wherever_it_is_looked_up(absent: BatchVariant) -> None:
    # boundary G16
    text = f"^no stage boundary path for the active {absent.name} batch$"
    attn, ffn = layer()
    fb = forward_batch(batch_kind(absent))
    batch.start(fb)
    with pytest.raises(NotImplementedError, match=text):
        attn.prepare(rows(0), fb)
    fb, attn, h = entered(rows(5))
    ffn.prepare(h, fb)
    fb.kind = batch_kind(absent)
    with pytest.raises(NotImplementedError, match=text):
        ffn.exit(fb)
    with pytest.raises(NotImplementedError, match=text):
        attn.finish(rows(5), fb)


def test_there_is_one_object_of_each_kind() -> None:
    """Paths are looked up by identity, so equal kinds must be the same object."""
    assert batch_kind(BatchVariant.ORDINARY) is ORDINARY
    assert batch_kind(BatchVariant.ORDINARY, None) is ORDINARY
    kinds = [batch_kind(v, p) for v in BatchVariant for p in (None, *DpPadding)]
    assert len({id(kind) for kind in kinds}) == 12
    assert len(set(kinds)) == 12
    step = StepRows(BatchVariant.ORDINARY, ((3,),))
    assert kind_of(step, Topology()) is ORDINARY


def test_rows_of_a_rank() -> None:  # boundary G25
    """Ragged and idle ranks, written out: what each holds, and where its slot begins."""
    mesh = Topology(tp=8, attn_dp=4)
    step = StepRows(BatchVariant.ORDINARY, ((3,), (0,), (5,), (1,)), DpPadding.MAX_LEN)
    found = [rank_rows(step, mesh.at(2 * dp)) for dp in range(4)]
    assert [(r.own, r.slot, r.shard, r.offset) for r in found] == [
        (3, 6, 3, 0),
        (0, 6, 3, 6),
        (5, 6, 3, 12),
        (1, 6, 3, 18),
    ]
    assert {(r.total, r.slots, r.tokens) for r in found} == {(24, (6, 6, 6, 6), 9)}
    packed = StepRows(BatchVariant.ORDINARY, step.counts, DpPadding.SUM_LEN)
    found = [rank_rows(packed, mesh.at(2 * dp)) for dp in range(4)]
    assert [(r.own, r.slot, r.shard, r.offset) for r in found] == [
        (3, 3, 2, 0),
        (0, 0, 0, 3),
        (5, 5, 3, 3),
        (1, 1, 1, 8),
    ]
    assert {(r.total, r.slots, r.tokens) for r in found} == {(9, (3, 0, 5, 1), 9)}


def test_rows_of_a_context_parallel_rank() -> None:  # boundary G25, G26, G27
    mesh = Topology(tp=4, attn_cp=2)
    step = StepRows(BatchVariant.CONTEXT_PARALLEL, ((3, 2),))
    found = [rank_rows(step, mesh.at(2 * cp)) for cp in range(2)]
    assert [(r.own, r.slot, r.shard, r.offset, r.total) for r in found] == [
        (3, 3, 2, 0, 6),
        (2, 3, 2, 3, 6),
    ]
    both = Topology(tp=4, attn_dp=2, attn_cp=2)
    step = StepRows(BatchVariant.CONTEXT_PARALLEL, ((3, 2), (0, 1)))
    found = [rank_rows(step, both.at(rank)) for rank in range(4)]
    assert [(r.own, r.slot, r.offset) for r in found] == [
        (3, 3, 0),
        (2, 2, 3),
        (0, 0, 5),
        (1, 1, 5),
    ]
    assert {(r.total, r.tokens) for r in found} == {(6, 6)}
    plain = StepRows(BatchVariant.ORDINARY, ((3, 3), (1, 1)))
    found = [rank_rows(plain, both.at(rank)) for rank in range(4)]
    assert [(r.own, r.offset) for r in found] == [(3, 0), (3, 0), (1, 3), (1, 3)]
    assert {(r.total, r.tokens) for r in found} == {(4, 4)}


def test_which_padding_a_mesh_uses() -> None:
    for asked in DpPadding:
        assert effective_padding(Topology(tp=4), asked) is None
        assert effective_padding(Topology(tp=4, attn_dp=2), asked) is asked
        both = Topology(tp=4, attn_dp=2, attn_cp=2)
        assert effective_padding(both, asked) is DpPadding.SUM_LEN
