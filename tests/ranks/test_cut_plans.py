"""What a plan says crosses a cut, beside what to_pp really gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from layline.boundary.planning.cut import plan_cuts
from layline.boundary.planning.moves import batch_kinds
from layline.boundary.planning.records import Op
from layline.boundary.planning.walk import enters_partial
from layline.boundary.residual import batch as residual_batch
from layline.comm.simulated import run_ranks
from layline.config import EngineConfig
from layline.engine.balance import StepRules
from layline.engine.pipeline_plan import plan_pipeline
from layline.engine.planned import open_plan
from layline.engine.step import MeshStep
from layline.layers.spans import Phase
from layline.models.decoder import Decoder
from layline.topology import Topology
from support.mesh import Job, TextSequence, open_model, rank_step, walk
from support.simulated_cases import Case, mesh_spec, with_policies
from support.tiny import save_tiny
from support.toy_mesh import ToyRank, on_ranks

NAMES = ("attention", "ffn", "mixer", "mixer", "ffn", "attention", "tail ffn")
WRITING = ("writing attention", "ffn", "writing ffn", "attention", "ffn")
MESHES = [
    Topology(),
    Topology(tp=2),
    Topology(tp=4, attn_dp=2),
    Topology(tp=2, attn_dp=2),
    Topology(tp=4, attn_cp=2),
    Topology(tp=4, attn_dp=2, dense_tp=1),
]


@pytest.mark.parametrize("names", [NAMES, WRITING], ids=["plain", "writing"])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_plans_name_the_tensors_and_rows_of_every_cut(
    mesh: Topology, names: tuple[str, ...]
) -> None:
    if names is WRITING and mesh.attn_cp > 1:
        pytest.skip("an update at its producer does not go with rows over CP")
    checked: list[bool] = []
    for spec in with_policies(mesh_spec(mesh)):
        for kind in batch_kinds(spec):
            partial = enters_partial(spec, kind)
            for cut in range(1, len(names)):
                on_ranks(
                    spec, names, Case(spec, kind).step, lambda rank: checked.append(
                        crosses_as_planned(rank, cut, partial)  # noqa: B023 - runs in this turn
                    )
                )  # fmt: skip
    if mesh.attn_tp > 1 and names is NAMES:
        assert True in checked, "a declared sum crosses unfinished"


def crosses_as_planned(rank: ToyRank, cut: int, partial: bool) -> bool:
    """Run one rank to a cut and compare; whether an unfinished sum crosses."""
    plans = [stage.plan for stage in rank.stages]
    (planned,) = plan_cuts(plans, rank.ground, [cut])
    hidden = rank.run(rank.start(partial=partial), last=cut)
    ran = len(rank.recorder.records)
    tensors = residual_batch.to_pp(hidden, rank.batch)
    assert list(tensors) == [each.name for each in planned.tensors]
    assert planned.written is (len(tensors) == 1)
    for each in planned.tensors:
        assert tensors[each.name].shape[0] == len(rank.seat.on(each.rows, rank.ground))
    done = [op for op in planned.before if op.is_collective and has_rows(rank, op)]
    assert len(rank.recorder.records) - ran == len(done)
    return any(each.partial for each in planned.tensors)


def has_rows(rank: ToyRank, op: Op) -> bool:
    """Whether a collective has anything to move: idle ranks skip those of their own."""
    return any(rank.seat.on(rows, rank.ground) for rows in (op.before, op.after))


class StoppedError(Exception):
    """The model's walk ends at the cut."""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mesh", [{}, {"tp": 2}, {"tp": 2, "attn_dp": 2}], ids=str)
def test_bytes_and_dtypes_are_those_of_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mesh: dict[str, int], dtype: str
) -> None:
    save_tiny(tmp_path, "Llama", num_attention_heads=8, num_hidden_layers=3)
    flags: dict[str, Any] = {**mesh, "dtype": dtype, "pp_stages": 2, "pp_splits": (1,)}
    engine = EngineConfig(model=str(tmp_path), **flags)
    planned = plan_pipeline(open_plan(engine.model, flags, "ordinary"), engine, {}, print)
    assert planned is not None
    (cut,) = planned.cuts
    crossed: list[dict[str, torch.Tensor]] = []

    def to_the_cut(self: Decoder, input_ids: torch.Tensor, forward_batch: Any) -> torch.Tensor:
        hidden = self._enter(input_ids, forward_batch)
        hidden = self.layers[0](hidden, forward_batch)
        crossed.append(residual_batch.to_pp(hidden, forward_batch))
        raise StoppedError

    monkeypatch.setattr(Decoder, "run_stage", to_the_cut)
    attn_dp = engine.attn_dp
    texts = [TextSequence((3, 4, 5, 6), dp, 1 + 4 * dp) for dp in range(attn_dp)]
    parts = tuple(rank_step(Phase.PREFILL, [(text, 0, 4)]) for text in texts)
    served, checkpoint = open_model(engine)
    checkpoint.close()
    job = Job(engine, served.facts, (MeshStep(parts, StepRules.of(engine).rows(parts)),))

    def on_rank(here: Topology, groups: Any) -> None:
        with pytest.raises(StoppedError):
            walk(here, groups, job)

    run_ranks(served.facts.spec.topology, on_rank)
    assert len(crossed) == engine.tp
    for tensors in crossed:
        assert list(tensors) == [each.name for each in cut.tensors]
        for each in cut.tensors:
            found = tensors[each.name]
            named = planned.tensor_dtype(each)
            narrower = planned.assumes_outputs and found.dtype is torch.bfloat16
            assert str(found.dtype) == f"torch.{named}" or narrower
            halved = 2 if narrower and named == "float32" else 1
            assert found.nbytes * halved == planned.bytes_per_token(each) * 4 * attn_dp
    assert planned.assumes_outputs is (dtype == "bfloat16" and engine.tp == 1)
