"""Planned exits against the specification's transition table, row by row, written out by hand.

The short names are those of support.plan_text.
"""

from __future__ import annotations

from typing import Any

import pytest

from layline.boundary.layout import BatchVariant
from layline.boundary.mesh import CpRows, MeshSpec
from layline.boundary.policy import ReductionPolicy
from layline.boundary.rows import BatchKind, DpPadding, batch_kind
from support.plan_text import flags_of, mesh, path, rows, short

MAX, SUM = DpPadding.MAX_LEN, DpPadding.SUM_LEN
AR, RS, RSV, RS_RSV = ReductionPolicy
ORDINARY = batch_kind(BatchVariant.ORDINARY)
ORDINARY_MAX = batch_kind(BatchVariant.ORDINARY, MAX)
ORDINARY_SUM = batch_kind(BatchVariant.ORDINARY, SUM)
CP = batch_kind(BatchVariant.CONTEXT_PARALLEL)
CP_SUM = batch_kind(BatchVariant.CONTEXT_PARALLEL, SUM)
SCATTERED = batch_kind(BatchVariant.INPUT_SCATTERED)
SEQUENCE = batch_kind(BatchVariant.SEQUENCE_PARALLEL)
TP2 = mesh(1, 1, 2)
TP2_AR = mesh(1, 1, 2, AR)
IS2 = mesh(1, 1, 2, input_scattered=True)
IS2_AR = mesh(1, 1, 2, AR, input_scattered=True)
SP2 = mesh(1, 1, 2, sequence_parallel=True)
LATENT = "latent attention"


EXITS = [
    # spec, kind, terminal, flags, compute, exit, left, next input
    (TP2, ORDINARY, False, "fuse", "", "", "AR(TP)", "U+R"),
    (TP2, ORDINARY, True, "", "AR(TP)", "", "", ""),
    (TP2_AR, ORDINARY, False, "fuse", "", "", "AR(TP)", "U+R"),
    (mesh(2, 1, 1), ORDINARY_MAX, False, "scatter", "", "", "RSv(TP)", "U+R"),
    (mesh(2, 1, 1), ORDINARY_SUM, False, "scatter", "", "", "RSv(TP)", "U+R"),
    (mesh(2, 1, 1, RSV), ORDINARY_MAX, False, "scatter", "", "", "RSv(TP)", "U+R"),
    (mesh(2, 1, 1, RS), ORDINARY_MAX, False, "scatter", "", "", "RS(TP)", "U+R"),
    (mesh(2, 1, 1, RS), ORDINARY_SUM, False, "fuse", "", "", "AR(TP) SL", "U+R"),
    (mesh(2, 1, 1, AR), ORDINARY_MAX, False, "fuse", "", "", "AR(TP) SL", "U+R"),
    (mesh(2, 1, 2), ORDINARY_MAX, False, "scatter", "", "", "RS(TP) AG(ATTN_TP)", "U+R"),
    (mesh(2, 1, 2), ORDINARY_SUM, False, "fuse", "", "", "AR(TP) SL", "U+R"),
    (mesh(2, 1, 2, RSV), ORDINARY_MAX, False, "fuse", "", "", "AR(TP) SL", "U+R"),
    (mesh(2, 1, 2), ORDINARY_MAX, True, "scatter", "", "RS(TP) AG(ATTN_TP)", "", ""),
    (mesh(2, 1, 1), ORDINARY_SUM, True, "scatter", "", "RSv(TP)", "", ""),
    (mesh(2, 1, 2), ORDINARY_SUM, True, "", "AR(TP)", "SL", "", ""),
    (mesh(2, 2, 1), ORDINARY_SUM, False, "", "AR(TP)", "SL", "", "U+R"),
    (mesh(2, 2, 2), CP_SUM, False, "", "AR(TP)", "SL", "", "U+R"),
    (mesh(1, 1, 2, dense_tp=1), ORDINARY, False, "", "", "", "", "U+R in:AG(ATTN_TP)"),
    (mesh(1, 1, 2, dense_tp=1), ORDINARY, True, "", "", "U AG(ATTN_TP)", "", ""),
    (mesh(2, 1, 1, dense_tp=1), ORDINARY_MAX, True, "", "", "", "", ""),
    (mesh(1, 2, 1, cp_rows=CpRows.EQUAL), CP, False, "scatter", "", "RS(ATTN_CP)", "", "U+R"),
    (mesh(1, 2, 1, AR, cp_rows=CpRows.EQUAL), CP, False, "", "AR(TP)", "SL", "", "U+R"),
    (mesh(1, 2, 1, RSV, cp_rows=CpRows.EQUAL), CP, False, "", "AR(TP)", "SL", "", "U+R"),
    # The FFN's sum is over attention TP too.
    (mesh(1, 2, 2, cp_rows=CpRows.EQUAL), CP, False, "", "AR(TP)", "SL", "", "U+R"),
    (mesh(1, 2, 1), CP, False, "", "AR(TP)", "SL", "", "U+R"),
    (mesh(1, 2, 1), CP, True, "", "AR(TP)", "SL", "", ""),
    (IS2, SCATTERED, False, "scatter", "", "", "TP", "RS(TP) res:SL U+R in:AG(ATTN_TP)"),
    (IS2_AR, SCATTERED, False, "", "AR(TP)", "", "", "SL res:SL U+R in:AG(ATTN_TP)"),
    (mesh(1, 1, 2, RSV, input_scattered=True), SCATTERED, False, "", "AR(TP)", "", "", None),
    (IS2, SCATTERED, True, "", "AR(TP)", "", "", ""),
    (SP2, SEQUENCE, False, "", "RS(TP)", "", "", "U+R"),
    (SP2, SEQUENCE, True, "", "RS(TP)", "", "", ""),
]


@pytest.mark.parametrize("row", EXITS)
def test_ffn_exit_and_next_input(row: tuple[Any, ...]) -> None:
    # boundary G26, G27, G28, G29, G30, G34, G35, G36, G37, G38, G42, G49
    spec, kind, terminal, flags, compute, exit_, left, after = row
    stage = path(spec, kind, f"attention > ffn > {'.' if terminal else 'attention'}")
    leaving = stage.exit.with_tokens
    declared = "" if leaving.declared is None else leaving.declared.name
    assert flags_of(leaving) == flags
    assert short(leaving.compute) == compute
    assert short(leaving.ops) == exit_
    assert (short(leaving.owed) or declared) == left
    assert leaving.writes is exit_.startswith("U")
    if after:
        prepare = path(spec, kind, "ffn > attention > ffn").prepare
        assert short(prepare.declared if declared else prepare.complete) == after


@pytest.mark.parametrize(
    ("name", "spec", "kind", "flags", "compute", "exit_", "left"),
    [
        # An update at the producer: a scatter runs at the exit, then the update; never carried.
        ("writing ffn", mesh(2, 1, 1), ORDINARY_MAX, "scatter", "", "RSv(TP) U", ""),
        ("writing ffn", mesh(2, 1, 1, AR), ORDINARY_MAX, "", "AR(TP)", "SL U", ""),
        ("writing ffn", TP2, ORDINARY, "", "AR(TP)", "U", ""),
        ("writing ffn", IS2, SCATTERED, "scatter", "", "RS(TP) U", ""),
        ("writing ffn", IS2_AR, SCATTERED, "", "AR(TP)", "SL U", ""),
        ("writing plain ffn", IS2, SCATTERED, "scatter", "", "RS(TP) U", ""),
        ("writing ffn", SP2, SEQUENCE, "", "RS(TP)", "U", ""),
        # A transform: AR, transform, slice; before the scatter with permission only.
        ("transform ffn", mesh(2, 1, 1), ORDINARY_MAX, "", "AR(TP)", "T SL", ""),
        ("linear transform ffn", mesh(2, 1, 1), ORDINARY_MAX, "scatter", "", "T RSv(TP)", ""),
        ("linear transform ffn", mesh(2, 1, 1, AR), ORDINARY_MAX, "", "AR(TP)", "T SL", ""),
        ("transform ffn", TP2, ORDINARY, "", "AR(TP)", "T", ""),
        ("transform ffn", mesh(1, 1, 2, dense_tp=1), ORDINARY, "", "", "T", ""),
        ("transform ffn", IS2, SCATTERED, "", "AR(TP)", "T", ""),
        ("transform ffn", SP2, SEQUENCE, "", "RS(TP)", "T", ""),
        # A local tail is never left to the next layer; a scatter is allowed.
        ("tail ffn", TP2, ORDINARY, "", "AR(TP)", "", ""),
        ("tail ffn", mesh(2, 1, 2), ORDINARY_SUM, "", "AR(TP)", "SL", ""),
        ("tail ffn", mesh(2, 1, 2), ORDINARY_MAX, "scatter", "", "", "RS(TP) AG(ATTN_TP)"),
        ("tail ffn", mesh(2, 1, 1), ORDINARY_SUM, "scatter", "", "", "RSv(TP)"),
        # A deferred update that is not plain may be carried: it is applied after the sum.
        ("weighted ffn", TP2, ORDINARY, "fuse", "", "", "AR(TP)"),
    ],
)
def test_exits_of_other_ffns(
    name: str, spec: MeshSpec, kind: BatchKind, flags: str, compute: str, exit_: str, left: str
) -> None:  # boundary G42, G51, G52, G63
    leaving = path(spec, kind, f"attention > {name} > attention").exit.with_tokens
    assert flags_of(leaving) == flags
    assert short(leaving.compute) == compute
    assert short(leaving.ops) == exit_
    assert short(leaving.owed) == left
    assert leaving.writes is ("U" in exit_.split())


def test_terminal_updates_at_the_producer_end_on_attention_rows() -> None:  # boundary G30
    for spec, kind, ops in (
        (IS2, SCATTERED, "RS(TP) U AG(ATTN_TP)"),
        (SP2, SEQUENCE, "U AG(ATTN_TP)"),
        (mesh(1, 1, 2, dense_tp=1), ORDINARY, "U AG(ATTN_TP)"),
    ):
        leaving = path(spec, kind, "attention > writing ffn > .").exit.with_tokens
        assert short(leaving.ops) == ops
        assert rows(spec, kind, leaving.rows) == "A"
        assert leaving.writes


@pytest.mark.parametrize(
    ("spec", "kind", "after", "flags", "compute", "left"),
    [
        (TP2, ORDINARY, "ffn", "fuse", "", "ATTN_TP"),
        (mesh(2, 1, 2), ORDINARY_MAX, "ffn", "fuse", "", "ATTN_TP"),
        (IS2, SCATTERED, "ffn", "fuse", "", "ATTN_TP"),
        (mesh(1, 2, 2), CP, "ffn", "fuse", "", "ATTN_TP"),
        (TP2, ORDINARY, "mixer", "fuse", "", "AR(ATTN_TP)"),
        (mesh(2, 1, 2), ORDINARY_MAX, "mixer", "", "AR(ATTN_TP)", ""),
        (IS2, SCATTERED, "mixer", "", "AR(ATTN_TP)", ""),
        (TP2, ORDINARY, ".", "", "AR(ATTN_TP)", ""),
        (mesh(2, 1, 1), ORDINARY_MAX, "ffn", "", "", ""),
        (SP2, SEQUENCE, "ffn", "", "RS(TP)", ""),
    ],
)
def test_mixer_exits(
    spec: MeshSpec, kind: BatchKind, after: str, flags: str, compute: str, left: str
) -> None:  # boundary G42, G53, G54
    leaving = path(spec, kind, f"ffn > mixer > {after}").exit.with_tokens
    assert flags_of(leaving) == flags
    assert short(leaving.compute) == compute
    assert (short(leaving.owed) or (leaving.declared.name if leaving.declared else "")) == left
    assert not leaving.ops


def test_partial_attention_before_another_leaves_its_sum_under_dp_too() -> None:  # boundary G10
    spec = mesh(2, 1, 2)
    leaving = path(spec, ORDINARY_MAX, "ffn > attention > attention").exit.with_tokens
    assert leaving.declared is not None
    assert not leaving.compute
    after = path(spec, ORDINARY_MAX, "attention > attention > ffn").prepare
    assert short(after.declared) == "AR(ATTN_TP) U+R"
