"""Layline: an LLM inference engine built around what crosses a line.

Importing this package imports neither torch nor transformers; ``LLM``, ``SamplingParams`` and
``Grammar`` are loaded when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from layline.engine.llm import LLM
    from layline.grammar import Grammar
    from layline.sampling import SamplingParams

__version__ = "0.1.0.dev0"
__all__ = ["LLM", "Grammar", "SamplingParams", "__version__"]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> object:
    if name == "LLM":
        from layline.engine.llm import LLM

        return LLM
    if name == "SamplingParams":
        from layline.sampling import SamplingParams

        return SamplingParams
    if name == "Grammar":
        from layline.grammar import Grammar

        return Grammar
    raise AttributeError(f"module 'layline' has no attribute {name!r}")
