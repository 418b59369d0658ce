"""Plans against the specification's transition table, row by row, written out by hand.

The short names are those of support.plan_text.
"""

from __future__ import annotations

import itertools

import pytest

from layline.boundary.layout import BatchVariant
from layline.boundary.mesh import MeshSpec
from layline.boundary.planning.moves import Ground, batch_kinds
from layline.boundary.planning.records import OpKind
from layline.boundary.policy import ReductionPolicy
from layline.boundary.rows import BatchKind, DpPadding, batch_kind
from support.plan_text import mesh, path, rows, short

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


@pytest.mark.parametrize(
    ("spec", "kind", "name", "state", "ops", "residual"),
    [
        (TP2, ORDINARY, "attention", "entry", "enter R", "A"),
        (mesh(2, 1, 2), ORDINARY_MAX, "attention", "entry", "enter R", "A"),
        (mesh(1, 2, 2), CP, "attention", "entry", "enter R", "A"),
        (IS2, SCATTERED, LATENT, "entry_partial", "RS(TP) enter R", "L"),
        (IS2, SCATTERED, LATENT, "entry", "SL enter R", "L"),
        (IS2, SCATTERED, "attention", "entry", "SL enter R in:AG(ATTN_TP)", "L"),
        (SP2, SEQUENCE, "attention", "entry", "SL enter R", "L"),
        (TP2, ORDINARY, "attention", "written", "R", "A"),
        (SP2, SEQUENCE, "attention", "written", "res:SL R", "L"),
        (IS2, SCATTERED, LATENT, "written", "res:SL R", "L"),
    ],
)
def test_entry(
    spec: MeshSpec, kind: BatchKind, name: str, state: str, ops: str, residual: str
) -> None:  # boundary G15, G28, G61
    prepare = path(spec, kind, f". > {name} > ffn").prepare
    assert short(getattr(prepare, state)) == ops
    assert rows(spec, kind, prepare.residual_rows) == residual


@pytest.mark.parametrize(
    ("spec", "kind", "near", "ops", "residual"),
    [
        (TP2, ORDINARY, "attention > ffn", "AR(ATTN_TP) U+R", "A"),
        # Plain update and read: the attention sum gathers too.
        (
            mesh(2, 1, 2),
            ORDINARY_SUM,
            "attention > ffn",
            "join place AR(TP) take-residual R(sum)",
            "A",
        ),
        (
            mesh(2, 1, 2),
            ORDINARY_MAX,
            "attention > ffn",
            "join RS(ATTN_TP) AG(TP) take-residual R(sum)",
            "A",
        ),
        (
            mesh(2, 2, 2),
            CP_SUM,
            "attention > ffn",
            "join place AR(TP) take-residual R(sum)",
            "A",
        ),
        (
            mesh(2, 2, 2),
            ORDINARY_SUM,
            "attention > ffn",
            "join place AR(TP) take-residual R(sum)",
            "A",
        ),
        # Everything else: sum, update and read on own rows, then gather.
        (
            mesh(2, 1, 2),
            ORDINARY_SUM,
            "attention > early reading ffn",
            "AR(ATTN_TP) U+R in:place in:AR(TP)",
            "A",
        ),
        (
            mesh(2, 1, 2),
            ORDINARY_MAX,
            "attention > early reading ffn",
            "AR(ATTN_TP) U+R in:SL in:AG(TP)",
            "A",
        ),
        (
            mesh(2, 1, 2),
            ORDINARY_SUM,
            "weighted attention > ffn",
            "AR(ATTN_TP) U+R in:place in:AR(TP)",
            "A",
        ),
        (
            mesh(2, 1, 2),
            ORDINARY_SUM,
            "attention > odd reading ffn",
            "AR(ATTN_TP) U+R in:place in:AR(TP)",
            "A",
        ),
        # FFN on L.
        (mesh(1, 1, 2, dense_tp=1), ORDINARY, "attention > ffn", "RS(ATTN_TP) res:SL U+R", "L"),
        (
            mesh(2, 1, 2, dense_tp=1),
            ORDINARY_SUM,
            "attention > ffn",
            "RS(ATTN_TP) res:SL U+R",
            "L",
        ),
        # CP rows of one prompt.
        (
            mesh(1, 2, 2),
            CP,
            "attention > ffn",
            "AR(ATTN_TP) U+R in:pad in:AG(ATTN_CP)",
            "A",
        ),
        # Input-scattered.
        (
            IS2,
            SCATTERED,
            "attention > ffn",
            "join-slice AR(TP) take-residual R(sum)",
            "A",
        ),
        (
            IS2,
            SCATTERED,
            "weighted attention > weighted ffn",
            "RS(ATTN_TP) U+R in:AG(ATTN_TP)",
            "L",
        ),
        (
            IS2,
            SCATTERED,
            "attention > writing ffn",
            "RS(ATTN_TP) U+R in:AG(ATTN_TP)",
            "L",
        ),
    ],
)
def test_attention_to_ffn_with_a_sum(
    spec: MeshSpec, kind: BatchKind, near: str, ops: str, residual: str
) -> None:  # boundary G23, G24, G25, G26, G27, G28, G30
    stage = path(spec, kind, f"{near} > attention")
    assert short(stage.prepare.declared) == ops
    assert rows(spec, kind, stage.prepare.residual_rows) == residual


@pytest.mark.parametrize(
    ("spec", "kind", "ops"),
    [
        (mesh(1, 1, 1), ORDINARY, "U+R"),
        (mesh(2, 1, 1), ORDINARY_MAX, "U+R in:pad in:AG(TP)"),
        (mesh(2, 1, 1), ORDINARY_SUM, "U+R in:place in:AR(TP)"),
        (mesh(2, 2, 1), CP_SUM, "U+R in:place in:AR(TP)"),
        (mesh(2, 1, 1, dense_tp=1), ORDINARY_MAX, "U+R"),
        (mesh(1, 2, 1), CP, "U+R in:pad in:AG(ATTN_CP)"),
        (mesh(1, 2, 1), ORDINARY, "U+R"),
        (SP2, SEQUENCE, "U+R"),
    ],
)
def test_attention_to_ffn_without_a_sum(
    spec: MeshSpec, kind: BatchKind, ops: str
) -> None:  # boundary G24, G25, G26, G27
    stage = path(spec, kind, "attention > ffn > attention")
    assert stage.prepare.declared is None
    assert short(stage.prepare.complete) == ops


def test_who_writes_the_global_buffer() -> None:  # boundary G25
    """Each slot once: by one attention TP rank, or by all where their parts are added there."""
    writers: dict[tuple[str, bool, bool], str] = {}
    for cp, tp in itertools.product((1, 2), (1, 2)):
        spec = mesh(2, cp, tp)
        for kind in batch_kinds(spec):
            if kind.padding is not SUM:
                continue
            prepare = path(spec, kind, "attention > ffn > attention").prepare
            for partial, ops in ((True, prepare.declared), (False, prepare.written)):
                for op in ops or ():
                    if op.kind is OpKind.PLACE and op.writers is not None:
                        parallel = kind.variant is BatchVariant.CONTEXT_PARALLEL
                        key = (f"{cp}x{tp}", parallel, partial)
                        writers[key] = op.writers.value
    assert writers == {
        ("1x1", False, False): "every rank",
        ("1x2", False, False): "attention TP rank 0",
        ("1x2", False, True): "every rank",
        ("2x1", False, False): "attention CP and TP rank 0",
        ("2x1", True, False): "every rank",
        ("2x2", False, False): "attention CP and TP rank 0",
        ("2x2", False, True): "attention CP rank 0",
        ("2x2", True, False): "attention TP rank 0",
        ("2x2", True, True): "every rank",
    }


@pytest.mark.parametrize(
    ("spec", "kind", "ops"),
    [
        (TP2, ORDINARY, "AR(TP) U+R"),
        (mesh(2, 1, 2), ORDINARY_MAX, "RS(TP) AG(ATTN_TP) U+R in:SL in:AG(TP)"),
        (mesh(2, 1, 2, AR), ORDINARY_SUM, "AR(TP) SL U+R in:place in:AR(TP)"),
        (mesh(1, 1, 2, dense_tp=1), ORDINARY, "U+R"),
        (mesh(1, 2, 1), CP, "U+R in:pad in:AG(ATTN_CP)"),
    ],
)
def test_ffn_to_ffn(spec: MeshSpec, kind: BatchKind, ops: str) -> None:
    """Carried work lands on the producer's rows first."""
    leaving = path(spec, kind, "attention > ffn > ffn").exit.with_tokens
    after = path(spec, kind, "ffn > ffn > attention").prepare
    assert short([*leaving.owed, *(after.complete or ())]) == ops


def test_a_residual_on_slices_is_gathered_for_an_ffn_on_every_row() -> None:
    """After fold() or written() the residual may be elsewhere than declared: each has a path."""
    spec = mesh(1, 1, 2)
    stage = path(spec, ORDINARY, "attention > ffn > attention")
    local = Ground(spec, ORDINARY).local
    assert short(stage.prepares[local].declared) == "AR(ATTN_TP) res:AG(ATTN_TP) U+R"
    spec = mesh(2, 1, 2)
    stage = path(spec, ORDINARY_MAX, "attention > ffn > attention")
    local = Ground(spec, ORDINARY_MAX).local
    declared = "res:AG(ATTN_TP) join RS(ATTN_TP) AG(TP) take-residual R(sum)"
    assert short(stage.prepares[local].declared) == declared
