"""The residual stream: states, identity, errors, and the helpers around it."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from layline.boundary.residual import LayerResidual, batch
from layline.boundary.residual.add_norm import PlainRead, PlainUpdate
from layline.boundary.residual.stream import OwedOutput, StreamState
from layline.errors import StreamError
from support.one_rank import HIDDEN, Doubling, entered, forward_batch, layer, norm, owing, rows


class Counting(PlainUpdate):
    """residual + 3 x output, and a note of each application."""

    calls: Any

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def apply(self, output: Any, residual: Any) -> Any:
        self.calls.append("applied")
        return residual + 3 * output


def test_three_states_and_their_transitions() -> None:  # boundary G55
    attn, ffn = layer()
    fb = forward_batch()
    batch.start(fb)
    stream = fb.residual_stream
    assert stream.state is StreamState.INITIAL
    x = attn.prepare(rows(0), fb)
    assert stream.state is StreamState.WRITTEN
    h = attn.finish(x * 2, fb)
    assert stream.state is StreamState.PENDING
    ffn.prepare(h, fb)
    assert stream.state is StreamState.WRITTEN
    batch.start(fb)
    assert fb.residual_stream is not stream


def test_values_follow_a_plain_transformer_layer() -> None:
    attn, ffn = layer()
    fb = forward_batch()
    batch.start(fb)
    x0 = rows(0)
    a = attn.prepare(x0, fb)
    torch.testing.assert_close(a, norm(1)(x0))
    h = attn.finish(rows(5), fb)
    f = ffn.prepare(h, fb)
    x1 = x0 + rows(5)
    torch.testing.assert_close(f, norm(2)(x1))
    with ffn.exit(fb) as output:
        y = rows(6)
    h = output.finish(y)
    torch.testing.assert_close(batch.norm(h, fb, norm(3)), norm(3)(x1 + rows(6)))


@pytest.mark.parametrize("use", ["prepare", "complete", "norm", "fold", "snapshot"])
def test_another_object_is_refused(use: str) -> None:  # boundary G56
    fb, _, h = entered(rows(5))
    _, ffn = layer()
    calls = {
        "prepare": lambda value: ffn.prepare(value, fb),
        "complete": lambda value: batch.complete_output(value, fb),
        "norm": lambda value: batch.norm(value, fb, norm()),
        "fold": lambda value: batch.fold(value, fb),
        "snapshot": lambda value: batch.snapshot(value, fb),
    }
    text = (
        "output does not belong to this residual stream; "
        "change layer outputs through boundary accessors"
    )
    with pytest.raises(RuntimeError, match=text):
        calls[use](h.clone())
    other, _, theirs = entered(rows(6))
    assert other is not fb
    with pytest.raises(RuntimeError, match=text):
        calls[use](theirs)
    h.mul_(2)  # Same object: an in-place edit is not detected.
    calls[use](h)


def test_an_owed_output_is_no_tensor() -> None:  # boundary G57
    _, handle = owing(rows(1), lambda value: value * 4)
    assert isinstance(handle, OwedOutput)
    assert not isinstance(handle, torch.Tensor)
    for operation in (lambda h: h + 1, lambda h: h[0], lambda h: h.shape, torch.relu):
        with pytest.raises((TypeError, AttributeError)):
            operation(handle)


def test_using_a_stage_before_start() -> None:  # boundary G58
    attn, ffn = layer()
    fb = forward_batch()
    text = "start the layer stack before entering a stage"
    for call in (
        lambda: attn.prepare(rows(0), fb),
        lambda: attn.finish(rows(0), fb),
        lambda: ffn.exit(fb),
        lambda: batch.norm(rows(0), fb, norm()),
        lambda: batch.take_output(rows(0), fb),
    ):
        with pytest.raises(RuntimeError, match=text):
            call()


def test_a_pending_contribution_is_not_replaced() -> None:  # boundary G59
    fb, attn, _ = entered(rows(5))
    with pytest.raises(StreamError, match="must not be replaced"):
        attn.finish(rows(6), fb)


def test_a_consumed_handle_is_stale() -> None:  # boundary G60
    fb, _, h = entered(rows(5))
    _, ffn = layer()
    ffn.prepare(h, fb)
    with pytest.raises(StreamError, match="does not belong"):
        ffn.prepare(h, fb)


def test_a_written_stream_skips_enter() -> None:  # boundary G61
    class Shifting(PlainRead):
        def enter(self, hidden: Any) -> Any:
            return hidden + 100

    attn, _ = layer(residual=LayerResidual(read=Shifting(), update=PlainUpdate()))
    fb = forward_batch()
    batch.start(fb)
    torch.testing.assert_close(attn.prepare(rows(0), fb), norm(1)(rows(0) + 100))
    batch.start(fb)
    h = batch.written(rows(0), fb)
    torch.testing.assert_close(attn.prepare(h, fb), norm(1)(rows(0)))


def test_the_travelling_update_is_applied_once_after_completion() -> None:  # boundary G62
    """The update that came with the output, not an equal one the stage was made with."""
    declared, travelling = Doubling(plain=False), Counting(plain=False)
    _, ffn = layer(residual=LayerResidual(read=PlainRead(), update=declared))
    calls: list[str] = []

    def complete(value: torch.Tensor) -> torch.Tensor:
        calls.append("completed")
        return value * 4

    travelling.calls = calls
    fb, handle = owing(rows(5), complete, update=travelling)
    out = ffn.prepare(handle, fb)
    torch.testing.assert_close(out, norm(2)(rows(0) + 12 * rows(5)))
    assert calls == ["completed", "applied"]


@pytest.mark.parametrize("changes", [{"plain": False}, {"at_producer": True}])
def test_an_update_of_other_capabilities_is_refused_first(changes: Any) -> None:  # boundary G62
    """Before anything is completed: other ranks must not be left waiting in a sum."""
    _, ffn = layer()

    def complete(value: torch.Tensor) -> torch.Tensor:
        raise AssertionError("communicated before the update was checked")

    fb, handle = owing(rows(5), complete, update=Doubling(**changes))
    with pytest.raises(StreamError, match=r"pending update is Doubling .* declares PlainUpdate"):
        ffn.prepare(handle, fb)


def test_an_update_at_the_producer_writes_the_stream() -> None:  # boundary G63
    update = Doubling(plain=False, at_producer=True)
    attn, ffn = layer(residual=LayerResidual(read=PlainRead(), update=update))
    fb = forward_batch()
    batch.start(fb)
    attn.prepare(rows(0), fb)
    h = attn.finish(rows(5), fb)
    assert fb.residual_stream.state is StreamState.WRITTEN
    torch.testing.assert_close(h, rows(0) + 2 * rows(5))
    torch.testing.assert_close(ffn.prepare(h, fb), norm(2)(rows(0) + 2 * rows(5)))


def test_leaving_keeps_no_stream_and_no_layer_buffer() -> None:  # boundary G14, G65
    def buffers() -> tuple[Any, Any, list[weakref.ref[torch.Tensor]]]:
        fb, attn, h = entered(rows(5))
        held = [weakref.ref(h), weakref.ref(fb.residual_stream.residual)]
        return fb, (attn, h), held

    fb, (attn, h), held = buffers()
    normed = batch.norm(h, fb, norm())
    assert fb.residual_stream is None
    del h
    gc.collect()
    assert [ref() for ref in held] == [None, None], "a layer buffer outlives norm()"
    assert normed.shape == (3, HIDDEN)

    fb, (attn, h), held = buffers()
    batch.start(fb)
    del h
    gc.collect()
    assert [ref() for ref in held] == [None, None], "start() keeps the stream before it"
    assert attn.declaration is not None


def test_snapshot_is_owned_and_leaves_the_main_output() -> None:  # boundary G66
    fb, _, h = entered(rows(5))
    copy = batch.snapshot(h, fb)
    torch.testing.assert_close(copy, rows(0) + rows(5))
    copy.zero_()
    assert fb.residual_stream.state is StreamState.PENDING
    torch.testing.assert_close(batch.norm(h, fb, norm()), norm()(rows(0) + rows(5)))
    attn, _ = layer(residual=LayerResidual(read=PlainRead(), update=Doubling(plain=False)))
    batch.start(fb)
    attn.prepare(rows(0), fb)
    h = attn.finish(rows(5), fb)
    with pytest.raises(NotImplementedError, match=r"^snapshot requires a plain residual update$"):
        batch.snapshot(h, fb)


def test_complete_output_is_idempotent() -> None:  # boundary G68
    fb, h = owing(rows(5), lambda value: value * 4)
    done = batch.complete_output(h, fb)
    torch.testing.assert_close(done, rows(5) * 4)
    assert batch.complete_output(done, fb) is done
    assert fb.residual_stream.state is StreamState.PENDING
    torch.testing.assert_close(fb.residual_stream.residual, rows(0))
    with pytest.raises(StreamError, match="does not belong"):
        batch.complete_output(h, fb)


def test_fold_written_and_take_output() -> None:  # boundary G69
    fb, _, h = entered(rows(5))
    with pytest.raises(
        RuntimeError, match=r"^write the residual update before taking the final output$"
    ):
        batch.take_output(h, fb)
    folded = batch.fold(h, fb)
    torch.testing.assert_close(folded, rows(0) + rows(5))
    assert fb.residual_stream.state is StreamState.WRITTEN
    assert batch.take_output(folded, fb) is folded
    assert fb.residual_stream is None
    fb, _, _ = entered(rows(5))
    mine = rows(8)
    assert batch.take_output(batch.written(mine, fb), fb) is mine


def test_add_to_output_adds_once_and_stays_pending() -> None:  # boundary G70
    fb, _, h = entered(rows(5))
    h = batch.add_to_output(h, fb, rows(9))
    assert fb.residual_stream.state is StreamState.PENDING
    torch.testing.assert_close(batch.fold(h, fb), rows(0) + rows(5) + rows(9))


def test_norm_on_an_empty_batch_completes_but_skips_the_norm() -> None:  # boundary G71
    class Refusing:
        def __call__(self, x: Any) -> Any:
            raise AssertionError("the norm ran on zero rows")

        add_norm = __call__

    done: list[int] = []

    def complete(value: torch.Tensor) -> torch.Tensor:
        done.append(len(value))
        return value

    fb, h = owing(rows(1, 0), complete)
    out = batch.norm(h, fb, Refusing(), skip_empty=True)
    assert out.shape == (0, HIDDEN)
    assert done == [0]


def test_final_capture_is_the_norm_kernels_residual_and_borrowed() -> None:  # boundary G72
    captured: list[tuple[torch.Tensor, bool]] = []

    def capture(value: torch.Tensor, *, owned: bool = False) -> None:
        captured.append((value.clone(), owned))

    fb, _, h = entered(rows(5))
    batch.norm(h, fb, norm(), capture_output=capture)
    ((value, owned),) = captured
    torch.testing.assert_close(value, norm().add_norm(rows(5), rows(0))[1])
    assert owned is False


def test_leaving_an_initial_stream_is_refused() -> None:
    fb = forward_batch()
    batch.start(fb)
    with pytest.raises(StreamError, match="nothing to leave with"):
        batch.norm(rows(0), fb, norm())
