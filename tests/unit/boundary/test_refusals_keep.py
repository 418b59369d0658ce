"""What a prepare refuses is refused before anything communicates, and stays pending."""

from __future__ import annotations

import gc
import types
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from layline.boundary import BatchVariant, declare_attn, declare_ffn, make_stages
from layline.boundary.mesh import MeshSpec, make_mesh
from layline.boundary.residual import LayerResidual, batch
from layline.boundary.residual.add_norm import PlainRead, PlainUpdate
from layline.boundary.residual.stream import StreamState
from layline.boundary.rows import ORDINARY, RankRows, batch_kind
from layline.errors import BoundaryUnsupportedError, StreamError
from layline.layers.norm import RMSNorm
from layline.topology import GroupName, Topology

HIDDEN = 8


@dataclass(frozen=True)
class Doubling(PlainUpdate):
    """Adds twice the output: an update that is not plain."""

    plain: bool = False

    def apply(self, output: Any, residual: Any) -> Any:
        return residual + 2 * output


DOUBLING = LayerResidual(read=PlainRead(), update=Doubling())


class Counted:
    """A group of two equal ranks that counts what it is asked for."""

    def __init__(self, name: GroupName) -> None:
        self.name, self.ranks, self.rank, self.size = name, (0, 1), 0, 2
        self.calls = 0

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return 2 * x


class Batch:
    def __init__(self) -> None:
        self.residual_stream: Any = None
        self.attn_tp_context: Any = None
        self.kind = ORDINARY
        self.rows = RankRows(own=3, slot=3, shard=2, offset=0, total=3, slots=(3,), tokens=3)


def norm() -> RMSNorm:
    return RMSNorm(torch.ones(HIDDEN), 1e-5)


def pending(first: Any) -> tuple[Any, Any, Counted]:
    """A batch whose FFN left a sum over TP, its handle, and the group that would complete it."""
    groups = {name: Counted(name) for name in (GroupName.TP, GroupName.ATTN_TP)}
    mesh = make_mesh(MeshSpec(topology=Topology(tp=2)), groups)
    (ffn,) = make_stages((first, norm()), following=declare_attn(), mesh=mesh)
    fb = Batch()
    batch.start(fb)
    ffn.prepare(torch.ones(3, HIDDEN), fb)
    with ffn.exit(fb) as output:
        pass
    handle = output.finish(torch.ones(3, HIDDEN))
    assert not isinstance(handle, torch.Tensor)
    return fb, handle, groups[GroupName.TP]


def consumer(previous: Any) -> Any:
    groups = {name: Counted(name) for name in (GroupName.TP, GroupName.ATTN_TP)}
    mesh = make_mesh(MeshSpec(topology=Topology(tp=2)), groups)
    (attn,) = make_stages((declare_attn(), norm()), previous=previous, mesh=mesh)
    return attn


@pytest.mark.parametrize("captures", [False, True])
def test_a_mismatched_update_communicates_nothing_and_stays(
    captures: bool,
) -> None:  # boundary G62
    fb, handle, group = pending(declare_ffn(residual=DOUBLING))
    options = {"capture_output": lambda value, owned: None} if captures else {}
    with pytest.raises(StreamError, match="the pending update is Doubling"):
        consumer(declare_ffn()).prepare(handle, fb, **options)
    assert group.calls == 0
    assert fb.residual_stream.state is StreamState.PENDING
    # The stage that was meant still can.
    consumer(declare_ffn(residual=DOUBLING)).prepare(handle, fb)
    assert group.calls == 1


@pytest.mark.parametrize("captures", [False, True])
def test_an_absent_variant_communicates_nothing_and_stays(captures: bool) -> None:  # boundary G16
    fb, handle, group = pending(declare_ffn())
    fb.kind = batch_kind(BatchVariant.SEQUENCE_PARALLEL)
    options = {"capture_output": lambda value, owned: None} if captures else {}
    with pytest.raises(NotImplementedError, match="the active SEQUENCE_PARALLEL batch"):
        consumer(declare_ffn()).prepare(handle, fb, **options)
    assert group.calls == 0
    fb.kind = ORDINARY
    consumer(declare_ffn()).prepare(handle, fb)
    assert group.calls == 1


def test_fold_takes_plain_updates_only() -> None:  # boundary G69
    fb, handle, group = pending(declare_ffn(residual=DOUBLING))
    with pytest.raises(BoundaryUnsupportedError, match="fold requires a plain residual update"):
        batch.fold(handle, fb)
    assert group.calls == 0
    assert fb.residual_stream.state is StreamState.PENDING


def test_a_boundary_holds_no_tensor_after_a_step() -> None:  # boundary G14
    groups = {name: Counted(name) for name in (GroupName.TP, GroupName.ATTN_TP)}
    mesh = make_mesh(MeshSpec(topology=Topology(tp=2)), groups)
    own = norm()
    (ffn,) = make_stages((declare_ffn(), own), following=declare_attn(), mesh=mesh)
    fb = Batch()
    batch.start(fb)
    ffn.prepare(torch.ones(3, HIDDEN), fb)
    with ffn.exit(fb) as output:
        pass
    output.finish(torch.ones(3, HIDDEN))
    seen, tensors = reachable(ffn, without=own)
    assert seen > 100
    assert tensors == []
    # The search does find a tensor in a function's closure.
    kept = torch.ones(1)
    assert reachable(lambda: kept, without=own)[1] == [kept]


def reachable(root: object, without: object) -> tuple[int, list[torch.Tensor]]:
    """How many objects ``root`` holds on to, and the tensors among them."""
    seen: dict[int, object] = {}
    waiting: list[object] = [root]
    while waiting:
        value = waiting.pop()
        if id(value) in seen or value is without or isinstance(value, (type, types.ModuleType)):
            continue
        seen[id(value)] = value
        if isinstance(value, types.FunctionType):
            # What it closes over, not the globals of its module.
            waiting.extend(cell.cell_contents for cell in value.__closure__ or ())
        else:
            waiting.extend(gc.get_referents(value))
    return len(seen), [value for value in seen.values() if isinstance(value, torch.Tensor)]
