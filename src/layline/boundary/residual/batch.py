"""The model's side of the residual stream: start it, leave it, look at it, add to it.

Every helper takes the value the last boundary call returned and the forward batch. Keep what it
returns: the value passed in is no longer valid.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from layline.boundary.contracts import BatchState
from layline.boundary.residual.stream import (
    NOT_STARTED,
    STILL_PENDING,
    ResidualStream,
    StreamState,
)
from layline.errors import BoundaryUnsupportedError, StreamError

PLAIN_SNAPSHOT = "snapshot requires a plain residual update"


def stream_of(forward_batch: BatchState) -> ResidualStream:
    """The batch's stream. Raises StreamError before :func:`start`."""
    stream: ResidualStream | None = forward_batch.residual_stream
    if stream is None:
        raise StreamError(NOT_STARTED)
    return stream


def start(forward_batch: BatchState) -> None:
    """Give the batch a fresh stream; whatever an earlier one held is dropped."""
    forward_batch.residual_stream = ResidualStream()


def norm(
    hidden_states: Any,
    forward_batch: BatchState,
    layernorm: Any,
    *,
    skip_empty: bool = False,
    capture_output: Callable[..., None] | None = None,
) -> Any:
    """Leave the stack: finish owed work, apply the update, normalise; the stream is released.

    With ``skip_empty`` a batch of zero rows still finishes owed work and skips only the norm.
    ``capture_output(value, owned=False)`` receives the updated residual, which it must copy.
    """
    stream = _entered(forward_batch)
    hidden_states = stream.complete(hidden_states)
    contribution = stream.take(hidden_states)
    residual = stream.residual
    forward_batch.residual_stream = None
    if contribution is None:
        normed, updated = residual, residual
        if not (skip_empty and residual.shape[0] == 0):
            normed = layernorm(residual)
    elif skip_empty and contribution.value.shape[0] == 0:
        normed = updated = contribution.value
    elif contribution.update.plain:
        normed, updated = layernorm.add_norm(contribution.value, residual)
    else:
        updated = contribution.update.apply(contribution.value, residual)
        normed = layernorm(updated)
    if capture_output is not None:
        capture_output(updated, owned=False)
    return normed


def take_output(hidden_states: Any, forward_batch: BatchState) -> Any:
    """Leave the stack with the residual itself. Raises StreamError while an update is pending."""
    stream = _entered(forward_batch)
    if stream.state is StreamState.PENDING:
        raise StreamError(STILL_PENDING)
    stream.check(hidden_states)
    forward_batch.residual_stream = None
    return stream.residual


def complete_output(hidden_states: Any, forward_batch: BatchState) -> Any:
    """Finish outstanding communication; the residual update stays pending."""
    return stream_of(forward_batch).complete(hidden_states)


def fold(hidden_states: Any, forward_batch: BatchState) -> Any:
    """Complete a plain contribution, add it to the residual, and leave a written stream."""
    stream = _entered(forward_batch)
    contribution = stream.take(stream.complete(hidden_states))
    if contribution is None:
        return stream.write(stream.residual)
    return stream.write(contribution.update.apply(contribution.value, stream.residual))


def written(hidden_states: Any, forward_batch: BatchState) -> Any:
    """Make ``hidden_states`` the written residual; anything pending is dropped."""
    return stream_of(forward_batch).write(hidden_states)


def snapshot(hidden_states: Any, forward_batch: BatchState) -> Any:
    """An owned copy of the residual as it will be; the main contribution is left as it is."""
    stream = _entered(forward_batch)
    stream.check(hidden_states)
    contribution = stream.contribution
    if contribution is None:
        return stream.residual.clone()
    if not contribution.update.plain:
        raise BoundaryUnsupportedError(PLAIN_SNAPSHOT)
    value = contribution.value
    if contribution.owed is not None:
        value = contribution.owed.complete(value.clone())
    return contribution.update.apply(value, stream.residual)


def add_to_output(hidden_states: Any, forward_batch: BatchState, extra: Any) -> Any:
    """Complete the pending contribution and add ``extra`` to it once; the update stays pending."""
    stream = _entered(forward_batch)
    contribution = stream.take(stream.complete(hidden_states))
    if contribution is None:
        raise StreamError("no stage output is pending; add to the output of a stage")
    return stream.leave(contribution.value + extra, contribution.update)


def _entered(forward_batch: BatchState) -> ResidualStream:
    stream = stream_of(forward_batch)
    if stream.state is StreamState.INITIAL:
        raise StreamError("no stage has run on this residual stream; nothing to leave with")
    return stream
