"""The object a model calls: prepare the input, then finish or exit with the output."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from layline.boundary.adapters.attention import latent_context
from layline.boundary.construction import BoundPath, BoundStage
from layline.boundary.contracts import BatchState, ProducerReduction, StageDeclaration, StageKind
from layline.boundary.exit import BoundExit, FfnExit, MixerExit, StageExit
from layline.boundary.mesh import Mesh
from layline.boundary.ops import Step, Transit
from layline.boundary.planning.stage import StagePlan, no_path
from layline.boundary.prepare import BoundPrepare, capture_entry, run_capture
from layline.boundary.residual.batch import snapshot, stream_of
from layline.boundary.residual.stream import NOT_STARTED, Contribution, ResidualStream
from layline.boundary.rows import BatchKind
from layline.errors import BoundaryUnsupportedError, StreamError


class StageBoundary:
    """One stage's entry and exit. Holds the plan and the norm, never a forward tensor."""

    __slots__ = (
        "_exit_type",
        "_latent",
        "_mesh",
        "_norm",
        "_partial",
        "_paths",
        "_plan",
        "_read",
        "_tally",
        "_update",
    )

    def __init__(
        self,
        stage: BoundStage,
        norm: Any,
        mesh: Mesh,
        qkv_latent_func: Callable[[Any], Any] | None = None,
    ) -> None:
        self._mesh = mesh
        self._latent = qkv_latent_func
        self._plan = stage.plan
        self._paths = stage.paths
        self._norm = norm
        declaration = stage.plan.declaration
        self._read = declaration.read
        self._update = declaration.update
        is_ffn = declaration.kind is StageKind.FFN
        self._exit_type: type[StageExit] = FfnExit if is_ffn else MixerExit
        self._partial = declaration.reduction is ProducerReduction.PARTIAL
        self._tally = None if mesh.is_single else mesh.tally

    @property
    def declaration(self) -> StageDeclaration:
        """The declaration this boundary was made from, with its source."""
        return self._plan.declaration

    @property
    def plan(self) -> StagePlan:
        """The planned paths, for printing and checking."""
        return self._plan

    def prepare(
        self,
        hidden_states: Any,
        forward_batch: BatchState,
        *,
        capture_output: Callable[..., None] | None = None,
        captured_last_layer_outputs: Any = None,
        post_residual_addition: Any = None,
    ) -> Any:
        """Complete, update and read: the stage's compute input, [tokens, hidden].

        ``capture_output(value, owned=...)`` receives the updated residual on the producer's rows,
        at the stack's entry the input itself; ``captured_last_layer_outputs.capture`` receives it
        on the rows that attention computes on. ``post_residual_addition``, on the pending output's
        rows, is added to the residual after the update; a capture shows the residual before it.
        All three are an attention's. A stage with a ``qkv_latent_func`` leaves its AttnTpContext
        on the batch. Every rank of the mesh makes the call with the same arguments given.

        Raises StreamError when the stack was not started or ``hidden_states`` is not what the last
        boundary call returned, BoundaryUnsupportedError for a batch variant without a path.
        """
        if (
            capture_output is None
            and captured_last_layer_outputs is None
            and post_residual_addition is None
        ):
            stream, bound, transit, steps = self._arrive(hidden_states, forward_batch)
            return self._run(forward_batch, stream, bound, transit, steps)
        self._require_attention()
        stream = stream_of(forward_batch)
        self._check(stream, forward_batch.kind)
        entering = stream.residual is None
        contribution = stream.contribution
        hidden_states = stream.complete(hidden_states, forward_batch.rows)
        stream, bound, transit, steps = self._arrive(hidden_states, forward_batch)
        if capture_output is not None and entering:
            capture_entry(capture_output, bound, transit, partial=stream.partial)
            capture_output = None
        if post_residual_addition is not None:
            capture_output = _add_after(
                transit, contribution, post_residual_addition, capture_output
            )
        prepared = self._run(forward_batch, stream, bound, transit, steps)
        _capture(bound, transit, capture_output, captured_last_layer_outputs)
        return prepared

    def _arrive(
        self, hidden_states: Any, forward_batch: BatchState
    ) -> tuple[ResidualStream, BoundPrepare, Transit, tuple[Step, ...]]:
        """Take what the producer left, and pick the steps for it; nothing has run yet."""
        stream: ResidualStream | None = forward_batch.residual_stream
        if stream is None:
            raise StreamError(NOT_STARTED)
        path = self._paths.get(forward_batch.kind)
        if path is None:
            raise no_path(forward_batch.kind)
        bound = path.prepare_from(stream.residual_rows)
        contribution = stream.peek(hidden_states)
        transit = Transit(
            forward_batch.rows, hidden_states, stream.residual, None, self._read, self._norm
        )
        # What is refused here stays pending: only a contribution that has its steps is taken.
        steps = bound.pick(stream, contribution, transit)
        stream.release()
        return stream, bound, transit, steps

    def _check(self, stream: ResidualStream, kind: BatchKind) -> None:
        """Raise what :meth:`prepare` would refuse, before anything communicates."""
        bound = self._path(kind).prepare_from(stream.residual_rows)
        bound.pick(stream, stream.contribution, Transit(None, None))

    def _run(
        self,
        forward_batch: BatchState,
        stream: ResidualStream,
        bound: BoundPrepare,
        transit: Transit,
        steps: tuple[Step, ...],
    ) -> Any:
        for step in steps:
            step(transit)
        stream.residual = transit.residual
        stream.residual_rows = bound.residual_rows
        if self._tally is not None:
            stream.sums = self._tally.reductions
        if self._latent is not None:
            forward_batch.attn_tp_context = latent_context(
                self._latent, forward_batch.kind, forward_batch.rows, self._mesh
            )
        return transit.input

    def finish(self, hidden_states: Any, forward_batch: BatchState) -> Any:
        """Record the output of a stage whose compute never reduces (PARTIAL).

        Raises StreamError when compute did reduce, or when an output is already pending.
        """
        if not self._partial:
            raise StreamError("a SCOPED stage publishes through exit(), not finish()")
        stream = stream_of(forward_batch)
        exit_ = self._decide(forward_batch)
        return exit_.finish(stream, self._update, hidden_states, forward_batch.rows)

    def exit(self, forward_batch: BatchState) -> StageExit:
        """The scope to compute in; call ``finish`` on it afterwards. The decision falls here."""
        if self._partial:
            raise StreamError("a PARTIAL stage publishes through finish(), not exit()")
        stream = stream_of(forward_batch)
        exit_ = self._decide(forward_batch)
        return self._exit_type(stream, self._update, exit_, forward_batch.rows)

    def capture_output(self, hidden_states: Any, forward_batch: BatchState) -> tuple[Any, Any]:
        """``(handle, snapshot)`` of the residual as it will be once the output is added.

        A sum that was left for this batch is completed on the output itself; a sum left by
        contract is completed on a copy, and stays owed.
        """
        stream = stream_of(forward_batch)
        contribution = stream.contribution
        if contribution is not None and contribution.owed and not contribution.owed.declared:
            hidden_states = stream.complete(hidden_states, forward_batch.rows)
        return hidden_states, snapshot(hidden_states, forward_batch)

    def from_pp(self, tensors: Mapping[str, Any], forward_batch: BatchState) -> Any:
        """Rebuild the stream from what :func:`residual.batch.to_pp` sent; returns its handle.

        ``tensors`` holds ``hidden_states`` and, unless the stream was written, ``residual``. A sum
        that the declared producer leaves by contract is declared again, and completed here.
        Raises StreamError for tensors that do not fit the declared producer.
        """
        arriving = self._path(forward_batch.kind).arriving
        if arriving is None:
            raise StreamError("from_pp needs a producer; give make_stages it as previous")
        path = self._path(forward_batch.kind)
        stream = ResidualStream()
        forward_batch.residual_stream = stream
        hidden, residual = tensors["hidden_states"], tensors.get("residual")
        if residual is None:
            return stream.write(hidden, arriving.rows)
        if arriving.writes:
            raise StreamError("a residual arrived beside an output that its producer has written")
        stream.residual, stream.residual_rows = residual, arriving.rows
        update = path.prepare.expected
        assert update is not None
        return stream.leave(
            Contribution(
                hidden,
                update,
                arriving.owed,
                arriving.rows,
                after_norm=arriving.after_norm,
            )
        )

    def _decide(self, forward_batch: BatchState) -> BoundExit:
        path = self._path(forward_batch.kind)
        rows = forward_batch.rows
        return path.with_tokens if rows is None or rows.tokens else path.without_tokens

    def _path(self, kind: BatchKind) -> BoundPath:
        path = self._paths.get(kind)
        if path is None:
            raise no_path(kind)
        return path

    def _require_attention(self) -> None:
        if self._plan.declaration.kind is not StageKind.ATTN:
            raise StreamError(
                "an ffn's prepare() takes no capture_output, captured_last_layer_outputs or "
                "post_residual_addition; expected them at an attention's"
            )


def _add_after(
    transit: Transit,
    contribution: Contribution | None,
    addition: Any,
    capture: Callable[..., None] | None,
) -> Callable[..., None] | None:
    """Let ``addition`` join the residual; a capture sees the sum without it."""
    if contribution is None:
        raise StreamError("post_residual_addition needs a pending output to be added with")
    if not contribution.update.plain:
        raise BoundaryUnsupportedError("post_residual_addition requires a plain residual update")
    if addition.shape != transit.value.shape:
        raise StreamError(
            f"post_residual_addition has shape {list(addition.shape)}; expected "
            f"{list(transit.value.shape)}, the rows of the pending output"
        )
    if capture is not None:
        # A sum made for the capture alone: nothing else will write to it.
        residual = contribution.residual_on_rows(transit.residual, transit.rows)
        capture(contribution.update.apply(transit.value, residual), owned=True)
    transit.value = transit.value + addition
    return None


def _capture(
    bound: BoundPrepare,
    transit: Transit,
    capture_output: Callable[..., None] | None,
    captured_last_layer_outputs: Any,
) -> None:
    moves = bound.captures
    if capture_output is not None:
        owned = moves.allocates or moves.untouched
        run_capture(capture_output, moves.to_producer, transit, owned=owned)
    if captured_last_layer_outputs is not None:
        collect = captured_last_layer_outputs.capture
        run_capture(collect, moves.to_compute, transit, owned=False)
