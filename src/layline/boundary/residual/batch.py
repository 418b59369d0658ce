"""The model's side of the residual stream: start it, leave it, look at it, add to it.

Every helper takes the value the last boundary call returned and the forward batch. Keep what it
returns: the value passed in is no longer valid. A helper that finishes owed work is collective:
every rank of the group calls it.
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
PLAIN_FOLD = "fold requires a plain residual update"


def stream_of(forward_batch: BatchState) -> ResidualStream:
    """The batch's stream. Raises StreamError before :func:`start`."""
    stream: ResidualStream | None = forward_batch.residual_stream
    if stream is None:
        raise StreamError(NOT_STARTED)
    return stream


def start(forward_batch: BatchState, *, partial: bool = False) -> None:
    """Give the batch a fresh stream; whatever an earlier one held is dropped.

    ``partial`` says that the value which enters the stack is an unfinished sum over TP, as an
    embedding leaves it in an input-scattered batch.
    """
    forward_batch.residual_stream = ResidualStream(partial=partial)


def norm(
    hidden_states: Any,
    forward_batch: BatchState,
    layernorm: Any,
    *,
    skip_empty: bool = False,
    capture_output: Callable[..., None] | None = None,
) -> Any:
    """Leave the stack: finish owed work, apply the update, normalise; the stream is released.

    The result is on attention rows. With ``skip_empty`` a batch of zero rows still finishes owed
    work and skips only the norm. ``capture_output(value, owned=False)`` receives the updated
    residual, which it must copy.
    """
    stream = _entered(forward_batch)
    rows = forward_batch.rows
    hidden_states = stream.complete(hidden_states, rows)
    contribution = stream.take(hidden_states)
    residual = stream.residual
    forward_batch.residual_stream = None
    if contribution is not None:
        residual = contribution.residual_on_rows(residual, rows)
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
    return normed if contribution is None else contribution.returned(normed, rows)


def take_output(hidden_states: Any, forward_batch: BatchState) -> Any:
    """Leave the stack with the residual itself. Raises StreamError while an update is pending."""
    stream = _entered(forward_batch)
    if stream.state is StreamState.PENDING:
        raise StreamError(STILL_PENDING)
    stream.check(hidden_states)
    forward_batch.residual_stream = None
    return stream.residual


def to_pp(hidden_states: Any, forward_batch: BatchState) -> dict[str, Any]:
    """Leave this pipeline stage: the tensors for the next one's ``from_pp``.

    Work that was left for this batch is finished first; a sum left by contract stays partial, and
    the receiver completes it. Gives ``hidden_states`` and, unless the stream is written,
    ``residual``. Raises BoundaryUnsupportedError for a pending update that is not plain.
    """
    stream = _entered(forward_batch)
    contribution = stream.contribution
    if contribution is not None and contribution.owed and not contribution.owed.declared:
        hidden_states = stream.complete(hidden_states, forward_batch.rows)
    contribution = stream.take(hidden_states)
    residual = stream.residual
    if contribution is None:
        forward_batch.residual_stream = None
        return {"hidden_states": residual}
    if not contribution.update.plain:
        raise BoundaryUnsupportedError(
            f"to_pp has no path for a pending {type(contribution.update).__name__}; expected a "
            "plain update, or one applied at the producer"
        )
    # The receiver knows the rows of the output, not of a residual that stayed where it was.
    residual = contribution.residual_on_rows(residual, forward_batch.rows)
    forward_batch.residual_stream = None
    return {"hidden_states": contribution.value, "residual": residual}


def complete_output(hidden_states: Any, forward_batch: BatchState) -> Any:
    """Finish outstanding communication; the residual update stays pending."""
    return stream_of(forward_batch).complete(hidden_states, forward_batch.rows)


def fold(hidden_states: Any, forward_batch: BatchState) -> Any:
    """Complete a plain contribution, add it to the residual, and leave a written stream.

    Raises BoundaryUnsupportedError for an update that is not plain.
    """
    stream = _entered(forward_batch)
    pending = stream.contribution
    if pending is not None and not pending.update.plain:
        raise BoundaryUnsupportedError(PLAIN_FOLD)
    contribution = stream.take(stream.complete(hidden_states, forward_batch.rows))
    if contribution is None:
        return stream.write(stream.residual)
    residual = contribution.residual_on_rows(stream.residual, forward_batch.rows)
    updated = contribution.update.apply(contribution.value, residual)
    if contribution.after_norm:
        # The stack ends here: no stage follows that would know which rows these are.
        return stream.write(contribution.returned(updated, forward_batch.rows))
    return stream.write(updated, contribution.rows)


def written(hidden_states: Any, forward_batch: BatchState) -> Any:
    """Make ``hidden_states`` the written residual; anything pending is dropped."""
    stream = stream_of(forward_batch)
    pending = stream.contribution
    return stream.write(hidden_states, None if pending is None else pending.rows)


def snapshot(hidden_states: Any, forward_batch: BatchState) -> Any:
    """An owned copy of the residual as it will be; the main contribution is left as it is.

    Raises BoundaryUnsupportedError for an update that is not plain.
    """
    stream = _entered(forward_batch)
    stream.check(hidden_states)
    contribution = stream.contribution
    if contribution is None:
        return stream.residual.clone()
    if not contribution.update.plain:
        raise BoundaryUnsupportedError(PLAIN_SNAPSHOT)
    value = contribution.value
    if contribution.owed is not None:
        value = contribution.owed.complete(value.clone(), forward_batch.rows)
    residual = contribution.residual_on_rows(stream.residual, forward_batch.rows)
    return contribution.update.apply(value, residual)


def add_to_output(hidden_states: Any, forward_batch: BatchState, extra: Any) -> Any:
    """Complete the pending contribution and add ``extra`` to it once; the update stays pending.

    ``extra`` is [tokens, hidden] on the contribution's rows, the same on every rank that has them.
    """
    stream = _entered(forward_batch)
    contribution = stream.take(stream.complete(hidden_states, forward_batch.rows))
    if contribution is None:
        raise StreamError("no stage output is pending; add to the output of a stage")
    contribution.value = contribution.value + extra
    return stream.leave(contribution)


def _entered(forward_batch: BatchState) -> ResidualStream:
    stream = stream_of(forward_batch)
    if stream.state is StreamState.INITIAL:
        raise StreamError("no stage has run on this residual stream; nothing to leave with")
    return stream
