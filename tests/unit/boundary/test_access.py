"""What an attention's prepare offers besides its input, and what an FFN's refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from layline.boundary import declare_attn, declare_ffn, make_stages
from layline.boundary.residual import LayerResidual, batch
from layline.boundary.residual.add_norm import PlainRead, PlainUpdate
from layline.errors import StreamError
from support.one_rank import HIDDEN, entered, forward_batch, layer, norm, owing, rows


class Collector:
    """Keeps every value that it is given, and how."""

    def __init__(self) -> None:
        self.values: list[torch.Tensor] = []
        self.owned: list[bool] = []

    def capture(self, value: torch.Tensor, *, owned: bool = False) -> None:
        self.values.append(value if owned else value.clone())
        self.owned.append(owned)


def after_ffn() -> tuple[Any, Any, Any, torch.Tensor]:
    """A second layer's boundaries, and a batch whose FFN has left rows(6) on rows(0) + rows(5)."""
    fb, _, h = entered(rows(5))
    _, ffn = layer()
    ffn.prepare(h, fb)
    with ffn.exit(fb) as output:
        pass
    h = output.finish(rows(6))
    return fb, layer(previous=True), h, rows(0) + rows(5)


@pytest.mark.parametrize(
    "option", ["capture_output", "captured_last_layer_outputs", "post_residual_addition"]
)
def test_an_ffn_prepare_takes_no_capture(option: str) -> None:  # boundary G73
    fb, _, h = entered(rows(5))
    _, ffn = layer()
    with pytest.raises(StreamError, match="an ffn's prepare"):
        ffn.prepare(h, fb, **{option: Collector()})
    ffn.prepare(h, fb)


def test_a_capture_shows_the_updated_residual() -> None:  # boundary G73, G74, G76
    fb, (attn, _), h, residual = after_ffn()
    near, far = Collector(), Collector()
    x = attn.prepare(h, fb, capture_output=near.capture, captured_last_layer_outputs=far)
    for collector in (near, far):
        torch.testing.assert_close(collector.values, [residual + rows(6)])
    fb, (attn, _), h, _ = after_ffn()
    assert torch.equal(attn.prepare(h, fb), x)


def test_a_capture_at_the_entry_shows_the_input_before_enter() -> None:  # boundary G73
    class Shifting(PlainRead):
        def enter(self, hidden: Any) -> Any:
            return hidden + 100

    attn, _ = layer(residual=LayerResidual(read=Shifting(), update=PlainUpdate()))
    fb = forward_batch()
    batch.start(fb)
    collector = Collector()
    attn.prepare(rows(0), fb, capture_output=collector.capture)
    torch.testing.assert_close(collector.values, [rows(0)])
    assert collector.owned == [False]


def test_an_addition_comes_after_what_is_captured() -> None:  # boundary G73, G75
    fb, (attn, _), h, residual = after_ffn()
    collector = Collector()
    x = attn.prepare(h, fb, capture_output=collector.capture, post_residual_addition=rows(7))
    torch.testing.assert_close(collector.values, [residual + rows(6)])
    assert collector.owned == [True]
    torch.testing.assert_close(fb.residual_stream.residual, residual + rows(6) + rows(7))
    torch.testing.assert_close(x, norm(1)(residual + rows(6) + rows(7)))
    batch.start(fb)
    with pytest.raises(StreamError, match="needs a pending output"):
        layer()[0].prepare(rows(0), fb, post_residual_addition=rows(7))


def test_the_next_local_stage_certifies_the_residual() -> None:  # boundary G75
    """Owned is what the following stage's read leaves alone; across layers nobody vouches."""
    writes = LayerResidual(read=PlainRead(keeps_residual=False), update=PlainUpdate())
    for stages, wanted in (
        ((declare_attn(), declare_ffn()), True),
        ((declare_attn(), declare_ffn(residual=writes)), False),
        ((declare_attn(),), False),
    ):
        fb, _, h, _ = after_ffn()
        attn = make_stages(*((stage, norm(1)) for stage in stages), previous=declare_ffn())[0]
        collector = Collector()
        attn.prepare(h, fb, capture_output=collector.capture)
        assert collector.owned == [wanted]


def test_capture_output_completes_dynamic_work_only() -> None:  # boundary G67
    (ffn,) = make_stages((declare_ffn(), norm()))
    for declared in (False, True):
        done: list[int] = []

        def complete(value: torch.Tensor, done: list[int] = done) -> torch.Tensor:
            done.append(1)
            return value * 4

        fb, h = owing(rows(5), complete, declared=declared)
        handle, shown = ffn.capture_output(h, fb)
        torch.testing.assert_close(shown, rows(0) + 4 * rows(5))
        assert (handle is h) is declared
        assert len(done) == 1
        assert (fb.residual_stream.contribution.owed is None) is not declared
        shown.zero_()
        folded = batch.fold(handle, fb)
        torch.testing.assert_close(folded, rows(0) + 4 * rows(5))
        assert len(done) == (2 if declared else 1)


def test_a_snapshot_finishes_a_copy() -> None:  # boundary G66
    """The main contribution keeps its sum and its value, though a sum uses its input up."""

    def complete(value: torch.Tensor) -> torch.Tensor:
        total = value * 4
        value.fill_(float("nan"))
        return total

    fb, h = owing(rows(5), complete)
    shown = batch.snapshot(h, fb)
    assert fb.residual_stream.contribution.owed is not None
    shown.zero_()
    torch.testing.assert_close(batch.norm(h, fb, norm()), norm()(rows(0) + 4 * rows(5)))
    fb, _, h = entered(rows(5))
    folded = batch.fold(h, fb)
    shown = batch.snapshot(folded, fb)
    assert shown is not folded
    assert shown.data_ptr() != folded.data_ptr()
    torch.testing.assert_close(shown, rows(0) + rows(5))


def test_an_addition_waits_for_the_sum() -> None:  # boundary G70
    """Added after it, once, and not four times as it would be before it."""
    fb, h = owing(rows(5), lambda value: value * 4)
    h = batch.add_to_output(h, fb, rows(9))
    torch.testing.assert_close(batch.fold(h, fb), rows(0) + 4 * rows(5) + rows(9))
    with pytest.raises(StreamError, match="no stage output is pending"):
        batch.add_to_output(fb.residual_stream.residual, fb, rows(9))


@pytest.mark.parametrize("count", [0, 3])
def test_the_final_capture_fires_on_an_empty_batch_too(count: int) -> None:
    # boundary G71, G72
    fb, h = owing(rows(5, count), lambda value: value * 4)
    collector = Collector()
    batch.norm(h, fb, norm(), skip_empty=True, capture_output=collector.capture)
    assert collector.owned == [False]
    assert collector.values[0].shape == (count, HIDDEN)
