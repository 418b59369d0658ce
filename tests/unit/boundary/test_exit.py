"""Exit scopes: flags while compute runs, one finish after it, nothing left behind on failure."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from layline.boundary import ProducerReduction, declare_attn, get_forward, make_stages
from layline.boundary.exit import ForwardFlags, StageExit, bind_exit
from layline.boundary.mesh import Mesh
from layline.boundary.planning.exits import ExitPlan
from layline.boundary.residual import batch
from layline.boundary.residual.add_norm import PlainUpdate
from layline.boundary.residual.stream import ResidualStream
from layline.errors import StreamError
from support.one_rank import entered, layer, norm, rows

SKIP = ForwardFlags(fuse_mlp_allreduce=True)


def open_exit(flags: ForwardFlags) -> StageExit:
    stream = ResidualStream()
    stream.residual = rows(0)
    bound = dataclasses.replace(bind_exit(ExitPlan(), Mesh()), flags=flags)
    return StageExit(stream, PlainUpdate(), bound, None)


def test_flags_stand_inside_the_scope_only() -> None:  # boundary G43
    assert get_forward() == ForwardFlags()
    with open_exit(SKIP) as outer:
        assert get_forward().fuse_mlp_allreduce
        assert outer.skips_reduction
        with open_exit(ForwardFlags(defer_moe_finalize=True)):
            assert get_forward().defer_moe_finalize
            assert not get_forward().fuse_mlp_allreduce
        assert get_forward() == SKIP
    assert get_forward() == ForwardFlags()
    with pytest.raises(KeyError), open_exit(SKIP):
        raise KeyError
    assert get_forward() == ForwardFlags()


def test_finish_refuses_a_failed_computation() -> None:
    scope = open_exit(SKIP)
    with pytest.raises(ZeroDivisionError), scope:
        raise ZeroDivisionError
    with pytest.raises(StreamError, match="this exit is failed"):
        scope.finish(rows(1))


@pytest.mark.parametrize("when", ["before", "inside", "twice"])
def test_finish_comes_once_after_the_scope(when: str) -> None:
    scope = open_exit(SKIP)
    if when == "before":
        with pytest.raises(StreamError, match="this exit is new"):
            scope.finish(rows(1))
        return
    with scope:
        if when == "inside":
            with pytest.raises(StreamError, match="this exit is open"):
                scope.finish(rows(1))
    scope.finish(rows(1))
    with pytest.raises(StreamError, match="this exit is finished"):
        scope.finish(rows(1))


def test_one_rank_publishes_no_flag() -> None:  # boundary G49 (tp == 1)
    fb, _, h = entered(rows(5))
    _, ffn = layer()
    ffn.prepare(h, fb)
    with ffn.exit(fb) as output:
        assert get_forward() == ForwardFlags()
    assert isinstance(output.finish(rows(6)), torch.Tensor)


def test_each_kind_publishes_its_own_way() -> None:
    fb, attn, h = entered(rows(5))
    _, ffn = layer()
    with pytest.raises(StreamError, match="PARTIAL stage publishes through finish"):
        attn.exit(fb)
    ffn.prepare(h, fb)
    with pytest.raises(StreamError, match="SCOPED stage publishes through exit"):
        ffn.finish(rows(6), fb)


def test_a_scoped_mixer_uses_an_exit() -> None:  # boundary G54 (one rank)
    (mixer,) = make_stages((declare_attn(reduction=ProducerReduction.SCOPED), norm()))
    fb, _, _ = entered(rows(5))
    batch.start(fb)
    mixer.prepare(rows(0), fb)
    with mixer.exit(fb) as output:
        assert not output.skips_reduction
    assert isinstance(output.finish(rows(1)), torch.Tensor)


def test_an_output_left_before_any_input_is_refused() -> None:
    attn, ffn = layer()
    fb, _, _ = entered(rows(5))
    batch.start(fb)
    with pytest.raises(StreamError, match="prepare its input"):
        attn.finish(rows(1), fb)
    with ffn.exit(fb) as output:
        pass
    with pytest.raises(StreamError, match="prepare its input"):
        output.finish(rows(1))


def test_a_pending_output_is_never_dropped_by_a_stage_that_expects_none() -> None:
    fb, _, h = entered(rows(5))
    (entry,) = make_stages((declare_attn(), norm()))
    with pytest.raises(StreamError, match="the actual producer as previous"):
        entry.prepare(h, fb)
