"""Lines between compute stages: declarations, their plans, and the residual stream.

The public names are loaded on first use. Nothing in the package imports torch when it is imported,
so that declarations can be planned without it.
"""

from __future__ import annotations

import importlib

_HOMES = {
    "BatchVariant": "layout",
    "Layout": "layout",
    "ProducerReduction": "contracts",
    "StageBoundary": "stage",
    "StageDeclaration": "contracts",
    "StageKind": "contracts",
    "SumGroup": "layout",
    "TokenAxis": "layout",
    "declare_attn": "factories",
    "declare_ffn": "factories",
    "get_forward": "exit",
    "make_attn_stage": "factories",
    "make_ffn_stage": "factories",
    "make_stages": "factories",
}
__all__ = sorted(_HOMES)  # noqa: PLE0605


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
