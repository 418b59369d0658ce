"""Layline: an LLM inference engine built around what crosses a line.

Importing this package imports neither torch nor transformers; what it offers is loaded when first
used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from layline.engine.answers import Submission
    from layline.engine.async_engine import AsyncEngine
    from layline.engine.llm import LLM
    from layline.grammar import Grammar
    from layline.sampling import SamplingParams

__version__ = "0.1.0.dev0"
__all__ = ["LLM", "AsyncEngine", "Grammar", "SamplingParams", "Submission", "__version__"]

_HOMES = (
    ("LLM", "layline.engine.llm"),
    ("AsyncEngine", "layline.engine.async_engine"),
    ("Submission", "layline.engine.answers"),
    ("Grammar", "layline.grammar"),
    ("SamplingParams", "layline.sampling"),
)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> object:
    for public, home in _HOMES:
        if name == public:
            return getattr(import_module(home), name)
    raise AttributeError(f"module 'layline' has no attribute {name!r}")
