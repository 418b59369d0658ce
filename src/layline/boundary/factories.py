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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from layline.boundary.construction import build_stage
from layline.boundary.contracts import (
    OutputTransform,
    ProducerReduction,
    StageDeclaration,
    StageKind,
)
from layline.boundary.mesh import Mesh
from layline.boundary.residual import LayerResidual
from layline.boundary.residual.add_norm import PLAIN_RESIDUAL
from layline.boundary.stage import StageBoundary
from layline.errors import DeclarationError, one_of

ATTENTION_OPTIONS = ("qkv_latent_func", "fusions")
FFN_OPTIONS = ("fusions",)


def declare_attn(
    *,
    reduction: ProducerReduction = ProducerReduction.PARTIAL,
    residual: LayerResidual = PLAIN_RESIDUAL,
    gathers_tp_input: bool = True,
) -> StageDeclaration:
    """Describe a token-mixing stage.

    ``gathers_tp_input`` tells whether it takes a TP-divided input in an input-scattered batch.
    Raises DeclarationError for a reduction that only FFNs have.
    """
    if reduction is ProducerReduction.LOCAL_TAIL:
        raise DeclarationError("LOCAL_TAIL is not supported for attention stages")
    return StageDeclaration(
        kind=StageKind.ATTN,
        reduction=reduction,
        read=residual.read,
        update=residual.update,
        gathers_tp_input=gathers_tp_input,
    )


def declare_ffn(
    *,
    reduction: ProducerReduction = ProducerReduction.SCOPED,
    residual: LayerResidual = PLAIN_RESIDUAL,
    transform: OutputTransform | None = None,
    sparse: bool = False,
    next_sparse: bool = False,
) -> StageDeclaration:
    """Describe a feed-forward stage; ``transform`` works on its output before the update.

    Raises DeclarationError for PARTIAL, which is attention's, and for sparse (MoE) stages, which
    have no paths in this version.
    """
    if sparse or next_sparse:
        raise DeclarationError("sparse ffn stages have no boundary paths in this version")
    if reduction is ProducerReduction.PARTIAL:
        raise DeclarationError("PARTIAL is not supported for ffn stages")
    return StageDeclaration(
        kind=StageKind.FFN,
        reduction=reduction,
        read=residual.read,
        update=residual.update,
        transform=transform,
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
        if declaration.previous or declaration.prepared_from or declaration.terminal:
            raise DeclarationError(
                f"stage {index} already carries previous, prepared_from or terminal; give them to "
                "make_stages"
            )
        last = index == len(declarations) - 1
        source = linked[-1] if linked else previous
        linked.append(replace(declaration, previous=source, terminal=terminal and last))
    if previous is not None:
        _require_declaration(previous, "previous")
    return tuple(linked)


def make_stages(
    *items: tuple[StageDeclaration, Any] | tuple[StageDeclaration, Any, Mapping[str, Any]],
    previous: StageDeclaration | None = None,
    following: StageDeclaration | None = None,
    prepared_from: StageDeclaration | None = None,
    terminal: bool = False,
    mesh: Mesh | None = None,
) -> tuple[StageBoundary, ...]:
    """Assemble local stages in order; returns one independent boundary per item.

    An item is ``(declaration, norm)`` or ``(declaration, norm, options)``. ``previous`` is the
    producer before the first stage (None at the stack's entry), ``following`` the consumer after
    the last one (its own ``previous`` may be left out: it is the last stage here), ``terminal``
    marks the end of the model's stack. Without ``mesh`` one rank holds everything.

    Raises DeclarationError for declarations that do not fit together and for an edge that has no
    correct transition on the mesh.
    """
    if prepared_from is not None:
        raise DeclarationError(
            "previous and prepared_from are mutually exclusive; expected one of them"
            if previous is not None
            else "prepared_from needs branches, which have no paths in this version; expected "
            "previous"
        )
    declarations, norms = _split_items(items)
    linked = link_stages(*declarations, previous=previous, terminal=terminal)
    _require_consistent(linked[-1], following)
    mesh = mesh or Mesh()
    boundaries: list[StageBoundary] = []
    latents = [_latent_of(item) for item in items]
    parts = zip(linked, norms, latents, strict=True)
    for index, (declaration, norm, latent) in enumerate(parts):
        last = index == len(linked) - 1
        after = following if last else linked[index + 1]
        # The next local stage vouches for the residual that this stage's read produces.
        untouched = not last and linked[index + 1].read.keeps_residual
        stage = build_stage(declaration, _neighbour(after), mesh, untouched=untouched)
        boundaries.append(StageBoundary(stage, norm, mesh, latent))
    return tuple(boundaries)


def make_attn_stage(
    declaration: StageDeclaration,
    norm: Any,
    *,
    following: StageDeclaration | None = None,
    qkv_latent_func: Callable[..., Any] | None = None,
    fusions: Any = None,
    mesh: Mesh | None = None,
) -> StageBoundary:
    """Bind one attention stage whose declaration carries its source."""
    options = {"qkv_latent_func": qkv_latent_func, "fusions": fusions}
    return _make_stage(StageKind.ATTN, (declaration, norm, options), following, mesh)


def make_ffn_stage(
    declaration: StageDeclaration,
    norm: Any,
    *,
    following: StageDeclaration | None = None,
    fusions: Any = None,
    mesh: Mesh | None = None,
) -> StageBoundary:
    """Bind one feed-forward stage whose declaration carries its source."""
    return _make_stage(StageKind.FFN, (declaration, norm, {"fusions": fusions}), following, mesh)


def _make_stage(
    kind: StageKind,
    item: tuple[StageDeclaration, Any, Mapping[str, Any]],
    following: StageDeclaration | None,
    mesh: Mesh | None,
) -> StageBoundary:
    _require_declaration(item[0], "declaration")
    if item[0].kind is not kind:
        raise DeclarationError(
            f"a {item[0].kind.value} declaration cannot make a stage of kind {kind.value}"
        )
    declaration = _with_options(0, item[0], item[2])
    if declaration.previous is not None and declaration.prepared_from is not None:
        raise DeclarationError("previous and prepared_from are mutually exclusive")
    if following is not None and following.previous is None:
        raise DeclarationError("following must name this stage in its previous")
    _require_consistent(item[0], following)
    mesh = mesh or Mesh()
    stage = build_stage(declaration, _neighbour(following), mesh)
    return StageBoundary(stage, item[1], mesh, _latent_of(item))


def _split_items(items: Sequence[tuple[Any, ...]]) -> tuple[list[StageDeclaration], list[Any]]:
    declarations, norms = [], []
    for index, item in enumerate(items):
        if not isinstance(item, tuple) or len(item) not in (2, 3):
            raise DeclarationError(
                f"stage {index} must be (declaration, norm) or (declaration, norm, options), "
                f"found {item!r}"
            )
        _require_declaration(item[0], f"stage {index}")
        options = item[2] if len(item) == 3 else {}
        declarations.append(_with_options(index, item[0], options))
        norms.append(item[1])
    return declarations, norms


def _with_options(index: int, declaration: StageDeclaration, options: Any) -> StageDeclaration:
    known = ATTENTION_OPTIONS if declaration.kind is StageKind.ATTN else FFN_OPTIONS
    if not isinstance(options, Mapping):
        raise DeclarationError(f"stage {index}: options must be a mapping, found {options!r}")
    for name in options:
        if name not in known:
            raise DeclarationError(
                f"stage {index}: an {declaration.kind.value} stage takes "
                + one_of("option", name, known)
            )
    if options.get("fusions") is not None:
        raise DeclarationError(
            f"stage {index}: fusion providers are not supported in this version; expected none"
        )
    if options.get("qkv_latent_func") is None:
        return declaration
    return replace(declaration, latent_input=True)


def _latent_of(item: tuple[Any, ...]) -> Callable[[Any], Any] | None:
    return item[2].get("qkv_latent_func") if len(item) == 3 else None


def _neighbour(following: StageDeclaration | None) -> StageDeclaration | None:
    """A consumer as its producer sees it: what matters is its kind, not its own neighbours."""
    return None if following is None else replace(following, previous=None, terminal=False)


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
