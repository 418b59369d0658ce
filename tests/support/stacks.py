"""Stages of every kind a dense stack can have, and short stacks that hold every edge between two.

No torch here: the stacks are planned and simulated, or run by whoever has compute for them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from layline.boundary.contracts import OutputTransform, ProducerReduction, StageDeclaration
from layline.boundary.factories import declare_attn, declare_ffn, link_stages
from layline.boundary.residual import LayerResidual
from layline.boundary.residual.add_norm import PlainRead, PlainUpdate


@dataclasses.dataclass(frozen=True)
class WeightedUpdate(PlainUpdate):
    """residual + weight x output: not plain, so it may join no sum."""

    plain: bool = False
    weight: float = 2.0

    def apply(self, output: Any, residual: Any) -> Any:
        return residual + self.weight * output


def triple(x: Any) -> Any:
    return x * 3


@dataclasses.dataclass(frozen=True)
class WritingRead(PlainRead):
    """Adds the output into the residual it is given, as a fused kernel may."""

    keeps_residual: bool = False

    def update_and_read(self, update: Any, output: Any, residual: Any, norm: Any) -> Any:
        residual += output
        return norm(residual), residual


def _residual(read: PlainRead | None = None, **update: Any) -> LayerResidual:
    made = PlainUpdate() if not update else WeightedUpdate(**update)
    return LayerResidual(read=read or PlainRead(), update=made)


SCOPED = ProducerReduction.SCOPED
BEFORE_GATHER = PlainRead(before_gather=True)
STAGES: dict[str, StageDeclaration] = {
    "attention": declare_attn(),
    "mixer": declare_attn(reduction=SCOPED),
    "whole-input mixer": declare_attn(reduction=SCOPED, gathers_tp_input=False),
    "latent attention": dataclasses.replace(declare_attn(), latent_input=True),
    "weighted attention": declare_attn(residual=_residual(weight=2.0)),
    "writing attention": declare_attn(residual=_residual(at_producer=True)),
    "ffn": declare_ffn(),
    "tail ffn": declare_ffn(reduction=ProducerReduction.LOCAL_TAIL),
    "transform ffn": declare_ffn(transform=OutputTransform(triple)),
    "linear transform ffn": declare_ffn(transform=OutputTransform(triple, True)),
    "weighted ffn": declare_ffn(residual=_residual(weight=2.0)),
    "writing ffn": declare_ffn(residual=_residual(at_producer=True)),
    "writing plain ffn": declare_ffn(residual=_residual(at_producer=True, plain=True, weight=1.0)),
    "early reading ffn": declare_ffn(residual=_residual(BEFORE_GATHER)),
    "writing read ffn": declare_ffn(residual=_residual(WritingRead())),
    "odd reading ffn": declare_ffn(residual=_residual(PlainRead(plain=False))),
}


def link(names: Iterable[str], *, terminal: bool = True) -> tuple[StageDeclaration, ...]:
    """The named stages as one stack."""
    return link_stages(*(STAGES[name] for name in names), terminal=terminal)


def every_edge(names: Sequence[str], length: int) -> Iterator[tuple[str, ...]]:
    """Stacks of up to ``length`` stages in which each ordered pair of ``names`` meets once."""
    walk = _euler(names)
    for first in range(0, len(walk) - 1, length - 1):
        yield tuple(walk[first : first + length])


def _euler(names: Sequence[str]) -> list[str]:
    """A walk over every ordered pair once, pairs of one name with itself too (Hierholzer)."""
    left = {name: list(names) for name in names}
    walk: list[str] = []
    path = [names[0]]
    while path:
        here = left[path[-1]]
        if here:
            path.append(here.pop())
        else:
            walk.append(path.pop())
    return walk[::-1]
