"""Model-facing constructors: declare a stage, then assemble stages into boundaries.

A decoder layer reads::

    self.attn_boundary, self.ffn_boundary = make_stages(
        (declare_attn(), self.input_layernorm),
        (declare_ffn(), self.post_attention_layernorm),
        previous=declare_ffn() if layer_id != 0 else None,
        terminal=layer_id == config.num_layers - 1,
    )
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from layline.boundary.construction import build_plan
from layline.boundary.contracts import ProducerReduction, StageDeclaration, StageKind
from layline.boundary.residual import LayerResidual
from layline.boundary.residual.add_norm import PLAIN_RESIDUAL
from layline.boundary.stage import StageBoundary
from layline.errors import DeclarationError
from layline.topology import Topology

_ONE_RANK = Topology()


def declare_attn(
    *,
    reduction: ProducerReduction = ProducerReduction.PARTIAL,
    residual: LayerResidual = PLAIN_RESIDUAL,
) -> StageDeclaration:
    """Describe a token-mixing stage. Raises DeclarationError for a reduction FFNs alone have."""
    if reduction is ProducerReduction.LOCAL_TAIL:
        raise DeclarationError("LOCAL_TAIL is not supported for attention stages")
    return StageDeclaration(
        kind=StageKind.ATTN, reduction=reduction, read=residual.read, update=residual.update
    )


def declare_ffn(
    *,
    reduction: ProducerReduction = ProducerReduction.SCOPED,
    residual: LayerResidual = PLAIN_RESIDUAL,
) -> StageDeclaration:
    """Describe a feed-forward stage. Raises DeclarationError for PARTIAL, which is attention's."""
    if reduction is ProducerReduction.PARTIAL:
        raise DeclarationError("PARTIAL is not supported for ffn stages")
    return StageDeclaration(
        kind=StageKind.FFN, reduction=reduction, read=residual.read, update=residual.update
    )


def link_stages(
    *declarations: StageDeclaration,
    previous: StageDeclaration | None = None,
    terminal: bool = False,
) -> tuple[StageDeclaration, ...]:
    """Give each declaration its source, in order, and mark the last one if it ends the stack.

    The declarations passed in are not changed. Raises DeclarationError when one already carries a
    source or a terminal mark: those belong to the assembler.
    """
    if not declarations:
        raise DeclarationError("make_stages needs at least one (declaration, norm) item")
    linked: list[StageDeclaration] = []
    for index, declaration in enumerate(declarations):
        _require_declaration(declaration, f"stage {index}")
        if declaration.previous is not None or declaration.terminal:
            raise DeclarationError(
                f"stage {index} already carries previous or terminal; give them to make_stages"
            )
        last = index == len(declarations) - 1
        source = linked[-1] if linked else previous
        linked.append(replace(declaration, previous=source, terminal=terminal and last))
    if previous is not None:
        _require_declaration(previous, "previous")
    return tuple(linked)


def make_stages(
    *items: tuple[StageDeclaration, Any],
    previous: StageDeclaration | None = None,
    following: StageDeclaration | None = None,
    terminal: bool = False,
    topology: Topology = _ONE_RANK,
) -> tuple[StageBoundary, ...]:
    """Assemble local stages in order; returns one independent boundary per item.

    ``previous`` is the producer before the first stage (None at the stack's entry), ``following``
    the consumer after the last one (its own ``previous`` may be left out: it is the last stage
    here), ``terminal`` marks the end of the model's stack.
    """
    for index, item in enumerate(items):
        if not isinstance(item, tuple) or len(item) != 2:
            raise DeclarationError(f"stage {index} must be (declaration, norm), found {item!r}")
    linked = link_stages(*(item[0] for item in items), previous=previous, terminal=terminal)
    _require_consistent(linked[-1], following)
    return tuple(
        StageBoundary(build_plan(declaration, topology), norm)
        for declaration, (_, norm) in zip(linked, items, strict=True)
    )


def make_attn_stage(
    declaration: StageDeclaration,
    norm: Any,
    *,
    following: StageDeclaration | None = None,
    topology: Topology = _ONE_RANK,
) -> StageBoundary:
    """Bind one attention stage whose declaration carries its source."""
    return _make_stage(StageKind.ATTN, declaration, norm, following, topology)


def make_ffn_stage(
    declaration: StageDeclaration,
    norm: Any,
    *,
    following: StageDeclaration | None = None,
    topology: Topology = _ONE_RANK,
) -> StageBoundary:
    """Bind one feed-forward stage whose declaration carries its source."""
    return _make_stage(StageKind.FFN, declaration, norm, following, topology)


def _make_stage(
    kind: StageKind,
    declaration: StageDeclaration,
    norm: Any,
    following: StageDeclaration | None,
    topology: Topology,
) -> StageBoundary:
    _require_declaration(declaration, "declaration")
    if declaration.kind is not kind:
        raise DeclarationError(
            f"a {declaration.kind.value} declaration cannot make a stage of kind {kind.value}"
        )
    if following is not None and following.previous is None:
        raise DeclarationError("following must name this stage in its previous")
    _require_consistent(declaration, following)
    return StageBoundary(build_plan(declaration, topology), norm)


def _require_consistent(last: StageDeclaration, following: StageDeclaration | None) -> None:
    if following is None:
        return
    _require_declaration(following, "following")
    if following.previous is not None and following.previous != last:
        raise DeclarationError("following must name this stage in its previous")
    if last.terminal:
        raise DeclarationError("a terminal stage has no following stage")


def _require_declaration(value: object, name: str) -> None:
    if not isinstance(value, StageDeclaration):
        raise DeclarationError(
            f"{name} must be a StageDeclaration from declare_attn() or declare_ffn(), "
            f"found {type(value).__name__}"
        )
